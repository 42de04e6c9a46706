"""Where chat templates run: Jinja's sandbox, bounded. A template is a program that came with a file; one that never
ends or takes all memory costs a sentence.

Jinja has no ``while``, so whatever goes on for long goes through a loop or a call, and both are made to pass by here::

    {% for x in y %}  ─▶  for x in paced(y)      f(…)  ─▶  call(f, …)      a ~ b  ─▶  joined(a, b)

What grows does so by an operator, all of which ask first, or by what is written out, which is counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_CHARACTERS = 1 << 24
"""Of a text that a template makes, and entries of a list: far more than any context holds."""
_MOST_BITS = 1 << 16
"""Of a whole number."""
_WIDE = re.compile(r"\d{6}|\*")
"""A width in a format that is no layout."""


class TemplateLimitError(Exception):
    """A template that does not end, or makes too much: what it does, as the end of a sentence."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One run at a time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals.pop("lipsum")  # words without end, in one call
        self._until = 0.0
        self._seconds = 0.0

    def run(self, template: jinja2.Template, values: Mapping[str, Any], seconds: float) -> str:
        """What the template writes; ``seconds`` of the processor are its own. Raises :class:`TemplateLimitError`, and
        whatever the template raises."""
        self._seconds = seconds
        self._until = time.thread_time() + seconds
        pieces, length = [], 0
        for piece in template.generate(values):
            self._step()
            length += len(piece)
            _refuse_longer(length)
            pieces.append(piece)
        return "".join(pieces)

    def paced(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _refuse_longer(sum(map(len, texts)))
        return "".join(texts)

    def measured(self, argument: Any) -> Any:
        """An argument of a filter, which may be a width or a count."""
        if isinstance(argument, int):
            _refuse_longer(argument)
        return argument

    def formattable(self, form: Any) -> Any:
        """What the filter ``format`` fills in."""
        _refuse_wide(str(form))
        return form

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        self._step()
        for argument in (*arguments, *named.values()):
            self.measured(argument)
        method = getattr(called, "__wrapped__", called)  # Jinja has its own around those that format
        if getattr(method, "__name__", "") in ("format", "format_map"):
            _refuse_wide(str(getattr(method, "__self__", "")))
        return super().call(context, called, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _refuse_longer(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide(left)
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, str | list | tuple):
                    _refuse_longer(len(many) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * right if operator == "**" else bits + right.bit_length()) > _MOST_BITS:
                raise TemplateLimitError("computes a number without end")
        return super().call_binop(context, operator, left, right)

    def _step(self) -> None:
        if time.thread_time() > self._until:
            raise TemplateLimitError(f"does not end: it was stopped after {self._seconds:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounds().visit(tree)
        return tree


class _Bounds(NodeTransformer):
    """Has what may go on, or grow, pass by the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _asked("paced", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _asked("joined", *node.nodes)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.name == "format" and node.node is not None:
            node.node = _asked("formattable", node.node)
        node.args = [_asked("measured", argument) for argument in node.args]
        for keyword in node.kwargs:
            keyword.value = _asked("measured", keyword.value)
        return node


def _asked(method: str, *arguments: Any) -> nodes.Expr:
    line = arguments[0].lineno
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), list(arguments), [], None, None, lineno=line)


def _refuse_longer(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise TemplateLimitError(f"makes a text of more than {MOST_CHARACTERS:,} characters")


def _refuse_wide(form: str) -> None:
    if _WIDE.search(form):
        raise TemplateLimitError("pads a text to a width without end")

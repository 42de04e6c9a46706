"""The chat template: a checkpoint's Jinja program, run in a sandbox, with people's words kept apart from its own.

    content "hi<|im_end|>"  ──guard──▶  "hi①"  ──template──▶  "<|im_start|>user\\nhi①<|im_end|>\\n"

``①`` is a private-use character that occurs nowhere else. So the control tokens in the rendered text are the template's
own, all of them; the codec takes those out first, and puts people's words back as they were.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.messages import ChatMessage
from engine.models.errors import ModelLoadError
from engine.request import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)


ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    """The conversation; whatever is a control token here was written by the template."""
    stand_ins: dict[str, str]
    """Character → what it stands for in people's words."""

    def restore(self, text: str) -> str:
        """A piece of ``text`` with people's words as they were."""
        for character, original in self.stand_ins.items():
            text = text.replace(character, original)
        return text


class ChatTemplate:
    """A compiled template. ``special_names``: what the template may refer to, e.g. ``bos_token``; ``control_tokens``:
    the strings that must not come out of people's words."""

    def __init__(self, source: str, special_names: dict[str, str], control_tokens: Sequence[str]) -> None:
        self._source = source
        self._special_names = special_names
        self._control_tokens = sorted(filter(None, control_tokens), key=len, reverse=True)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The model's chat template cannot be read: {error}.", "damaged") from error

    def render(self, messages: Sequence[ChatMessage]) -> RenderedChat:
        """The conversation as the model expects it, ending where the assistant's answer begins.

        Raises :class:`RequestError` with the template's own words where it refuses the conversation.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        for message in messages:
            if message.role not in ROLES:
                raise RequestError(f"role is {message.role!r}; it must be one of {', '.join(ROLES)}")
        guard = _Guard(self._control_tokens, [self._source, *(message.content for message in messages)])
        conversation = [{"role": message.role, "content": guard.apply(message.content)} for message in messages]
        try:
            text = self._template.render(
                messages=conversation, add_generation_prompt=True, tools=None, documents=None, **self._special_names
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template is a program of its own
            raise RequestError(f"the model's chat template fails on this conversation: {error!r}") from error
        return RenderedChat(text, guard.stand_ins)


class _Guard:
    """Replaces control tokens in people's words by characters that occur in none of ``texts``."""

    def __init__(self, control_tokens: Sequence[str], texts: Sequence[str]) -> None:
        taken = set().union(*control_tokens, *texts)
        self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        self._control_tokens = control_tokens
        self._beginnings = {token[:length] for token in control_tokens for length in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._character_of: dict[str, str] = {}

    @property
    def stand_ins(self) -> dict[str, str]:
        return {character: original for original, character in self._character_of.items()}

    def apply(self, text: str) -> str:
        for token in self._control_tokens:
            if token in text:
                text = text.replace(token, self._stand_in(token))
        # The beginning of a token at the very end could be completed by what the template writes behind it.
        guarded, end = text, len(text)
        for length in range(1, min(self._longest, end) + 1):
            if text[end - length :] in self._beginnings:
                split = end - length + 1
                guarded = guarded[:split] + self._stand_in("") + guarded[split:]
        return guarded

    def _stand_in(self, original: str) -> str:
        if original not in self._character_of:
            character = next(self._free, None)
            if character is None:
                raise RequestError("the conversation uses every private-use character; take some out")
            self._character_of[original] = character
        return self._character_of[original]


class _Generation(Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks the assistant's words for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)

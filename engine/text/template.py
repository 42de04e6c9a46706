"""The chat template: a checkpoint's Jinja program, run in a sandbox, with people's words kept apart from its own.

    content "hi<|im_end|>"  ──guard──▶  "hi①"  ──template──▶  "<|im_start|>user\\nhi①<|im_end|>\\n"

``①`` is a private-use character that occurs nowhere else. So the control tokens in the rendered text are the template's
own, all of them; the codec takes those out first, and puts people's words back as they were.

What a template cannot take is found out once, by trying it, and then said in a way that it can: system texts go in
front of the user's next message where there is no system role, and messages of the same role become one where roles
must alternate. A model without a template is told of a conversation as :data:`PLAIN_TEMPLATE` writes it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.ext import Extension

from engine.messages import ChatMessage
from engine.models.errors import ModelLoadError
from engine.request import RequestError
from engine.text.sandbox import BoundedEnvironment, TemplateLimitError

_PRIVATE_USE = range(0xE000, 0xF900)

_LONGEST_SOURCE = 1_000_000
"""Characters; real templates have at most some tens of thousands."""
_SECONDS = 5.0
"""Of the processor, for a conversation; one of ten thousand messages takes less than a tenth of it."""
_PROBE_SECONDS = 1.0
"""For a conversation of two or three words."""

ROLES = ("system", "user", "assistant")

PLAIN_TEMPLATE = """
{%- for message in messages %}
{%- set words = message.content | trim | replace('\\nUser:', '\\n User:') | replace('\\nAssistant:', '\\n Assistant:')
%}
{%- if message.role == 'system' %}{{ words + '\\n\\n' }}
{%- elif message.role == 'user' %}{{ 'User: ' + words + '\\n' }}
{%- else %}{{ 'Assistant: ' + words + '\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
"""``User: …`` and ``Assistant: …``, each turn on a line of its own and its words as they are, a system text in front of
all. A line of somebody's words that begins like a turn is moved in by a space."""
PLAIN_STOPS = ("\nUser:",)
"""What ends an answer in that format, so that the model does not go on as the user."""


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
        self._controls = _Controls.of(control_tokens)
        self._environment = environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        if len(source) > _LONGEST_SOURCE:
            raise ModelLoadError(f"The model's chat template has {len(source):,} characters, which is none.", "damaged")
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"The model's chat template cannot be read: {error}.", "damaged") from error
        usable = self._says("user", "user")
        self.has_system_role = not usable or self._says("system", "system", "user")
        """Whether system texts reach the model as such; some templates raise on them, others leave them out."""
        self._takes_repeats = not usable or self._says("user", "user", "user")

    def _says(self, wanted: str, *roles: str) -> bool:
        """Whether the template takes messages of these roles and writes what the one of role ``wanted`` says."""
        conversation = [{"role": role, "content": f"probe{role}"} for role in roles]
        try:
            return f"probe{wanted}" in self._run(conversation, _PROBE_SECONDS)
        except _OverrunError as error:
            raise ModelLoadError(f"T{str(error)[1:]}.", "damaged") from error
        except RequestError:
            return False

    def render(self, messages: Sequence[ChatMessage], continues: bool = False) -> RenderedChat:
        """The conversation as the model expects it, ending where the assistant's answer begins.

        ``continues``: the last message is an answer that goes on. The text ends right behind it: it is what the model
        was given for that answer, and then the answer as it wrote it, thoughts and white space included.

        Raises :class:`RequestError` with the template's own words where it refuses the conversation.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        for message in messages:
            if message.role not in ROLES:
                raise RequestError(f"role is {message.role!r}; it must be one of {', '.join(ROLES)}")
        begun = ""
        if continues:
            *messages, last = messages
            if last.role != "assistant" or not messages:
                raise RequestError("only an assistant's message that answers another can go on")
            begun = last.content
        told = self._adapted(messages)
        guard = _Guard(self._controls, [self._source, begun, *(message.content for message in told)])
        conversation = [{"role": message.role, "content": guard.apply(message.content)} for message in told]
        return RenderedChat(self._run(conversation, _SECONDS) + guard.apply(begun), guard.stand_ins)

    def _adapted(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """The messages as this template can take them."""
        if not self.has_system_role:
            messages = _fold_system(messages)
        return messages if self._takes_repeats else _join_repeats(messages)

    def _run(self, conversation: list[dict[str, str]], seconds: float) -> str:
        values = {"messages": conversation, "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._environment.run(self._template, values | self._special_names, seconds)
        except TemplateLimitError as error:
            raise _OverrunError(f"the model's chat template {error}") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template is a program of its own
            raise RequestError(f"the model's chat template fails on this conversation: {error!r}") from error


class _OverrunError(RequestError):
    pass


def _fold_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """System texts in front of the user's next message; behind the last one, as a message of the user's."""
    folded: list[ChatMessage] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting += [message.content] if message.content.strip() else []
        elif waiting and message.role == "user":
            folded.append(ChatMessage("user", "\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            folded.append(message)
    return [*folded, ChatMessage("user", "\n\n".join(waiting))] if waiting else folded


def _join_repeats(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            joined[-1] = ChatMessage(message.role, f"{joined[-1].content}\n\n{message.content}")
        else:
            joined.append(message)
    return joined


@dataclass(frozen=True, slots=True)
class _Controls:
    """The strings that must not come out of people's words, prepared for looking for them."""

    tokens: tuple[str, ...]
    """Longest first."""
    first_characters: frozenset[str]
    beginnings: frozenset[str]
    """All that could be completed to one."""
    longest_beginning: int

    @classmethod
    def of(cls, tokens: Sequence[str]) -> _Controls:
        ordered = tuple(sorted(tokens, key=len, reverse=True))
        beginnings = frozenset(token[:length] for token in ordered for length in range(1, len(token)))
        return cls(ordered, frozenset(token[0] for token in ordered), beginnings, max(map(len, beginnings), default=0))


class _Guard:
    """Replaces control tokens in people's words by characters that occur in none of ``texts``."""

    def __init__(self, controls: _Controls, texts: Sequence[str]) -> None:
        self._controls = controls
        self._texts = texts
        self._free: Iterator[str] | None = None
        self._character_of: dict[str, str] = {}

    @property
    def stand_ins(self) -> dict[str, str]:
        return {character: original for original, character in self._character_of.items()}

    def apply(self, text: str) -> str:
        controls = self._controls
        if any(character in text for character in controls.first_characters):
            for token in controls.tokens:
                if token in text:
                    text = text.replace(token, self._stand_in(token))
        # The beginning of a token at the very end could be completed by what the template writes behind it.
        guarded, end = text, len(text)
        for length in range(1, min(controls.longest_beginning, end) + 1):
            if text[end - length :] in controls.beginnings:
                split = end - length + 1
                guarded = guarded[:split] + self._stand_in("") + guarded[split:]
        return guarded

    def _stand_in(self, original: str) -> str:
        if original not in self._character_of:
            if self._free is None:
                taken = set().union(*self._controls.tokens, *self._texts)
                self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
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

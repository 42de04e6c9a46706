"""Text to token ids and back: the checkpoint's own ``tokenizer.json`` and chat template, without Transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from engine.failures import is_panic
from engine.messages import ChatMessage
from engine.models.config_values import read_object, shown
from engine.models.errors import ModelLoadError
from engine.text.template import PLAIN_STOPS, PLAIN_TEMPLATE, ChatTemplate
from engine.text.token_bytes import TokenBytes

_BREAK = "\U0010fffe"
"""A noncharacter: stands for "something came before" where a tokenizer treats the beginning of a text specially."""
_PIECES_CHARACTERS = 2_000_000
"""Text of conversations whose ids are kept."""
_LONGEST_CONTROL = 1_000
"""Characters of a control token: every beginning of one is looked for in people's words."""
_CONTROL_FORM = re.compile(r"<\|[^<>|]+\|>")
"""Added tokens of this form steer the model even where the checkpoint forgot to call them special."""


class _Definition(msgspec.Struct):
    """What of a ``tokenizer.json`` is read here; the vocabulary, nearly all of it, is for the library alone."""

    added_tokens: list[dict[str, Any]] = []
    decoder: dict[str, Any] | None = None
    pre_tokenizer: Any = None


class TextCodec:
    """One model's tokenizer and chat template. Made by :meth:`from_folder`."""

    def __init__(self, definition: bytes, config: dict[str, Any], template: str | None) -> None:
        """``definition``: the content of a ``tokenizer.json``; ``config``: that of ``tokenizer_config.json``."""
        parts = msgspec.json.decode(definition, type=_Definition)
        controls = {t["content"] for t in parts.added_tokens if _CONTROL_FORM.fullmatch(t["content"])}
        if not all(t["special"] for t in parts.added_tokens if t["content"] in controls):
            definition = _with_special(definition, controls)
        self._tokenizer = Tokenizer.from_buffer(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = {t["content"]: t for t in parts.added_tokens if t["special"] or t["content"] in controls}
        self._special = {content: token for content, token in special.items() if content}
        _refuse_long(self._special)
        self.special_ids: frozenset[int] = frozenset(token["id"] for token in self._special.values())
        self.bos_token_id = self._named_id(config.get("bos_token"))
        self.eos_token_id = self._named_id(config.get("eos_token"))
        self._never_words = self.special_ids - {self._named_id(config.get("unk_token"))}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        """Entries of the tokenizer; the model's own vocabulary may be larger (padding)."""
        self.token_bytes = TokenBytes(self._tokenizer, parts.decoder, self.special_ids)
        self._continuation = _make_continuation(definition, parts.pre_tokenizer)
        ids = {content: token["id"] for content, token in self._special.items()}
        # Matched with the white space that it swallows, a token is known without.
        self._id_of_control = {content.strip(): token_id for content, token_id in ids.items()} | ids
        self._control = self._control_pattern()
        self._pieces = _Pieces(self._encode_piece)
        self._adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        special_names = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
        special_names = {name: text for name, text in special_names.items() if text}
        self.has_chat_template = template is not None
        """Else conversations are written as :data:`engine.text.template.PLAIN_TEMPLATE` says."""
        self.chat_stops = () if self.has_chat_template else PLAIN_STOPS
        """Strings that end the answer to a conversation, besides the request's own."""
        source = PLAIN_TEMPLATE if template is None else template
        self._template = ChatTemplate(source, special_names, tuple(self._special))

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """The codec of a checkpoint's folder. Raises :class:`ModelLoadError`."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelLoadError(
                f"{folder} has no tokenizer.json; Batchscope reads no other tokenizer format. Save it once with "
                "Transformers' fast tokenizer.",
                "unsupported" if (folder / "tokenizer.model").exists() else "damaged",
            )
        try:
            if not path.is_file():  # reading a pipe would wait for ever
                raise ValueError("tokenizer.json is no ordinary file")
            definition = path.read_bytes()
            config_path = folder / "tokenizer_config.json"
            config = read_object(config_path) if config_path.exists() else {}
            return cls(definition, config, _find_template(folder, config))
        except ModelLoadError:
            raise
        except BaseException as error:  # the tokenizers library raises bare Exception, or panics
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ModelLoadError(f"The tokenizer in {folder} cannot be read: {error}.", "damaged") from error

    @property
    def has_system_role(self) -> bool:
        """Whether the template takes system messages; else they are put in front of the user's next one."""
        return self._template.has_system_role

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, exactly as the reference tokenizer gives them: control tokens written out in the text
        are control tokens, and a beginning-of-sequence id is added where the tokenizer adds one."""
        return _ids(self._tokenizer, text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage], continues: bool = False) -> list[int]:
        """Ids of a conversation through the model's template, ready for the assistant's answer, or ending right behind
        the last message, an answer that goes on, where it ``continues``.

        What people wrote never becomes a control token, whatever it looks like. Raises :class:`RequestError` where the
        conversation is empty or the template refuses (its own words are passed on).
        """
        rendered = self._template.render(messages, continues)
        ids: list[int] = []
        self._tokenizer.encode_special_tokens = True
        try:
            position = 0
            for match in self._control.finditer(rendered.text) if self._control else ():
                ids += self._pieces.ids(rendered.restore(rendered.text[position : match.start()]), position == 0)
                found = match[0]
                ids.append(self._id_of_control[found if found in self._id_of_control else found.strip()])
                position = match.end()
            ids += self._pieces.ids(rendered.restore(rendered.text[position:]), position == 0)
        finally:
            self._tokenizer.encode_special_tokens = False
        if self._adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def different_token(self, other: TextCodec) -> int | None:
        """The first id that stands for something else in the ``other``'s vocabulary; None where all are the same."""
        own = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        others = {token_id: token for token, token_id in other._tokenizer.get_vocab().items()}
        return min((i for i in own.keys() | others.keys() if own.get(i) != others.get(i)), default=None)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes.decode(ids)

    def _encode_piece(self, text: str, first: bool) -> list[int]:
        """Ids of words between two control tokens, none of them a control token; ``encode_special_tokens`` is set."""
        if not text:
            return []
        if first or self._continuation is None or _BREAK in text:
            ids = _ids(self._tokenizer, text, add_special_tokens=False)
        else:
            ids = _ids(self._continuation, _BREAK + text, add_special_tokens=False)[1:]
        # A vocabulary may reach a control token from plain characters too; words may not.
        return [token_id for token_id in ids if token_id not in self._never_words]

    def _named_id(self, name: Any) -> int | None:
        text = _text(name)
        return self._tokenizer.token_to_id(text) if text else None

    def _control_pattern(self) -> re.Pattern[str] | None:
        """Leftmost, longest control token with the white space that it swallows, as the tokenizer finds them."""
        contents = sorted(self._special, key=len, reverse=True)
        if not contents:
            return None
        alternatives = []
        for content in contents:
            token = self._special[content]
            left, right = (r"\s*" if token.get(side) else "" for side in ("lstrip", "rstrip"))
            alternatives.append(f"{left}{re.escape(content)}{right}")
        return re.compile("|".join(alternatives))


class _Pieces:
    """Ids of the pieces of conversations, kept: a conversation that grew by a message, or is asked for once more
    without its oldest, is nearly all the same pieces."""

    def __init__(self, encode: Callable[[str, bool], list[int]]) -> None:
        self._encode = encode
        self._kept: dict[tuple[str, bool], list[int]] = {}
        """The oldest first."""
        self._characters = 0

    def ids(self, text: str, first: bool) -> list[int]:
        key = (text, first)
        found = self._kept.pop(key, None)
        if found is None:
            found = self._encode(text, first)
            self._characters += len(text)
        self._kept[key] = found
        while self._characters > _PIECES_CHARACTERS:
            oldest = next(iter(self._kept))
            self._characters -= len(oldest[0])
            del self._kept[oldest]
        return found


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RuntimeError(f"the tokenizer gave up ({error})") from error


def _refuse_long(contents: Iterable[str]) -> None:
    for content in contents:
        if len(content) > _LONGEST_CONTROL:
            raise ModelLoadError(
                f"The tokenizer has a control token of {len(content):,} characters, {shown(content)}; it is damaged.",
                "damaged",
            )


def _with_special(definition: bytes, contents: set[str]) -> bytes:
    """The definition with the added tokens of these contents marked as special."""
    whole = json.loads(definition)
    for token in whole["added_tokens"]:
        token["special"] = token["special"] or token["content"] in contents
    return json.dumps(whole).encode()


def _make_continuation(definition: bytes, pre_tokenizer: Any) -> Tokenizer | None:
    """A second tokenizer for pieces behind a control token, where the first treats a text's beginning specially."""
    if '"prepend_scheme": "first"' not in json.dumps(pre_tokenizer):
        return None
    tokenizer = Tokenizer.from_buffer(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_tokens([AddedToken(_BREAK, normalized=False, special=False)])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _text(token: Any) -> str:
    """A special token of ``tokenizer_config.json``: a string, or an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """``chat_template.jinja``, else the string or the one named ``default`` in ``tokenizer_config.json`` or, as the
    processors of older checkpoints have it, in ``chat_template.json``."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    path = folder / "chat_template.json"
    if template is None and path.exists():
        template = read_object(path).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None

"""What bytes each token stands for, so that a stream of tokens is a stream of bytes and text is its UTF-8.

Decoding by bytes is exact and costs the same for the first token of an answer and the ten-thousandth::

    ids     [ 240 159 ]      [ 152 ]     [ 128 32 111 ]
    bytes    F0 9F            98          80 20 6F
    text     (held)           (held)      "😀 o"

It follows the decoders that ``tokenizer.json`` describes: byte-level BPE (GPT-2's alphabet) and SentencePiece's (``▁``
for a space, ``<0xNN>`` for a byte, the first space of a text dropped).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from engine.models.errors import ModelLoadError

_ALL = 1 << 30
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


class TokenBytes:
    """Bytes of each token, after the decoder of a ``tokenizer.json``. Raises :class:`ModelLoadError` on one unknown."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._cache: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._first_spaces = 0
        self._separator = b"" if decoder else b" "
        for step in _steps(decoder):
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
            # Metaspace drops all of the first token's, Strip as many as it says.
            self._first_spaces = 0 if step.get("prepend_scheme", "always") == "never" else _ALL
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self._first_spaces = step["start"]
        elif kind != "Fuse":
            raise ModelLoadError(f"The tokenizer's decoder {kind!r} is not supported.", "unsupported")

    def of(self, token_id: int) -> bytes:
        """Bytes of one token inside a text; none for a control token or an id the tokenizer does not have."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if all(character in _ALPHABET for character in token):
                return bytes(_ALPHABET[character] for character in token)
            return token.encode("utf-8", "surrogatepass")
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "surrogatepass")

    def stream(self) -> ByteStream:
        """A decoder that has read nothing yet."""
        return ByteStream(self._first_spaces, self._separator)

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join([stream.push(self.of(token_id)) for token_id in ids]) + stream.flush()


class ByteStream:
    """Bytes of tokens in, text out; holds at most the three bytes of an unfinished character.

    A byte that cannot go on what is held gives one U+FFFD for the held ones (the longest valid beginning, as Unicode
    recommends), so invalid bytes are never held for long.
    """

    def __init__(self, first_spaces: int, separator: bytes) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first_spaces = first_spaces
        self._separator = separator
        self._begun = False

    def push(self, piece: bytes) -> str:
        """Text that is certain after these bytes of one token."""
        if not piece:
            return ""
        if not self._begun:
            self._begun = True
            spaces = len(piece) - len(piece.lstrip(b" "))
            piece = piece[min(spaces, self._first_spaces) :]
        elif self._separator:
            piece = self._separator + piece
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The end: one U+FFFD where a character was left unfinished."""
        return self._utf8.decode(b"", final=True)


def _steps(decoder: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    if decoder is None:
        return ()
    return decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)

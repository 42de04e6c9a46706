"""Reads a JSON array that is larger than memory should be: entry by entry, out of chunks."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 18
MAX_ENTRY_CHARS = 1 << 26
"""Longest entry; what is longer has no end."""


def array_entries(file: BinaryIO) -> Iterator[Any]:
    """The entries of a JSON array, one after the other, holding one of them and a chunk; None, as the last, where an
    entry cannot be read or has no end."""
    decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
    scanner, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, ended, wanted = decode(file.read(CHUNK_BYTES)), False, CHUNK_BYTES
    at = text.index("[") + 1
    while True:
        at = between.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at < len(text):
            if text[at] == "]":
                return
            try:
                entry, at = scanner.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError):
                if ended or len(text) - at > MAX_ENTRY_CHARS:
                    yield None
                    return
            else:
                wanted = CHUNK_BYTES
                yield entry
                continue
        elif ended:
            return
        data = file.read(wanted)
        ended, wanted = not data, 2 * wanted  # so that a long entry is begun again only a few times
        text, at = text[at:] + decode(data, ended), 0

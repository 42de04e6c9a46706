"""The formats that traces come in: a request from one of their rows. :mod:`engine.trace_kinds` tells them apart.

=================  ========================================================  =====================================
ShareGPT json      ``[{id, conversations: [{from, value}]}]``                first question and answer, as texts
Azure LLM csv      ``TIMESTAMP,ContextTokens,GeneratedTokens``               dates with a fraction or without
BurstGPT csv       ``Timestamp,…,Request tokens,Response tokens,…``          seconds; 0 response tokens: a failure
Mooncake jsonl     ``timestamp, input_length, output_length, hash_ids``      ms; equal ids: equal 512-token blocks
vLLM custom jsonl  ``prompt``, optional ``output_tokens``                    texts
Batchscope jsonl   see :mod:`engine.workload_files`                          a bad line is an error, not rejected
=================  ========================================================  =====================================

Texts stay texts: whoever has the tokeniser makes tokens of them. The length of a ShareGPT answer is therefore taken as
a token for every four bytes. Traces of token counts get synthetic prompts and answers of just the recorded length.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec

from engine.json_array import array_entries
from engine.load_shapes import MAX_DRAWN_LENGTH
from engine.workload_files import (
    BATCHSCOPE,
    WorkloadRequest,
    estimated_tokens,
    parse_row,
    request_seed,
)

CUSTOM_OUTPUT_TOKENS = 256
"""Longest answer to a vLLM custom prompt that names none, as ``vllm bench serve`` has it; the model may end it."""
MOONCAKE_BLOCK = 512
"""Tokens of a block that a hash id stands for."""
ASKING = ("human", "user")
ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")
MALFORMED = "malformed JSON"
UNREADABLE_INSTANT = "a timestamp that cannot be read"


class Rejected(Exception):
    """A row that gives no request; the message is the reason, alike for all rows of its kind."""


class TraceClock:
    """Turns the instants of a trace into arrivals, seconds after its first row, ``time_scale`` times as fast."""

    def __init__(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self.earliest = 0.0
        """Below 0 where a row is older than the first: the rows are not in order of time."""
        self._origin: int | None = None

    def arrival(self, nanoseconds: int) -> float:
        if self._origin is None:
            self._origin = nanoseconds
        seconds = (nanoseconds - self._origin) / 1e9 / self.time_scale
        self.earliest = min(self.earliest, seconds)
        return seconds


class TraceFormat(Protocol):
    name: str

    def rows(self, file: BinaryIO) -> Iterator[Any]:
        """What :meth:`take` takes, one for each row; reads no further ahead than a chunk."""
        ...

    def take(self, row: Any, index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        """The request of a row, ``index`` of those taken. Raises :class:`Rejected`."""
        ...


def _tokens(value: int, what: str) -> int:
    if value < 1:
        raise Rejected(f"{value} {what} tokens")
    if value > MAX_DRAWN_LENGTH:
        raise Rejected(f"more than {MAX_DRAWN_LENGTH:,} {what} tokens")
    return value


# Tables --------------------------------------------------------------------------------------------------------------


_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|[+-]\d\d:?\d\d)?")


class Dates:
    """Nanoseconds since the epoch of dates of any number of fraction digits; a date without a zone is UTC."""

    def __init__(self) -> None:
        self._last: tuple[str, str, str | None] = ("", "", None)
        self._seconds = 0

    def __call__(self, text: str) -> int:
        match = _DATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(text)
        day, clock, fraction, zone = match.groups()
        if (day, clock, zone) != self._last:  # rows of one second come together
            moment = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in (None, 'Z') else zone}")
            self._seconds = round(moment.astimezone(UTC).timestamp())
            self._last = (day, clock, zone)
        return self._seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


def from_seconds(text: str) -> int:
    return round(float(text) * 1e9)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise
        return int(value)


class Table:
    """A csv whose header names the columns, in whatever order."""

    def __init__(
        self,
        name: str,
        header: list[str],
        columns: tuple[str, str, str],
        instant: Callable[[str], int],
        empty_answer: str,
    ) -> None:
        self.name = name
        self._columns = [header.index(column) for column in columns]
        self._width = max(self._columns) + 1
        self._instant = instant
        self._empty_answer = empty_answer

    def rows(self, file: BinaryIO) -> Iterator[list[str] | None]:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline=""))
        next(reader)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error:
                yield None
                continue
            if row:
                yield row

    def take(self, row: list[str] | None, index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        if row is None or len(row) < self._width:
            raise Rejected("fewer columns than the header names")
        when, prompt, output = (row[column] for column in self._columns)
        try:
            lengths = _whole(prompt), _whole(output)
        except (ValueError, OverflowError):
            raise Rejected("a token count that is no whole number") from None
        if lengths[1] == 0:
            raise Rejected(self._empty_answer)
        prompt_tokens, output_tokens = _tokens(lengths[0], "prompt"), _tokens(lengths[1], "output")
        try:
            instant = self._instant(when)
        except (ValueError, OverflowError):
            raise Rejected(UNREADABLE_INSTANT) from None
        return WorkloadRequest(
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
            arrival_s=clock.arrival(instant),
            seed=request_seed(seed, index),
            clip=True,
        )


# Lines of JSON -------------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Those that are not empty, with their numbers from 1."""
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line:
            yield number, line


_R = TypeVar("_R")


def _row(decoder: msgspec.json.Decoder[_R], line: bytes, fault: str) -> _R:
    """Raises :class:`Rejected`, with ``fault`` where it is JSON that is no such row."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError:
        raise Rejected(fault) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Rejected(MALFORMED) from None


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class Mooncake:
    name = "Mooncake jsonl"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_MooncakeRow)

    def rows(self, file: BinaryIO) -> Iterator[bytes]:
        return (line for _, line in _lines(file))

    def take(self, line: bytes, index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        row = _row(self._decoder, line, "timestamp, input_length or output_length is missing or no number")
        prompt_tokens, output_tokens = _tokens(row.input_length, "prompt"), _tokens(row.output_length, "output")
        if not math.isfinite(nanoseconds := row.timestamp * 1e6):
            raise Rejected(UNREADABLE_INSTANT)
        blocks = row.hash_ids[: -(-prompt_tokens // MOONCAKE_BLOCK)]
        return WorkloadRequest(
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
            arrival_s=clock.arrival(round(nanoseconds)),
            seed=request_seed(seed, index),
            prefix=tuple((MOONCAKE_BLOCK, _block_seed(block, seed)) for block in blocks),
            clip=True,
        )


def _block_seed(hash_id: int, seed: int) -> int:
    """Never one of :func:`request_seed`, and within 64 bits."""
    return (1 << 62) + (hash_id + seed * 1_000_003) % (1 << 62)


class _CustomRow(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


class Custom:
    name = "vLLM custom jsonl"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_CustomRow)

    def rows(self, file: BinaryIO) -> Iterator[bytes]:
        return (line for _, line in _lines(file))

    def take(self, line: bytes, index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        row = _row(self._decoder, line, "prompt is no text, or output_tokens no whole number")
        if not row.prompt.strip():
            raise Rejected("an empty prompt")
        output = CUSTOM_OUTPUT_TOKENS if row.output_tokens is None else _tokens(row.output_tokens, "output")
        return WorkloadRequest(
            output_tokens=output, prompt=row.prompt, ignore_eos=row.output_tokens is not None, clip=True
        )


class Batchscope:
    name = BATCHSCOPE

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        return _lines(file)

    def take(self, row: tuple[int, bytes], index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        number, line = row
        request = parse_row(line, f"{self._path}, line {number}", seed, index)
        if clock.time_scale == 1.0:
            return request
        return dataclasses.replace(request, arrival_s=request.arrival_s / clock.time_scale)


# Conversations -------------------------------------------------------------------------------------------------------


class ShareGPT:
    name = "ShareGPT json"

    def __init__(self, *, array: bool) -> None:
        self._array = array

    def rows(self, file: BinaryIO) -> Iterator[Any]:
        return array_entries(file) if self._array else (decoded(line) for _, line in _lines(file))

    def take(self, entry: Any, index: int, seed: int, clock: TraceClock) -> WorkloadRequest:
        if entry is None:
            raise Rejected(f"{MALFORMED}, or the file ends in the middle of an entry")
        question, answer = _first_exchange(entry)
        if not question.strip() or not answer.strip():
            raise Rejected("an empty turn")
        if not _is_unicode(question + answer):
            raise Rejected("a text with half a character (a lone surrogate)")
        return WorkloadRequest(
            output_tokens=_tokens(estimated_tokens(answer), "output"),
            prompt=question,
            clip=True,
        )


def _first_exchange(entry: Any) -> tuple[str, str]:
    """The first question that is answered, and its answer. Raises :class:`Rejected`."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    said = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
    for asked, answered in pairwise(said):
        if asked.get("from") in ASKING and answered.get("from") in ANSWERING:
            question, answer = asked.get("value"), answered.get("value")
            if isinstance(question, str) and isinstance(answer, str):
                return question, answer
    raise Rejected("no two turns: a question and its answer")


def _is_unicode(text: str) -> bool:
    """JSON can write down halves of characters, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None

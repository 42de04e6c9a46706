"""Tells the formats that traces come in (:mod:`engine.trace_formats`) apart by what a file begins with."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.trace_formats import (
    Batchscope,
    Custom,
    Dates,
    Mooncake,
    ShareGPT,
    Table,
    TraceFormat,
    decoded,
    from_seconds,
)
from engine.workload_files import Row, WorkloadError

HEAD_BYTES = 1 << 20
"""Of a file: enough to tell its format by."""
KNOWN = (
    "a ShareGPT json, an Azure LLM csv, a BurstGPT csv, a Mooncake jsonl, a vLLM custom jsonl and a Batchscope jsonl"
)
NO_TEXT = {
    b"\x1f\x8b": "is packed by gzip; unpack it first",
    b"BZh": "is packed by bzip2; unpack it first",
    b"\xfd7zXZ": "is packed by xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "is packed by zstd; unpack it first",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet table; save it as csv or jsonl first",
    codecs.BOM_UTF16_LE: "is text in UTF-16; save it in UTF-8 first",
    codecs.BOM_UTF16_BE: "is text in UTF-16; save it in UTF-8 first",
}
"""How files begin that traces often come in, and what to do with them."""


def recognise(path: Path, head: bytes) -> TraceFormat:
    """The format of a file that begins with ``head``. Raises :class:`WorkloadError` where it is none that is known."""
    for beginning, sentence in NO_TEXT.items():
        if head.startswith(beginning):
            raise WorkloadError(f"{path} {sentence}")
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"["):
        if b'"conversations"' in start:
            return ShareGPT(array=True)
        raise WorkloadError(f"{path} is a JSON array, but not of ShareGPT conversations; known are {KNOWN}")
    if start.startswith(b"{"):
        return _recognise_lines(path, start, whole=len(head) < HEAD_BYTES)
    table = _recognise_table(start)
    if table is not None:
        return table
    if start and b"\0" not in head and (line := _first_line(start)):
        raise WorkloadError(f"{path} is of no known format, it begins with {line[:60]!r}; known are {KNOWN}")
    return Batchscope(path)  # which says what is wrong with the line


def _first_line(start: bytes) -> str:
    """Empty where it is no text."""
    try:
        return re.split(rb"[\r\n]", start, maxsplit=1)[0].decode().strip()
    except UnicodeDecodeError:
        return ""


def _recognise_table(start: bytes) -> TraceFormat | None:
    try:
        names = next(csv.reader([_first_line(start)]), [])
    except csv.Error:
        return None
    header = [re.sub(r"[\s_]", "", name).lower() for name in names]
    if {"timestamp", "contexttokens", "generatedtokens"} <= set(header):
        columns = ("timestamp", "contexttokens", "generatedtokens")
        return Table("Azure LLM csv", header, columns, Dates(), "0 output tokens")
    if {"timestamp", "requesttokens", "responsetokens"} <= set(header):
        columns = ("timestamp", "requesttokens", "responsetokens")
        failure = "0 response tokens: the request failed"
        return Table("BurstGPT csv", header, columns, from_seconds, failure)
    return None


def _recognise_lines(path: Path, start: bytes, *, whole: bool) -> TraceFormat:
    lines = start.splitlines()
    rows = [
        row for line in (lines if whole or len(lines) == 1 else lines[:-1]) if isinstance(row := decoded(line), dict)
    ]
    if not rows:
        return ShareGPT(array=False) if b'"conversations"' in lines[0] else Batchscope(path)
    if "conversations" in rows[0]:
        return ShareGPT(array=False)
    if {"timestamp", "input_length", "output_length"} <= set(rows[0]):
        return Mooncake()
    return Custom() if _is_custom(rows) else Batchscope(path)


def _is_custom(rows: Iterable[dict[str, Any]]) -> bool:
    """Prompts alone, or with lengths that only some of them have: with all of them it is a Batchscope file as well."""
    ours = set(Row.__struct_fields__) - {"prompt", "output_tokens"}
    rows = list(rows)
    return all("prompt" in row and not ours & set(row) for row in rows) and any("output_tokens" not in r for r in rows)

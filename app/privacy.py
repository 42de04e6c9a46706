"""What may be written about a failure: enough to find its cause, and nothing of what was said in a chat.

A log and a bug report hold where something failed and of what kind it was. What an exception says of itself may quote
the text it failed on, so only those kinds are quoted that speak of files, types and memory alone.
"""

from __future__ import annotations

import getpass
import re
import sqlite3
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

QUOTED = (ArithmeticError, AttributeError, ImportError, MemoryError, NameError, RecursionError, SystemError, TypeError)
"""Exceptions whose message names types, modules and numbers; an OSError's is put together from its parts."""
LONGEST_LINE = 400
_SPOKEN = {kind.__name__ for kind in QUOTED} | {
    "AcceleratorError",
    "ModuleNotFoundError",
    "OutOfMemoryError",
    "UnboundLocalError",
    "ZeroDivisionError",
}
_EXCEPTION = re.compile(r"\b((?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Warning|Failure|Exit)))\b(: ?.*)?$")
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+(, in \S+|( in \S+))?$')
_NATIVE = re.compile(
    r"^(Traceback \(most recent call last\)|Fatal Python error|Current thread|Thread 0x|Extension modules:|"
    r"During handling of|The above exception was|\[rank|CUDA |terminate called after|malloc|free\(\)|corrupted |"
    r"double free|munmap|Segmentation fault|Killed|Aborted|Bus error|Illegal instruction|not sent: )"
)
_CUT = "[what it says is left out: it might quote a chat]"


def failure_words(error: BaseException) -> str:
    """The kind of a failure and, where that cannot hold a user's text, what it says."""
    name = type(error).__name__
    if isinstance(error, sqlite3.Error):
        return f"{name}: {getattr(error, 'sqlite_errorname', None) or 'of no known kind'}"
    if isinstance(error, UnicodeError):
        return name
    if isinstance(error, OSError):
        parts = (error.strerror, error.filename, error.filename2)
        return f"{name}: " + ", ".join(str(part) for part in parts if part)
    return f"{name}: {error}" if isinstance(error, QUOTED) and str(error) else name


def failure_lines(error: BaseException, trace: TracebackType | None) -> list[str]:
    """The failure and where it came from: files, lines and functions, without source and values."""
    frames = traceback.extract_tb(trace)
    return [
        failure_words(error),
        *(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames),
    ]


def sentence(text: str) -> str:
    """A sentence of the engine's about a failure, without what an exception in it quotes."""
    match = re.search(r"\b(\w+(?:Error|Exception)): [^)]*", text)
    if match is None or match[1] in _SPOKEN:
        return text[:LONGEST_LINE]
    return (text[: match.end(1)] + text[match.end() :])[:LONGEST_LINE]


def engine_lines(lines: Iterable[str]) -> list[str]:
    """Of what an engine wrote to its error output: frames, kinds of failures and the runtime's own words. Whatever else
    there is, a library's or a template's, is replaced by its length."""
    return [_engine_line(line) for line in lines]


def _engine_line(line: str) -> str:
    if not line.strip() or _FRAME.match(line) or _NATIVE.match(line):
        return line[:LONGEST_LINE]
    match = _EXCEPTION.match(line)
    if match is not None:
        said = match[3] or ""
        return (line if match[2] in _SPOKEN else match[1] + (f": {_CUT}" if said else ""))[:LONGEST_LINE]
    return f"[{len(line):,} characters left out: they might quote a chat]"


def without_names(text: str) -> str:
    """``text`` with the home folder, those of others, and the user's name as ``~``."""
    home = str(Path.home())
    if home not in ("/", ""):
        text = text.replace(home, "~").replace(home.replace("\\", "\\\\"), "~")
    text = re.sub(r"(/home|/Users|[A-Za-z]:\\{1,2}Users)[/\\]+[^/\\\s\"':,;]+", "~", text)
    user = _user()
    return re.sub(rf"(?<![A-Za-z0-9_]){re.escape(user)}(?![A-Za-z0-9_])", "~", text) if user else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name
        return ""

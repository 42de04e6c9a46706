"""Where commands put their results: refused before any work where nothing can be written.

Light: the window's process may import it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO


class OutputFailure(Exception):
    """A result cannot be written; the message says where and why."""


def target_fault(option: str, target: str | Path | None) -> str:
    """Why ``option`` cannot write to ``target``, as a sentence; empty where it can, and for None and ``-``.

    A file is opened for appending: permissions alone do not tell what a mount, or a folder like /proc, allows.
    """
    if target is None or target == "-":
        return ""
    path = Path(target).absolute()
    try:
        if path.is_dir():
            return f"{option} {target}: this is a folder; give the path of a file"
        if not path.parent.is_dir():
            return f"{option} {target}: there is no folder {path.parent}"
        new = not path.exists()
        if not new and not path.is_file():
            return ""  # a pipe or a device: opening it would be felt at its other end
        with path.open("ab"):
            pass
        if new:
            path.resolve().unlink()
    except OSError as error:
        return unwritable(option, target, error)
    return ""


def write_target(option: str, target: str | Path, text: str) -> None:
    """Write a result: readers of the file find what was there before, or all of it. Raises :class:`OutputFailure`."""
    with writing(option, target) as file:
        file.write(text)


@contextlib.contextmanager
def writing(option: str, target: str | Path) -> Iterator[TextIO]:
    """A text file, lines ended as they are given, that takes the place of ``target`` once it is complete; what is no
    regular file, or lies in a folder that takes no other, is written over. Raises :class:`OutputFailure`."""
    try:
        path = Path(target)
        beside = _file_beside(path.resolve()) if path.is_file() or not path.exists() else None
        if beside is None:
            with path.open("w", encoding="utf-8", newline="") as file:
                yield file
            return
        path = path.resolve()
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputFailure(unwritable(option, target, error)) from error


def _file_beside(path: Path) -> Path | None:
    """An empty file in the same folder; None where none can be made there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.touch()
    except PermissionError:
        return None
    return beside


def deliver(target: str | None, text: str, out: TextIO, show: Callable[[], None]) -> None:
    """A command's result where ``--json`` says: ``text`` to ``out`` for ``-``, else :func:`write_target`, and what
    ``show`` prints to ``out``. What cannot be printed is written all the same. Raises :class:`OutputFailure`."""
    try:
        with printing(out):
            if target == "-":
                out.write(text)
            else:
                show()
    finally:
        if target is not None and target != "-":
            write_target("--json", target, text)


def unwritable(option: str, target: str | Path, error: OSError) -> str:
    """What to say of ``error``."""
    return f"{option} {target} cannot be written: {error.strerror or error}"


@contextlib.contextmanager
def printing(stream: TextIO | None) -> Iterator[None]:
    """Around what prints a result to standard output, ``stream``; None is how Python shows a closed one.

    Raises :class:`OutputFailure` where it is closed or takes no more.
    """
    if stream is None:
        raise OutputFailure("standard output is closed: redirect it to a file, or to /dev/null")
    try:
        yield
        stream.flush()
    except OSError as error:
        # Else the interpreter tries again as it ends, and complains in words of its own.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise OutputFailure(f"standard output cannot be written: {error.strerror or error}") from error

"""Kernels compiled at their first call, and kept on disk for the next start.

numba looks only at the file of the kept function to see whether what it kept is still true; these functions are made of
all files of this folder, so the name under which they are kept carries a digest of them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_INNER: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


_NOT_COMPILED = ("backend.py", "sampling.py", "weights.py")
"""Files of this folder without a compiled function."""


def inner(**options: Any) -> Any:
    """A decorator for functions that only compiled ones call: without the wrappers that Python would call them by,
    whose compilation takes longer than that of the functions."""
    return numba.njit(**_INNER, **options)


def _digest() -> str:
    sources = sorted(source for source in Path(__file__).parent.glob("*.py") if source.name not in _NOT_COMPILED)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def kept(kernel: Callable[..., Any]) -> Any:
    """A compiled function that is kept where there is a place to write to: beside its source or in numba's own folder.
    What other versions of the sources left there is removed. A disk that is full or fails, and files that are damaged,
    cost compiling anew."""
    name, digest = kernel.__qualname__, _digest()
    kernel.__qualname__ = f"{name}-{digest}"
    try:
        compiled = numba.njit(cache=True, **_OPTIONS)(kernel)
    except (RuntimeError, OSError):
        return numba.njit(**_OPTIONS)(kernel)
    cache = compiled._cache  # numba loads and saves in the call, and lets whatever goes wrong out
    cache.load_overload = _forgiving(cache.load_overload, cache.flush)
    cache.save_overload = _forgiving(cache.save_overload, cache.flush)
    for file in Path(compiled.stats.cache_path).glob(f"*.{name}-*.nb?"):
        if digest not in file.name:
            with contextlib.suppress(OSError):
                file.unlink()
    return compiled


def _forgiving(action: Callable[..., Any], forget: Callable[[], None]) -> Callable[..., Any]:
    """None where ``action`` fails. Files that are damaged, as after a loss of power, are forgotten, or they would fail
    every start."""

    def attempt(*args: Any) -> Any:
        try:
            return action(*args)
        except OSError:
            return None
        except Exception:
            with contextlib.suppress(Exception):
                forget()
            return None

    return attempt


def is_ready(kernel: Any) -> bool:
    """Whether some version of a kept function is compiled, here or on disk, so that its first call takes no half
    minute. A guess: it may be one for another type."""
    if kernel.signatures:
        return True
    path = kernel.stats.cache_path
    return path is not None and any(Path(path).glob(f"*.{kernel.py_func.__qualname__}-*.nbi"))

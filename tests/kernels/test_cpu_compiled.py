"""Kernels that are kept on disk, and what happens where they cannot be."""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from kernels.cpu import compiled
from kernels.cpu.compiled import is_ready, kept


def double(x):
    return 2 * x


def treble(x):
    return 3 * x


def anew(kernel: Callable[..., Any]) -> Any:
    """As another process has it."""
    copy = types.FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
    copy.__qualname__ = kernel.__qualname__
    return kept(copy)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def files(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in folder.rglob(f"*{name}-*"))


def test_a_kept_kernel_is_compiled_once(folder: Path) -> None:
    first = anew(double)
    assert not is_ready(first)
    assert first(21) == 42 and first.stats.cache_misses
    assert is_ready(first) and len(files(folder, "double")) == 2
    second = anew(double)
    assert is_ready(second) and not second.signatures
    assert second(4) == 8 and second.stats.cache_hits and not second.stats.cache_misses


def test_other_versions_are_removed_and_other_kernels_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew(double)(1)
    anew(treble)(1)
    old = files(folder, "double")
    monkeypatch.setattr(compiled, "_digest", lambda: "0123456789ab")
    other = anew(double)
    assert not is_ready(other) and not files(folder, "double") and files(folder, "treble")
    assert other(3) == 6 and other.stats.cache_misses
    assert len(files(folder, "double")) == 2 and not set(old) & set(files(folder, "double"))


def test_files_that_cannot_be_removed_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew(double)(1)
    monkeypatch.setattr(compiled, "_digest", lambda: "0123456789ab")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert anew(double)(3) == 6


def test_no_place_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(locator: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    kernel = anew(double)
    assert not is_ready(kernel)
    assert kernel(21) == 42 and is_ready(kernel)
    assert kernel.stats.cache_path is None


@pytest.mark.parametrize("action", ["save", "load"])
def test_a_disk_that_fails_costs_compiling_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    anew(double)(1)
    before = files(folder, "double")

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caching.IndexDataCacheFile, action, refuse)
    kernel = anew(double)
    assert kernel(1.5) == 3.0 and kernel(2) == 4
    assert len(kernel.signatures) == 2
    if action == "save":
        assert files(folder, "double") == before


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_files_are_compiled_anew_and_mended(folder: Path, suffix: str) -> None:
    anew(double)(1)
    for path in folder.rglob(f"*.{suffix}"):
        path.write_bytes(path.read_bytes()[:60])
    assert anew(double)(21) == 42
    third = anew(double)
    assert third(21) == 42
    fourth = anew(double)
    assert fourth(21) == 42 and fourth.stats.cache_hits

"""One SHA-256 that stands for a model's weights, so that a figure names what it was measured on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import platformdirs


def weights_digest(files: Sequence[Path], remember_in: Path | None = None) -> str:
    """SHA-256 (hex) of a model's weight files.

    Of one file: its content's. Of several: that of the listing ``<sha256>  <name>\\n``, by name, as ``sha256sum``
    prints it. Each file is read once and remembered by path, size and time in the user's cache folder; blobs of the
    Hugging Face cache carry their digest as their name.
    """
    remembered = remember_in or Path(platformdirs.user_cache_dir("batchscope")) / "weights-sha256.json"
    known = _read(remembered)
    before = dict(known)
    digests = {path.name: _file_digest(path, known) for path in sorted(files, key=lambda path: path.name)}
    if known != before:
        _write(remembered, known)
    if len(digests) == 1:
        return next(iter(digests.values()))
    listing = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return hashlib.sha256(listing.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_digest(path: Path, remember_in: Path | None = None) -> str | None:
    """SHA-256 (hex) of a file's content where that is known without reading it."""
    remembered = remember_in or Path(platformdirs.user_cache_dir("batchscope")) / "weights-sha256.json"
    real = path.resolve()
    try:
        return _blob_digest(real) or _read(remembered).get(_key(real))
    except OSError:
        return None


def remember_digest(path: Path, digest: str, remember_in: Path | None = None) -> None:
    """Note a digest that is known already, so that the file need not be read for it."""
    remembered = remember_in or Path(platformdirs.user_cache_dir("batchscope")) / "weights-sha256.json"
    _write(remembered, {**_read(remembered), _key(path.resolve()): digest})


def _file_digest(path: Path, known: dict[str, str]) -> str:
    real = path.resolve()
    if digest := _blob_digest(real):
        return digest
    key = _key(real)
    if key not in known:
        known[key] = file_sha256(real)
    return known[key]


def _blob_digest(path: Path) -> str | None:
    is_blob = path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", path.name)
    return path.name if is_blob else None


def _key(path: Path) -> str:
    stat = path.stat()
    return f"{path}|{stat.st_size}|{stat.st_mtime_ns}"


def _read(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(digest) for key, digest in value.items()} if isinstance(value, dict) else {}


def _write(path: Path, value: dict[str, str]) -> None:
    # Only a shortcut: where it cannot be kept, the files are read again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
        partial.replace(path)

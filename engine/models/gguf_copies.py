"""Which folder of the cache holds the import of a GGUF file: found without reading either, by light modules alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from engine.model_catalog import ModelEntry
from engine.models.digest import known_digest


def copy_name(path: Path, sha256: str) -> str:
    """Name of the folder into which a GGUF file of this content is imported."""
    return f"{_safe(path.stem)}-{sha256[:12]}"


def joined(entries: Iterable[ModelEntry], cache_dir: Path | None = None) -> Iterator[ModelEntry]:
    """A GGUF file and its import are one entry, which has the file's name and loads by it; what lies on the disk for it
    is the import. Imports are expected before the files; those without their file come last.

    ``cache_dir``: where they lie and digests are remembered; None: the user's own cache folder.
    """
    digests = None if cache_dir is None else cache_dir / "weights-sha256.json"
    imports: dict[str, ModelEntry] = {}
    told: set[str] = set()
    for entry in entries:
        if entry.source == "imported":
            imports[Path(entry.path).name] = entry
            continue
        name = _import_of(entry, digests)
        if name not in imports or imports[name].state != "ready":
            yield entry
        elif name not in told:
            told.add(name)
            yield msgspec.structs.replace(
                imports[name], model=entry.model, name=entry.name, revision=entry.revision, commit=entry.commit
            )
    yield from (entry for name, entry in imports.items() if name not in told)


def _import_of(entry: ModelEntry, digests: Path | None) -> str:
    path = Path(entry.path)
    if entry.state != "importable" or path.suffix != ".gguf":
        return ""
    digest = known_digest(path, digests)
    return copy_name(path, digest) if digest else ""


def _safe(name: str) -> str:
    """A file's name as a folder's: neither hidden nor endless."""
    return re.sub(r"[^\w.+-]+", "-", name).strip(".-")[:80] or "model"

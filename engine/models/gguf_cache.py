"""GGUF files that are loaded: each is imported once, into the cache folder, and found there by its content."""

from __future__ import annotations

from pathlib import Path

from engine.model_catalog import models_folder
from engine.models.digest import remember_digest, weights_digest
from engine.models.errors import ModelLoadError
from engine.models.gguf_copies import copy_name
from engine.models.gguf_header import read_gguf_header
from engine.models.gguf_import import import_gguf
from engine.models.imported import Progress, is_whole, only_one, put_in_place, working_folder

_WORKING_PREFIX = ".gguf-"
_BESIDE_WEIGHTS = 64_000_000
"""More than a tokenizer and configurations take, in bytes."""


def ensure_imported(path: Path, progress: Progress, cache_dir: Path | None = None) -> Path:
    """The folder of a GGUF file's model, imported first where it is not there; a file that moved is known again.

    Raises :class:`ModelLoadError`: ``unsupported`` and ``damaged`` as :func:`import_gguf`, ``other`` for a full disk.
    """
    digests = None if cache_dir is None else cache_dir / "weights-sha256.json"
    header = read_gguf_header(path)
    progress(f"Looking whether {path.name} was imported before", 0, 0)
    sha256 = weights_digest([path], digests)
    folder = models_folder(cache_dir) / copy_name(path, sha256)
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = "Another Batchscope is importing a model; waiting for it"
        with only_one(folder.parent / ".gguf.lock", progress, waiting):
            if not is_whole(folder):
                needed = header.imported_bytes + _BESIDE_WEIGHTS
                with working_folder(folder.parent, _WORKING_PREFIX, needed, path.name) as working:
                    stage = f"Importing {path.name}"
                    made = import_gguf(path, working / folder.name, lambda done, total: progress(stage, done, total))
                    put_in_place(made.folder, folder)
                remember_digest(folder / made.weights.name, made.weights_sha256, digests)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be imported into {folder.parent}: {error}.", "other") from error
    return folder

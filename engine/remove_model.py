"""Removes a model from the disk: ``python -m engine.remove_model FOLDER`` for one that was imported,
``--revision COMMIT ORG/NAME`` for one of the Hugging Face cache. What another revision shares stays."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.model_catalog import models_folder


def remove_imported(folder: Path, cache_dir: Path | None = None) -> None:
    """Raises ValueError for a folder that the import has not made, OSError where it cannot be deleted."""
    models = models_folder(cache_dir).resolve()
    if folder.resolve().parent != models:
        raise ValueError(f"{folder} is not in {models}: Batchscope removes only what it has imported itself")
    # By another name first: what an interruption leaves is never taken for a model.
    aside = folder.resolve().with_name(f".removed-{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    folder.resolve().rename(aside)
    shutil.rmtree(aside)


def remove_revision(repository: str, commit: str) -> None:
    """Raises ValueError where it is not in the cache (any more)."""
    from huggingface_hub import scan_cache_dir

    for found in scan_cache_dir().repos:
        if found.repo_id == repository and any(revision.commit_hash == commit for revision in found.revisions):
            scan_cache_dir().delete_revisions(commit).execute()
            return
    raise ValueError(f"{repository} at {commit[:7]} is not in the cache any more")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.remove_model")
    parser.add_argument("model", metavar="FOLDER|ORG/NAME")
    parser.add_argument("--revision", metavar="COMMIT", default="", help="of the Hugging Face cache")
    options = parser.parse_args(arguments)
    try:
        if options.revision:
            remove_revision(options.model, options.revision)
        else:
            remove_imported(Path(options.model))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

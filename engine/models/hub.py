"""Models that Hugging Face's own tools have fetched: looked up on this machine, never asked for over the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.models.errors import ModelLoadError


def is_repository(model: str) -> bool:
    """Whether a model's name has the form ``org/name``."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None


def find_in_hub_cache(repository: str) -> Path:
    """The folder of ``org/name`` in the cache: ``HF_HUB_CACHE``, else ``$HF_HOME/hub``, else the library's default.

    Raises :class:`ModelLoadError`, ``offline``, where it is not there.
    """
    # The library reads its variables when it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    found = try_to_load_from_cache(repository, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    raise ModelLoadError(
        f"{repository} is neither a folder nor in the Hugging Face cache ({HF_HUB_CACHE}). "
        f"Fetch it with 'hf download {repository}', or give a folder.",
        "offline",
    )

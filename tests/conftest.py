"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
# Tiny models gain nothing from more threads, and on a busy machine every barrier between two costs a scheduler tick.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def starter_folder() -> Path:
    """The starter model, fetched once into the user's cache; skipped where it cannot be had."""
    from engine.models.errors import ModelLoadError
    from engine.models.starter import ensure_starter

    try:
        return ensure_starter(lambda stage, done, total: None)
    except ModelLoadError as error:
        if error.kind != "offline":
            raise
        pytest.skip(f"the starter model is not at hand: {error}")

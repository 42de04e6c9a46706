"""One tiny saved model for the tests of this folder, and torch with as many threads after each as before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models.families import SavedModel, save_family


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_family("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

"""One tiny saved model for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.models.families import SavedModel, save_family


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_family("llama", tmp_path_factory.mktemp("tiny"))

"""A GGUF file is imported once: known again wherever it lies, and whole in the cache or not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.models import gguf_cache, imported
from engine.models.checkpoint import Checkpoint, resolve_model
from engine.models.errors import ModelLoadError
from engine.models.gguf_cache import ensure_imported
from tests.models.tiny_gguf import TOKENS, write_tiny_gguf


class Said:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.done: list[tuple[int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self.stages:
            self.stages.append(stage)
        if total:
            self.done.append((done, total))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "My model (Q4).gguf")
    return tmp_path / "My model (Q4).gguf"


def models_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())


def test_a_file_is_imported_once_and_known_again_where_it_moved(tmp_path: Path, gguf: Path) -> None:
    said, cache = Said(), tmp_path / "cache"
    folder = ensure_imported(gguf, said, cache)
    assert Checkpoint.open(folder).config["vocab_size"] == len(TOKENS)
    assert folder.name.startswith("My-model-Q4-")
    assert said.stages[-1] == "Importing My model (Q4).gguf"
    assert said.done[-1][0] == said.done[-1][1] > 0
    assert models_in(cache) == [folder.name]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(gguf, moved / gguf.name)
    again = Said()
    assert ensure_imported(moved / gguf.name, again, cache) == folder
    assert again.done == []


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path, gguf: Path) -> None:
    first = ensure_imported(gguf, Said(), tmp_path / "cache")
    write_tiny_gguf(gguf, tied=False)
    assert ensure_imported(gguf, Said(), tmp_path / "cache") != first
    assert len(models_in(tmp_path / "cache")) == 2


def test_an_import_that_is_broken_off_leaves_no_model(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def cancel(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_imported(gguf, cancel, cache)
    assert models_in(cache) == []
    left_over = cache / "models" / ".gguf-of-a-process-that-was-killed"
    left_over.mkdir()
    (left_over / "model.safetensors").write_bytes(b"half")
    folder = ensure_imported(gguf, Said(), cache)
    assert models_in(cache) == [folder.name]


def test_a_damaged_import_is_made_anew(tmp_path: Path, gguf: Path) -> None:
    folder = ensure_imported(gguf, Said(), tmp_path / "cache")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    assert ensure_imported(gguf, Said(), tmp_path / "cache") == folder
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(imported.shutil, "disk_usage", lambda path: usage)
    said = Said()
    with pytest.raises(ModelLoadError, match=r"needs 64 MB while it is imported; .* has 1 MB free") as refused:
        ensure_imported(gguf, said, tmp_path / "cache")
    assert refused.value.kind == "other"
    assert said.done == []


def test_a_file_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "x.gguf", architecture="gemma")
    with pytest.raises(ModelLoadError, match="'gemma'"):
        ensure_imported(tmp_path / "x.gguf", Said(), tmp_path / "cache")
    assert models_in(tmp_path / "cache") == []


def test_a_path_to_a_gguf_file_is_a_model(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(gguf_cache, "ensure_imported", lambda path, progress: asked.append(path) or tmp_path / "made")
    assert resolve_model(str(gguf), Said()) == tmp_path / "made"
    assert asked == [gguf]

"""The models that a search finds: names, figures and reasons, of caches and folders as people have them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.execution.sizing import plan_memory
from engine.model_catalog import ModelEntry, hub_cache_folder, model_title, repository_of
from engine.model_scan import MOST_FOLDERS, Remembered, Scan
from engine.models import describe
from engine.models.checkpoint import Checkpoint
from engine.models.gguf_cache import ensure_imported
from tests.models.tiny_gguf import write_tiny_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
COMMIT = "a" * 40


def write_model(folder: Path, config: dict[str, Any] = LLAMA, dtype: torch.dtype = torch.bfloat16) -> Path:
    from engine.models.architecture import expected_tensors, spec_from_config

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(spec_from_config(LLAMA, torch.float32))
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def scan(tmp_path: Path, *chosen: Path, remembered: Remembered | None = None) -> list[ModelEntry]:
    search = Scan(remembered or Remembered(None), cache_dir=tmp_path / "none")
    return [entry for entry in search.all(tmp_path / "hub", chosen) if entry.source != "starter"]


def write_repository(hub: Path, name: str, commit: str = COMMIT, branch: str = "main") -> Path:
    repository = hub / f"models--{name.replace('/', '--')}"
    write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    (repository / "blobs").mkdir(exist_ok=True)
    return repository


def test_figures_are_those_that_the_engine_plans_with(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / "tiny")
    (entry,) = scan(tmp_path, tmp_path / "models")
    checkpoint = Checkpoint.open(folder)
    assert (entry.model, entry.name, entry.state) == (str(folder), "tiny", "ready")
    assert (entry.runner, entry.architecture, entry.dtype) == ("native", "LlamaForCausalLM", "bfloat16")
    assert (entry.parameters, entry.max_position) == (checkpoint.parameters, 4096)
    types = {"int8": (torch.bfloat16, torch.int8), "float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None)}
    for dtype, (computed, kept) in types.items():
        plan = plan_memory(checkpoint.spec(computed, kept), EngineConfig(), 4096, 1 << 34, on_gpu=True)
        assert entry.weight_bytes[dtype] == plan.weight_bytes
        assert entry.kv_bytes(dtype, 16) == plan.block_bytes
        assert entry.working_bytes == plan.working_bytes


def test_a_cache_is_listed_by_repository_and_revision(tmp_path: Path) -> None:
    write_repository(tmp_path / "hub", "org/some-model.v1")
    repository = write_repository(tmp_path / "hub", "org/other", "b" * 40, "main")
    write_model(repository / "snapshots" / ("c" * 40))
    found = {(entry.name, entry.revision): entry for entry in scan(tmp_path)}
    assert set(found) == {("org/some-model.v1", "main"), ("org/other", "main"), ("org/other", "ccccccc")}
    assert found["org/other", "main"].model == "org/other"
    old = found["org/other", "ccccccc"]
    assert old.model == str(repository / "snapshots" / ("c" * 40)) and old.commit == "c" * 40
    assert repository_of(Path(old.model)) == ("org/other", "c" * 40) and model_title(old.model) == "org/other"


def test_a_download_that_was_not_finished_is_told_apart_from_damage(tmp_path: Path) -> None:
    begun = tmp_path / "hub" / "models--org--begun"
    (begun / "blobs").mkdir(parents=True)
    (begun / "blobs" / "1234.abcd.incomplete").write_bytes(b"x" * 500)
    halfway = tmp_path / "hub" / "models--org--half"
    snapshot = write_model(halfway / "snapshots" / COMMIT)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    cut = write_repository(tmp_path / "hub", "org/cut") / "snapshots" / COMMIT / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 10)
    found = {entry.name: entry for entry in scan(tmp_path)}
    assert found["org/begun"].state == "incomplete" and found["org/begun"].disk_bytes == 500
    assert found["org/half"].state == "incomplete" and "1 of 2 weight files" in found["org/half"].reason
    assert found["org/cut"].state == "damaged" and "cut short" in found["org/cut"].reason


@pytest.mark.parametrize(
    ("config", "state", "words"),
    [
        ({**LLAMA, "architectures": ["BertForMaskedLM"]}, "unsupported", "BertForMaskedLM"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "unsupported", "gptq"),
        ({**LLAMA, "rope_scaling": {"rope_type": "odd"}}, "unsupported", "'odd'"),
        ({**LLAMA, "num_hidden_layers": 0}, "damaged", "num_hidden_layers is 0"),
        ({}, "damaged", "names no architecture"),
    ],
)
def test_what_cannot_be_run_is_listed_with_the_reason(
    tmp_path: Path, config: dict[str, Any], state: str, words: str
) -> None:
    write_model(tmp_path / "m" / "x", config)
    (entry,) = scan(tmp_path, tmp_path / "m")
    assert entry.state == state and words in entry.reason and not entry.is_loadable
    assert entry.parameters > 0 and entry.runner == ""


def test_files_that_are_no_model_are_said_to_be_none(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "config.json").write_text("{}")
    pickled = write_model(folder / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    bare = write_model(folder / "bare")
    (bare / "config.json").unlink()
    torn = write_model(folder / "torn")
    (torn / "config.json").write_text("{")
    found = {entry.name: entry for entry in scan(tmp_path, folder)}
    assert set(found) == {"pickled", "bare", "torn"}
    assert "pickles" in found["pickled"].reason and found["pickled"].state == "unsupported"
    assert "no config.json" in found["bare"].reason
    assert "cannot be read" in found["torn"].reason


def test_gguf_files_are_listed_by_their_header(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_tiny_gguf(folder / "tiny.gguf")
    write_tiny_gguf(folder / "strange.gguf", architecture="mamba")
    (folder / "cut.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:500])
    (folder / "none.gguf").write_bytes(b"words")
    found = {entry.name: entry for entry in scan(tmp_path, folder)}
    tiny = found["tiny"]
    assert (tiny.state, tiny.architecture, tiny.max_position) == ("importable", "LlamaForCausalLM", 128)
    assert tiny.kv_values == 2 * 2 * 2 * 16 and tiny.parameters > 0 and tiny.weight_bytes["float32"] > 0
    assert found["strange"].state == "unsupported" and "mamba" in found["strange"].reason
    assert found["cut"].state == found["none"].state == "damaged"


def test_a_gguf_file_and_its_import_are_one_model(tmp_path: Path) -> None:
    folder, cache = tmp_path / "m", tmp_path / "none"
    folder.mkdir()
    write_tiny_gguf(folder / "My model.gguf")
    imported = ensure_imported(folder / "My model.gguf", lambda *_: None, cache)
    (one,) = scan(tmp_path, folder)
    assert (one.model, one.name, one.state) == (str(folder / "My model.gguf"), "My model", "ready")
    assert (one.source, one.path) == ("imported", str(imported))
    assert ensure_imported(Path(one.model), lambda *_: None, cache) == imported
    write_tiny_gguf(folder / "My model.gguf", tied=False)  # another content: its import is not there yet
    assert {entry.state for entry in scan(tmp_path, folder)} == {"ready", "importable"}
    shutil.rmtree(imported)
    (only,) = scan(tmp_path, folder)
    assert only.state == "importable"


def test_links_and_depth_are_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model = write_model(folder / "a" / "b" / "model")
    (folder / "loop").symlink_to(folder)
    (folder / "again").symlink_to(model)
    write_model(folder / "1" / "2" / "3" / "4" / "5" / "deep")
    assert [entry.name for entry in scan(tmp_path, folder, folder / "a")] == ["model"]


def test_folders_that_are_not_there_are_said(tmp_path: Path) -> None:
    search = Scan(Remembered(None), cache_dir=tmp_path)
    list(search.all(tmp_path / "hub", [tmp_path / "gone"]))
    assert search.problems == [f"There is no folder {tmp_path / 'gone'}."]


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m" / "x")
    kept = tmp_path / "kept.json"
    remembered = Remembered(kept)
    (first,) = scan(tmp_path, tmp_path / "m", remembered=remembered)
    remembered.save()
    read: list[Path] = []
    real = describe.describe_folder

    def counted(path: Path, source: Any) -> ModelEntry:
        read.append(path)
        return real(path, source)

    monkeypatch.setattr("engine.model_scan.describe_folder", counted)
    assert scan(tmp_path, tmp_path / "m", remembered=Remembered(kept)) == [first] and read == []
    (folder / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 99}))
    (changed,) = scan(tmp_path, tmp_path / "m", remembered=Remembered(kept))
    assert changed.max_position == 99 and read == [folder]
    kept.write_text("{")
    assert scan(tmp_path, tmp_path / "m", remembered=Remembered(kept)) == [changed]


def test_thousands_of_files_stay_fast(tmp_path: Path) -> None:
    for number in range(1500):
        folder = tmp_path / "m" / f"group{number // 50}" / str(number)
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("x")
    write_model(tmp_path / "m" / "group7" / "model")
    begin = time.perf_counter()
    search = Scan(Remembered(None), cache_dir=tmp_path / "none")
    names = [entry.name for entry in search.all(tmp_path / "hub", [tmp_path / "m"])]
    assert names[1:] == ["model"] and search.is_complete and 1500 < search.folders < MOST_FOLDERS
    assert time.perf_counter() - begin < 5


def test_the_cache_s_place_is_that_of_hugging_face_s_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache_folder() == Path.home() / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_cache_folder() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache_folder() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub_cache_folder() == tmp_path / "hub"

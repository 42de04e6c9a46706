"""A checkpoint's folder: whole or refused by name, never half-loaded; and where a model is found."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.architecture import expected_tensors
from engine.models.checkpoint import Checkpoint, resolve_model
from engine.models.digest import weights_digest
from engine.models.errors import ModelLoadError
from engine.models.shards import read_shard
from tests.models.test_architecture import LLAMA, QWEN2

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    from engine.models.architecture import spec_from_config

    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(spec_from_config(config, torch.float32))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    return dict(checkpoint.tensors(checkpoint.spec(torch.float32)))


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_back_as_they_were_written(tmp_path: Path, shards: int) -> None:
    weights = random_weights(QWEN2)
    loaded = load(write(tmp_path / "model", QWEN2, weights, shards))
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_tensor_leaves_memory_with_its_last_use(tmp_path: Path) -> None:
    """Pages of a mapped file count as this process's memory: a float32 file is many times a model packed in int8."""
    weights = random_weights({**LLAMA, "vocab_size": 100_000})
    folder = write(tmp_path / "model", {**LLAMA, "vocab_size": 100_000}, weights)
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.tensors(checkpoint.spec(torch.float32))
    process, size = psutil.Process(), 4 * 100_000 * LLAMA["hidden_size"]
    before = process.memory_info().rss
    embedding = tensors[EMBEDDING]
    assert torch.equal(embedding, weights[EMBEDDING])
    assert process.memory_info().rss - before > 0.9 * size, "or this test measures nothing"
    del embedding
    assert process.memory_info().rss - before < 0.2 * size


def test_a_header_of_odd_length_gives_the_same_tensors(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(LLAMA).items()}
    path = write(tmp_path / "model", LLAMA, weights) / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    loaded = load(path.parent)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert all(tensor.data_ptr() % 2 == 0 for tensor in loaded.values())


def test_a_file_that_shrinks_behind_our_back_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA))
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.tensors(checkpoint.spec(torch.float32))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read") as refused:
        dict(tensors)
    assert refused.value.kind == "damaged"


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(LLAMA).items()}
    checkpoint = Checkpoint.open(write(tmp_path / "model", LLAMA, weights, shards=2))
    assert checkpoint.parameters == sum(tensor.numel() for tensor in weights.values())
    assert checkpoint.stored_bytes == 2 * checkpoint.parameters


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "its own"])
def test_tied_heads_are_what_transformers_makes_of_them(tmp_path: Path, tie: bool, head: str) -> None:
    config = {**LLAMA, "tie_word_embeddings": tie}
    weights = random_weights({**LLAMA, "tie_word_embeddings": False})
    if head == "absent":
        weights.pop(HEAD)
    elif head == "equal":
        weights[HEAD] = weights[EMBEDDING].clone()
    folder = write(tmp_path / "model", config, weights)
    if head == "absent" and not tie:
        with pytest.raises(ModelLoadError, match=r"no lm_head\.weight") as refused:
            load(folder)
        assert refused.value.kind == "damaged"
        return
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec(torch.float32)
    ours = checkpoint.tensors(spec)
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(ours[EMBEDDING], reference.model.embed_tokens.weight)
    assert torch.equal(ours[EMBEDDING if spec.tie_embeddings else HEAD], reference.lm_head.weight)
    assert spec.tie_embeddings == (tie and head != "its own")


def test_a_tied_checkpoint_may_hold_only_the_head(tmp_path: Path) -> None:
    weights = random_weights({**LLAMA, "tie_word_embeddings": False})
    embedding = weights.pop(EMBEDDING)
    weights[HEAD] = embedding
    loaded = load(write(tmp_path / "model", {**LLAMA, "tie_word_embeddings": True}, weights))
    assert torch.equal(loaded[EMBEDDING], embedding)
    assert HEAD not in loaded


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    expected = set(weights)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert set(load(write(tmp_path / "model", LLAMA, weights))) == expected


@pytest.mark.parametrize(
    ("config", "change", "kind", "words"),
    [
        (LLAMA, {"model.norm.weight": None}, "damaged", r"lacks model\.norm\.weight, which LlamaForCausalLM needs"),
        # A Qwen2 without its biases, a Llama with biases it does not declare (M4).
        (QWEN2, {"model.layers.1.self_attn.k_proj.bias": None}, "damaged", r"k_proj\.bias"),
        (LLAMA, {"model.layers.1.self_attn.k_proj.bias": torch.ones(32)}, "unsupported", r"k_proj\.bias.*does not use"),
        (LLAMA, {"model.norm.weight": torch.ones(63)}, "damaged", r"shape \[63\]; config.json asks for \[64\]"),
        (LLAMA, {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "unsupported", "stored as I8"),
        (LLAMA, {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "unsupported", "F8_E4M3"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, torch.Tensor | None], kind: str, words: str
) -> None:
    weights = random_weights(config)
    for name, tensor in change.items():
        if tensor is None:
            weights.pop(name)
        else:
            weights[name] = tensor
    checkpoint = Checkpoint.open(write(tmp_path / "model", config, weights))
    with pytest.raises(ModelLoadError, match=words) as refused:
        checkpoint.tensors(checkpoint.spec(torch.float32))
    assert refused.value.kind == kind


def _cut(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])


def _cut_in_header(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:40])


def _empty(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def _garbage(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"<!DOCTYPE html>" * 1000)


def _repeat_tensor(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(64)}, path)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(load_file(path), path.name) | {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _index_lies(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("-00001-", "-00002-"))


def _index_points_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001-", "../model-00001-"))


def _only(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        for name in names:
            (folder / name).write_bytes(b"\x80\x02")

    return change


@pytest.mark.parametrize("entry", [{"shape": [-1]}, {"shape": [1.5]}, {"data_offsets": [8, 4]}, {"data_offsets": [4]}])
def test_impossible_header_entries_are_named(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelLoadError, match="no safetensors file") as refused:
        read_shard(path)
    assert refused.value.kind == "damaged"


def test_a_header_that_contradicts_itself_is_a_damaged_file(tmp_path: Path) -> None:
    """Two tensors on the same bytes: names, shapes and the file's size are right, and the weights are not."""
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    header[gate]["data_offsets"] = header[up]["data_offsets"]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
    with pytest.raises(ModelLoadError, match=r"contradicts itself.*download it again") as refused:
        load(folder)
    assert refused.value.kind == "damaged"


def test_bytes_that_do_not_fit_their_shape_are_a_damaged_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "BF16"
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has 256 bytes.*download") as refused:
        load(folder)
    assert refused.value.kind == "damaged"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"bytes; its header asks for"),
        (_cut_in_header, "no whole safetensors file"),
        (_empty, "no whole safetensors file: it has 0 bytes"),
        (_garbage, "safetensors file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, shards: int, damage: Callable[[Path], None], words: str) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA), shards)
    damage(folder)
    with pytest.raises(ModelLoadError, match=words) as refused:
        Checkpoint.open(folder)
    assert refused.value.kind == "damaged"
    assert ".safetensors" in refused.value.message


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "damaged", "model-00002-of-00002"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "damaged", "2 of 2 shards but no"),
        (_repeat_tensor, "damaged", r"model\.norm\.weight is in two files.*00001.*00002"),
        (_index_lies, "damaged", "but it is not"),
        (_index_points_outside, "damaged", "not a file of its own folder"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "damaged", "index.json cannot be read"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "damaged", "index.json does not hold"),
        (_only(), "damaged", "has no weights"),
        (_only("pytorch_model.bin"), "unsupported", "pickles.*pytorch_model.bin"),
        (_only("consolidated.00.pth"), "unsupported", "pickles.*consolidated.00.pth"),
        (_only("model.gguf"), "unsupported", "GGUF"),
        (_only("adapter_model.safetensors"), "damaged", "adapter_model.safetensors, but no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "damaged", "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{oh"), "damaged", "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("3"), "damaged", "does not hold a JSON object"),
    ],
)
def test_incomplete_folders_are_refused(tmp_path: Path, damage: Callable[[Path], None], kind: str, words: str) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA), shards=2)
    damage(folder)
    with pytest.raises(ModelLoadError, match=words) as refused:
        Checkpoint.open(folder)
    assert refused.value.kind == kind


def test_pickles_beside_safetensors_are_never_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert load(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([1, 5], 1, {1, 5}), (1, [1, 5], {1, 5}), (5, None, {5}), (None, 2, {2}), (None, None, set())],
)
def test_eos_is_the_union(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    folder = write(tmp_path / "model", {**LLAMA, "eos_token_id": config}, random_weights(LLAMA))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert Checkpoint.open(folder).eos_token_ids == expected


# SHA-256 -------------------------------------------------------------------------------------------------------------


def test_digest_of_one_file_is_its_own_and_is_remembered(tmp_path: Path) -> None:
    path, remembered = tmp_path / "model.safetensors", tmp_path / "remembered.json"
    path.write_bytes(b"one")
    assert weights_digest([path], remembered) == hashlib.sha256(b"one").hexdigest()
    # The note is believed as long as size and time are the file's, and not one bit longer.
    noted = json.loads(remembered.read_text())
    remembered.write_text(json.dumps(dict.fromkeys(noted, "noted")))
    assert weights_digest([path], remembered) == "noted"
    path.write_bytes(b"three")
    assert weights_digest([path], remembered) == hashlib.sha256(b"three").hexdigest()


def test_digest_of_shards_is_that_of_their_listing(tmp_path: Path) -> None:
    paths = [tmp_path / "b", tmp_path / "a"]
    for path in paths:
        path.write_text(path.name)
    listing = "".join(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in ("a", "b"))
    assert weights_digest(paths, tmp_path / "r.json") == hashlib.sha256(listing.encode()).hexdigest()


def test_digest_does_not_need_a_place_to_be_remembered(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    (tmp_path / "file").write_text("no folder")
    assert weights_digest([path], tmp_path / "file" / "r.json") == hashlib.sha256(b"one").hexdigest()


# Where a model is found ----------------------------------------------------------------------------------------------


def no_progress(stage: str, done: int, total: int) -> None:
    pass


def in_hub_layout(hub: Path, repository: str, folder: Path) -> None:
    root = hub / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("c0ffee")
    shutil.copytree(folder, root / "snapshots" / "c0ffee")


LOOK_UP = """
from engine.models.errors import ModelLoadError
from engine.models.shards import read_shard
from engine.models.hub import find_in_hub_cache
for repository in ("org/name", "org/other"):
    try:
        print(find_in_hub_cache(repository))
    except ModelLoadError as error:
        print(error.kind, error)
"""


@pytest.mark.parametrize("found_in", ["HF_HUB_CACHE", "HF_HOME", "default"])
def test_repositories_are_found_in_the_hub_cache(tmp_path: Path, found_in: str) -> None:
    """HF_HUB_CACHE before $HF_HOME/hub before ~/.cache/huggingface/hub; the variables are read at import."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    home = tmp_path / "home"
    environment = {"HOME": str(home), "PATH": ""}
    in_hub_layout(hub := home / ".cache" / "huggingface" / "hub", "org/name", folder)
    if found_in != "default":
        environment["HF_HOME"] = str(tmp_path / "hf")
        in_hub_layout(hub := tmp_path / "hf" / "hub", "org/name", folder)
    if found_in == "HF_HUB_CACHE":
        environment["HF_HUB_CACHE"] = str(tmp_path / "cache")
        in_hub_layout(hub := tmp_path / "cache", "org/name", folder)
    command = [sys.executable, "-c", LOOK_UP]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found, missing = result.stdout.splitlines()
    assert found == str(hub / "models--org--name" / "snapshots" / "c0ffee")
    assert missing.startswith(f"offline org/other is neither a folder nor in the Hugging Face cache ({hub})")
    assert "hf download org/other" in missing


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAMA, random_weights(LLAMA))
    assert resolve_model(str(folder), no_progress) == folder


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="There is no folder") as refused:
        resolve_model(str(tmp_path / "nowhere"), no_progress)
    assert refused.value.kind == "other"
    (tmp_path / "x.bin").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="is a file") as refused:
        resolve_model(str(tmp_path / "x.bin"), no_progress)
    assert refused.value.kind == "unsupported"

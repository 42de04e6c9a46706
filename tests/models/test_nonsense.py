"""Files of models that say what no file should: each costs a sentence, quickly, and no other model its place in a
list."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.model_catalog import Found, ModelEntry, scan_events
from engine.model_scan import Remembered, Scan
from engine.models.architecture import spec_from_config
from engine.models.checkpoint import Checkpoint, resolve_model
from engine.models.errors import ModelLoadError
from engine.models.families import outline
from engine.models.gguf_cache import ensure_imported
from engine.models.transformers_model import inspect_model
from tests.models.test_scan import LLAMA, scan, write_model
from tests.models.tiny_gguf import write_tiny_gguf

LONGEST_MESSAGE = 600
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}


def refusal_of(folder: Path) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as refused:
        Checkpoint.open(folder)
    assert len(refused.value.message) < LONGEST_MESSAGE
    return refused.value


def listed_beside(tmp_path: Path, odd: Path) -> ModelEntry | None:
    """What a search tells of ``odd``, which lies in the folder searched, as it goes over the pipe; a sound model in the
    same folder is found all the same."""
    write_model(odd.parent / "sound")
    search = Scan(Remembered(None), cache_dir=tmp_path / "none")
    lines = [msgspec.json.encode(Found(entry)) for entry in search.all(tmp_path / "hub", [odd.parent])]
    found = {event.entry.name: event.entry for event in map(scan_events.decode, lines) if isinstance(event, Found)}
    assert found["sound"].state == "ready"
    return found.get(odd.name) or found.get(odd.stem)


# config.json ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (LLAMA, {"num_hidden_layers": 10**6}),
        (LLAMA, {"num_hidden_layers": 10**25}),
        (LLAMA, {"num_attention_heads": 0}),
        (LLAMA, {"hidden_size": -64}),
        (LLAMA, {"hidden_size": "x" * 100_000}),
        (LLAMA, {"head_dim": 10**12}),
        (LLAMA, {"vocab_size": [[[]]]}),
        (LLAMA, {"max_position_embeddings": 1e300}),
        (LLAMA, {"max_position_embeddings": 0.5}),
        (LLAMA, {"rms_norm_eps": float("nan")}),
        (LLAMA, {"rope_theta": 10**40}),
        (LLAMA, {"hidden_act": "x" * 100_000}),
        (LLAMA, {"architectures": 5}),
        (LLAMA, {"architectures": ["x" * 100_000]}),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": "1"}}),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}}),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": []}}),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}),
        (LLAMA, {"rope_scaling": {"rope_type": ["yarn"]}}),
        (LLAMA, {"quantization_config": {"quant_method": "x" * 100_000}}),
        (QWEN2, {"layer_types": 5}),
        (QWEN2, {"max_window_layers": "all"}),
        (SMOLLM3, {"no_rope_layers": 1.5}),
        (SMOLLM3, {"no_rope_layer_interval": 0}),
    ],
)
def test_an_impossible_value_is_named(base: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as refused:
        spec_from_config({**base, **change}, torch.float32)
    assert len(refused.value.message) < LONGEST_MESSAGE


@pytest.mark.parametrize("change", [{"max_position_embeddings": 10**15}, {"num_hidden_layers": 10**6}])
def test_models_of_the_library_are_outlined_with_the_same_care(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(change))):
        outline({**LLAMA, "architectures": ["Olmo2ForCausalLM"], **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_attention_heads": 0},
        {"hidden_act": "nothing known" * 10_000},
        {"vocab_size": 0},
        {"rope_parameters": {"rope_type": [], "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**40}},
    ],
)
def test_what_the_library_makes_no_model_of_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as refused:
        inspect_model({**LLAMA, "architectures": ["Olmo2ForCausalLM"], **change}, torch.float32)
    assert refused.value.kind == "damaged" and len(refused.value.message) < LONGEST_MESSAGE


@pytest.mark.parametrize("ends", ["</s>", {"a": 1}, [1, [2]], [None], float("nan"), True])
def test_ends_of_answers_that_are_no_ids_are_refused_before_the_weights(tmp_path: Path, ends: Any) -> None:
    folder = write_model(tmp_path / "odd")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    refused = refusal_of(folder)
    assert refused.kind == "damaged" and "eos_token_id" in refused.message


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 100_000, b'{"architectures": ["\\ud800"]}', b"\xff\xfe{", b"1" * 10_000]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_no_json_to_pass_on_is_a_damaged_file(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_model(tmp_path / "models" / "odd")
    if name != "config.json":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / name).write_bytes(content)
    assert refusal_of(folder).kind == "damaged"
    entry = listed_beside(tmp_path, folder)
    assert entry is not None and entry.state == "damaged" and name in entry.reason


# Files of other kinds ------------------------------------------------------------------------------------------------


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_pipe, _circle, _endless, _nowhere, Path.mkdir])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = write_model(tmp_path / "models" / "odd")
    (folder / name).unlink()
    make(folder / name)
    assert refusal_of(folder).kind == "damaged"
    entry = listed_beside(tmp_path, folder)
    assert entry is None or entry.state == "damaged"


@pytest.mark.parametrize("make", [_pipe, _circle, _nowhere])
@pytest.mark.parametrize("name", ["odd", "odd.gguf", "models--org--odd"])
def test_odd_entries_of_a_folder_cost_no_other_model(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    (tmp_path / "models").mkdir()
    make(tmp_path / "models" / name)
    assert listed_beside(tmp_path, tmp_path / "models" / name) is None


def test_a_circle_in_the_hub_cache_costs_no_other_model(tmp_path: Path) -> None:
    write_model(tmp_path / "hub" / "models--org--sound" / "snapshots" / ("a" * 40))
    _circle(tmp_path / "hub" / "models--org--odd")
    _circle(tmp_path / "hub" / "models--org--sound" / "snapshots" / "odd")
    assert [entry.name for entry in scan(tmp_path)] == ["org/sound"]


def test_a_name_that_is_no_text_is_said_and_passed_over(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / "x")
    folder.rename(folder.with_name(os.fsdecode(b"caf\xe9")))
    write_model(tmp_path / "models" / "a line\nbreak \N{GRINNING FACE}")
    search = Scan(Remembered(None), cache_dir=tmp_path / "none")
    (entry,) = [e for e in search.all(tmp_path / "hub", [tmp_path / "models"]) if e.source != "starter"]
    assert entry.name == "a line\nbreak \N{GRINNING FACE}" and entry.state == "ready"
    (problem,) = search.problems
    assert "not UTF-8" in problem and problem.encode()


def test_a_model_that_nobody_foresaw_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(folder: Path, source: str) -> ModelEntry:
        if folder.name == "odd":
            raise ZeroDivisionError("nobody thought of this")
        return ModelEntry(model=str(folder), name=folder.name, source="folder", path=str(folder), state="ready")

    monkeypatch.setattr("engine.model_scan.describe_folder", describe)
    entry = listed_beside(tmp_path, write_model(tmp_path / "models" / "odd"))
    assert entry is not None and entry.state == "damaged" and "nobody thought of this" in entry.reason


@pytest.mark.parametrize("model", ["x" * 5_000, "~nobody-of-this-name/x", "a/b\n"])
def test_names_that_no_path_can_have_are_refused(model: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        resolve_model(model, lambda *_: None)
    assert model != "x" * 5_000 or len(refused.value.message) < LONGEST_MESSAGE


# Weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[10**30], [2] * 10_000, [1 << 20, 1 << 20]])
def test_a_shape_that_its_bytes_cannot_hold_is_a_damaged_file(tmp_path: Path, shape: list[int]) -> None:
    folder = write_model(tmp_path / "models" / "odd")
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = shape
    changed = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    refused = refusal_of(folder)
    assert refused.kind == "damaged" and "cannot hold" in refused.message
    entry = listed_beside(tmp_path, folder)
    assert entry is not None and entry.state == "damaged"


# GGUF ----------------------------------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _pair(name: str, kind: int, value: bytes) -> Callable[[bytes], bytes]:
    """Adds a pair in front of the others."""

    def change(content: bytes) -> bytes:
        pairs = int.from_bytes(content[16:24], "little") + 1
        return content[:16] + struct.pack("<Q", pairs) + _text(name) + struct.pack("<I", kind) + value + content[24:]

    return change


def _number(name: str, value: int) -> Callable[[bytes], bytes]:
    """Another value for a u32 that the file has."""

    def change(content: bytes) -> bytes:
        at = content.index(_text(name)) + len(_text(name)) + 4
        return content[:at] + struct.pack("<I", value) + content[at + 4 :]

    return change


def _retyped(name: str, kind: int, value: int) -> Callable[[bytes], bytes]:
    """The four bytes of a u32 that the file has as a value of another kind."""

    def change(content: bytes) -> bytes:
        at = content.index(_text(name)) + len(_text(name))
        return content[:at] + struct.pack("<II", kind, value) + content[at + 8 :]

    return change


def _tensor(place: int, value: bytes) -> Callable[[bytes], bytes]:
    """Another value for what is said of the first norm, ``place`` bytes behind its name."""

    def change(content: bytes) -> bytes:
        at = content.index(_text("blk.0.attn_norm.weight")) + len(_text("blk.0.attn_norm.weight")) + place
        return content[:at] + value + content[at + len(value) :]

    return change


def _at(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + value + content[place + len(value) :]


NAN, INFINITY = 0x7FC00000, 0x7F800000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_at(0, b"GGUX"), "begins with b'GGUX'"),
        (_at(4, struct.pack(">I", 3)), "big-endian"),
        (_at(4, struct.pack("<I", 9)), "version 9"),
        (_at(8, struct.pack("<Q", 1 << 60)), "names 1,152,921,504,606,846,976 tensors"),
        (_at(16, struct.pack("<Q", (1 << 64) - 1)), "pairs"),
        (_at(8, struct.pack("<Q", 0)), "lacks"),
        (_pair("x", 8, struct.pack("<Q", 1 << 62)), "a string has"),
        (_pair("x", 9, struct.pack("<IQ", 0, 1 << 33)), "ends within its header"),
        (_pair("x", 9, struct.pack("<IQ", 10, 1 << 63)), "ends within its header"),
        (_pair("x", 9, struct.pack("<IQQ", 8, 2, (1 << 64) - 1)), "ends within its header"),
        (_pair("x", 9, struct.pack("<IQ", 9, 1) * 5_000), "lists within lists"),
        (_pair("x", 77, b""), "type 77"),
        (_pair("general.alignment", 4, struct.pack("<I", 0)), "alignment is 0"),
        (_number("llama.block_count", (1 << 32) - 1), "num_hidden_layers is 4294967295"),
        (_number("llama.attention.head_count", 0), "head_count is 0"),
        (_retyped("llama.context_length", 6, NAN), "context_length is nan"),
        (_retyped("llama.block_count", 6, INFINITY), "block_count is inf"),
        (_retyped("tokenizer.ggml.eos_token_id", 6, NAN), "eos_token_id is nan"),
        (_tensor(0, struct.pack("<I", 9)), "9 dimensions"),
        (_tensor(4, struct.pack("<Q", 0)), "has the shape [0]"),
        (_tensor(4, struct.pack("<Q", 1 << 63)), "has the shape"),
        (_tensor(12, struct.pack("<I", 99)), "type 99"),
        (_tensor(16, struct.pack("<Q", (1 << 64) - 1)), "not all there"),
        (_tensor(16, struct.pack("<Q", 0)), "contradicts itself"),
        (lambda content: content.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"), "two tensors"),
    ],
)
def test_a_gguf_file_that_lies_is_refused_and_leaves_nothing(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    path = tmp_path / "models" / "odd.gguf"
    path.parent.mkdir()
    write_tiny_gguf(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelLoadError) as refused:
        ensure_imported(path, lambda *_: None, tmp_path / "cache")
    assert words in refused.value.message and len(refused.value.message) < LONGEST_MESSAGE
    assert [child.name for child in (tmp_path / "cache").glob("models/*") if not child.name.endswith(".lock")] == []
    entry = listed_beside(tmp_path, path)
    assert entry is not None and (entry.state != "ready")


def test_a_gguf_file_cut_anywhere_in_its_header_is_said_to_end(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_tiny_gguf(whole)
    content = whole.read_bytes()
    end = content.index(_text("output_norm.weight"))
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 8, 20, 24, *range(30, end, end // 40)):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="no whole GGUF file"):
            ensure_imported(cut, lambda *_: None, tmp_path / "cache")

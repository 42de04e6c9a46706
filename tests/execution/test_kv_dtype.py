"""Keys and values of 8 bits, from the knob to the backend: who has them, who is refused, and what follows from them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import loader
from engine.config import ConfigError, EngineConfig
from engine.execution import backends, device
from engine.execution.device import DeviceChoice, choose_device, library_choice
from engine.execution.sizing import plan_memory
from engine.loader import load_engine
from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.models.transformers_spec import AttentionLayer, TransformersSpec
from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec
from tests.models.families import VOCAB, SavedModel

FP8 = EngineConfig(kv_dtype="fp8")
GIB = 2**30


def has_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    patch.setattr(device, "gpu_problem", lambda: None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)


def refusal(config: EngineConfig = FP8) -> str:
    with pytest.raises(ModelLoadError) as caught:
        choose_device(config)
    assert caught.value.kind == "unsupported"
    assert caught.value.message.startswith("kv_dtype is fp8, but ") and "--kv-dtype auto" in caught.value.message
    return caught.value.message


# Who has them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_nvidia_has_them_from_8_9_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    has_gpu(monkeypatch, capability)
    choice = choose_device(FP8)
    assert (choice.dtype, choice.kv_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert choose_device(EngineConfig()).kv_dtype is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_an_older_gpu_is_named_with_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    has_gpu(monkeypatch, capability)
    assert f"Some GPU has compute capability {capability[0]}.{capability[1]}" in refusal()
    assert choose_device(EngineConfig()).kv_dtype is None


@pytest.mark.parametrize(
    ("architecture", "kind"), [("gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz), ("gfx90a", None)]
)
def test_amd_has_its_own(monkeypatch: pytest.MonkeyPatch, architecture: str, kind: torch.dtype | None) -> None:
    has_gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(gcnArchName=architecture, total_memory=GIB)
    )
    if kind is None:
        assert "Some GPU is gfx90a" in refusal()
    else:
        assert choose_device(FP8).kv_dtype == kind


def test_a_cpu_has_none_and_says_why_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device is cpu" in refusal(EngineConfig(device="cpu", kv_dtype="fp8"))
    monkeypatch.setattr(device, "gpu_problem", lambda: "torch finds no GPU")
    assert "torch finds no GPU, and a CPU does not" in refusal()
    monkeypatch.undo()
    spec = DecoderSpec("A", 8, 8, 8, 1, 1, 1, 8, 1e-5, 8, torch.float32, torch.ones(4), kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        CpuBackend().load(spec, {})


def test_a_model_of_the_library_has_none() -> None:
    layer = AttentionLayer("layers.0.attention", 1, 16, 16, None)
    spec = TransformersSpec(
        "Gemma3ForCausalLM", {}, "Transformers 5", VOCAB, 256, "", 1000, dtype=torch.float32, layers=(layer,)
    )
    choice = DeviceChoice(torch.device("cuda", 0), torch.bfloat16, "it works", kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ModelLoadError, match=r"Gemma3ForCausalLM runs through Transformers 5.*--kv-dtype auto"):
        library_choice(choice, FP8, spec, GIB)
    assert library_choice(choice, EngineConfig(), spec, GIB).kv_dtype is None and spec.kv_dtype is None


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'int4'"):
        EngineConfig(kv_dtype="int4")


# What follows --------------------------------------------------------------------------------------------------------


class _AsOnAGpu(CpuBackend):
    """Takes a spec as a GPU's backend does, and computes with keys and values as a CPU has them."""

    def __init__(self, specs: list[DecoderSpec]) -> None:
        super().__init__()
        self.specs = specs

    def load(self, spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self.specs.append(spec)
        super().load(dataclasses.replace(spec, kv_dtype=None), weights)


def test_the_type_reaches_the_backend_and_is_told(
    tiny: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[DecoderSpec] = []

    def make(choice: DeviceChoice, *_: object, **__: object) -> Backend:
        return _AsOnAGpu(specs)

    choice = DeviceChoice(torch.device("cpu"), torch.float32, "pretended", kv_dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(loader, "choose_device", lambda config: choice)
    monkeypatch.setattr(backends, "make_backend", make)
    folder = tmp_path / "tiny"
    shutil.copytree(tiny.folder, folder)
    write_tokenizer(folder)
    loaded = load_engine(EngineConfig(model=str(folder), kv_dtype="fp8", threads=1), lambda *_: None)
    assert [spec.kv_dtype for spec in specs] == [torch.float8_e4m3fn]
    assert (loaded.info.dtype, loaded.info.kv_dtype) == ("float32", "float8_e4m3fn")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def test_a_pool_holds_twice_the_tokens(tiny: SavedModel) -> None:
    checkpoint = Checkpoint.open(tiny.folder)
    halves = checkpoint.spec(torch.bfloat16)
    bytes_ = checkpoint.spec(torch.bfloat16, None, torch.float8_e4m3fn)
    assert 2 * bytes_.kv_bytes_per_token() == halves.kv_bytes_per_token()
    wide, narrow = (plan_memory(spec, FP8, 256, GIB, on_gpu=True) for spec in (halves, bytes_))
    assert (2 * narrow.block_bytes, narrow.weight_bytes) == (wide.block_bytes, wide.weight_bytes)
    needed = wide.weight_bytes + wide.working_bytes
    wide, narrow = (plan_memory(spec, FP8, 256, needed + 2**20, on_gpu=True) for spec in (halves, bytes_))
    assert 2 * wide.num_blocks <= narrow.num_blocks <= 2 * wide.num_blocks + 1


def test_blocks_of_another_type_are_never_taken_for_each_other(tiny: SavedModel) -> None:
    checkpoint = Checkpoint.open(tiny.folder)
    spec = checkpoint.spec(torch.bfloat16)
    assert isinstance(spec, DecoderSpec)
    kinds = (None, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    keys = [loader._cache_key(checkpoint, dataclasses.replace(spec, kv_dtype=kind)) for kind in kinds]
    assert keys[0] == keys[1] and len(set(keys)) == 3

"""From a configuration to an engine: what is chosen, what is refused, and with which sentence."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import loader
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.execution import backends, device, first_step, preparation
from engine.execution.device import choose_device
from engine.loader import LoadedEngine, load_engine
from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.request import SamplingParams
from tests.models.families import VOCAB, SavedModel


@pytest.fixture(scope="module")
def folder(tiny: SavedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of as many words as it has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    target = tmp_path_factory.mktemp("loader") / "tiny-llama"
    shutil.copytree(tiny.folder, target)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return target


def load(folder: Path, **options: Any) -> LoadedEngine:
    given = {"device": "cpu", "dtype": "float32", "threads": 1, **options}
    return load_engine(EngineConfig(model=str(folder), **given), ignore)


def ignore(stage: str, done: int, total: int) -> None:
    pass


def answer(core: EngineCore, prompt: list[int], length: int = 5) -> list[int]:
    core.add_request(1, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            tokens += output.token_ids if output.request_id == 1 else []
    return tokens


# What is chosen ------------------------------------------------------------------------------------------------------


def test_a_loaded_engine_answers_and_says_what_it_is(folder: Path, tiny: SavedModel) -> None:
    stages: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(folder), dtype="float32", threads=1)
    loaded = load_engine(config, lambda *stage: stages.append(stage))
    prompt = [5, 6, 7, 8]
    tokens = answer(loaded.core, prompt)
    assert tokens == tiny.logits([*prompt, *tokens])[3:-1].argmax(dim=-1).tolist()
    info = loaded.info
    assert (info.name, info.architecture, info.dtype, info.backend) == (
        "tiny-llama",
        "LlamaForCausalLM",
        "float32",
        "cpu",
    )
    assert info.vocab_size == VOCAB and info.max_model_len == 256 and info.threads == 1
    assert info.parameters == sum(p.numel() for p in tiny.reference.parameters())
    assert info.weight_bytes == 4 * info.parameters
    assert info.kv_bytes_per_block == 16 * 2 * 3 * 2 * 16 * 4
    assert len(info.weights_sha256) == 64 and info.backend_reason and info.load_seconds > 0
    assert 32 <= info.token_budget <= 2048 and info.token_budget % 16 == 0
    assert [stage.split()[0] for stage, _, _ in stages[-2:]] == ["Measuring", "Reading"]
    counted = [(done, total) for stage, done, total in stages if total]
    assert counted[-1][0] == counted[-1][1] > 20


def test_the_pool_is_no_larger_than_all_requests_could_use(folder: Path) -> None:
    info = load(folder, scheduler=SchedulerConfig(max_num_seqs=3), max_model_len=100).info
    assert info.num_blocks == 3 * 7 and info.max_model_len == 100
    assert load(folder, cache=CacheConfig(num_blocks=9, block_size=8)).info.num_blocks == 9


def test_the_knobs_reach_the_engine(folder: Path) -> None:
    loaded = load(folder, scheduler=SchedulerConfig(max_num_batched_tokens=5, max_num_seqs=2), seed=3)
    keyframe = loaded.core.keyframe()
    assert keyframe.token_budget == 5 == loaded.info.token_budget
    assert keyframe.max_num_seqs == 2 and keyframe.num_blocks == loaded.info.num_blocks


def test_without_chunks_a_prompt_beyond_the_budget_goes_in_one_step(folder: Path) -> None:
    whole = load(folder, scheduler=SchedulerConfig(chunked_prefill=False, max_num_batched_tokens=16))
    assert whole.info.token_budget == 16 == whole.core.keyframe().token_budget
    prompt = list(range(5, 90)) * 2
    whole.core.add_request(1, prompt, SamplingParams(max_tokens=1))
    result = whole.core.step()
    assert result.record is not None and result.record.num_tokens == [len(prompt)]


def built(folder: Path, **options: Any) -> dict[str, Any]:
    """What a load hands to the core."""
    seen: dict[str, Any] = {}

    def spy(runner: Any, **parts: Any) -> EngineCore:
        seen.update(parts)
        return EngineCore(runner, **parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "EngineCore", spy)
        seen["info"] = load(folder, **options).info
    return seen


def test_the_core_gets_room_for_swapped_blocks_and_what_preemption_costs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = built(folder, cache=CacheConfig(num_blocks=20))
    assert measured["num_host_blocks"] == 20 == measured["info"].num_host_blocks
    costs = measured["costs"]
    assert 0.0 < costs.seconds_per_token < 0.1 and 0.0 < costs.seconds_per_block < 0.1

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the budget was given")

    monkeypatch.setattr(first_step, "measure_token_budget", never)
    scheduler = SchedulerConfig(max_num_batched_tokens=32)
    given = built(folder, cache=CacheConfig(num_blocks=20, swap_blocks=3), scheduler=scheduler)
    assert given["num_host_blocks"] == 3 == given["info"].num_host_blocks
    assert 0.0 < given["costs"].seconds_per_token < 0.1


def test_a_model_that_is_loaded_is_no_garbage_to_be_looked_through(folder: Path) -> None:
    gc.unfreeze()
    load(folder)
    assert gc.get_freeze_count() > 10_000


# Further cores -------------------------------------------------------------------------------------------------------


def test_a_fresh_core_knows_nothing_of_the_one_before(folder: Path, tiny: SavedModel) -> None:
    """Nor does it read what that one left in the pool: it may be anything."""
    loaded = load(folder, cache=CacheConfig(num_blocks=12))
    answer(loaded.core, [7] * 150, 20)
    for request_id in range(2, 5):
        loaded.core.add_request(request_id, [9] * 40, SamplingParams(max_tokens=30))
    loaded.core.step()
    with torch.inference_mode():
        loaded.core._runner._backend._kv()[:, 1:] = torch.nan  # type: ignore[attr-defined]
    prompt = list(range(5, 45))
    fresh = loaded.fresh_core(SchedulerConfig(max_num_seqs=3))
    assert fresh is not loaded.core and not fresh.has_work
    keyframe = fresh.keyframe()
    assert keyframe.step == 0 and keyframe.requests == [] and not keyframe.cached_blocks
    assert keyframe.max_num_seqs == 3 and keyframe.num_blocks == 12
    fresh.add_request(9, prompt[:3], SamplingParams(max_tokens=20))  # padded to the other's length
    tokens = answer(fresh, prompt, 10)
    assert tokens == tiny.logits([*prompt, *tokens])[39:-1].argmax(dim=-1).tolist()
    assert not fresh.has_work and fresh.keyframe().cached_blocks


def test_a_fresh_core_has_the_knobs_it_is_given_and_else_those_of_the_load(folder: Path) -> None:
    sampled = SamplingParams(max_tokens=12, temperature=2.0)

    def draw(core: EngineCore) -> tuple[list[int], int]:
        tokens: list[int] = []
        cached = 0
        for request_id in (1, 2):
            core.add_request(request_id, list(range(5, 45)), sampled)
            while core.has_work:
                for output in core.step().outputs:
                    tokens += output.token_ids
                    cached = output.cached_tokens
        return tokens, cached

    loaded = load(folder, seed=3, scheduler=SchedulerConfig(max_num_batched_tokens=48))
    first, cached = draw(loaded.core)
    assert cached > 0
    again = loaded.fresh_core(SchedulerConfig())
    assert again.keyframe().token_budget == 48
    assert draw(again) == (first, cached)
    assert draw(loaded.fresh_core(SchedulerConfig(), prefix_cache=False)) == (first, 0)
    other = loaded.fresh_core(SchedulerConfig(max_num_batched_tokens=24), seed=4)
    assert other.keyframe().token_budget == 24
    assert draw(other)[0] != first


def test_memory_that_runs_out_in_a_step_leaves_a_smaller_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this core and those after it, and the answer is the same."""
    loaded = load(folder, cache=CacheConfig(num_blocks=20, swap_blocks=4))
    prompt = list(range(5, 45))
    expected = answer(loaded.fresh_core(SchedulerConfig()), prompt, 10)
    core, forward, steps = loaded.fresh_core(SchedulerConfig()), loaded.model.backend.forward, iter(range(100))

    def short(batch: Any) -> torch.Tensor:
        if next(steps) == 4:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")
        return forward(batch)

    monkeypatch.setattr(loaded.model.backend, "forward", short)
    assert answer(core, prompt, 10) == expected
    info = loaded.info_of(core)
    assert (info.num_blocks, info.num_host_blocks) == (16, 4) and core.keyframe().num_blocks == 16
    later = loaded.fresh_core(SchedulerConfig(), block_size=8)
    assert later.keyframe().num_blocks == 32 and answer(later, prompt, 10) == expected
    assert loaded.fresh_core(SchedulerConfig()).keyframe().num_blocks == 16


def test_the_tokenizers_own_end_ends_an_answer_too(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert 7 not in built(other)["eos_token_ids"] >= {2}
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "w7"}}))
    assert built(other)["eos_token_ids"] >= {2, 7}


def test_an_end_id_that_the_model_does_not_have_is_harmless(folder: Path, tmp_path: Path) -> None:
    """Tokenizers with more entries than the model's head exist; ``min_tokens`` bans the ids that end an answer."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": [VOCAB + 5, -1, 2]}))
    core = load(other).core
    core.add_request(1, [5, 6, 7], SamplingParams(max_tokens=3, min_tokens=2))
    outputs = [output for _ in range(3) for output in core.step().outputs]
    assert not any(output.error for output in outputs) and sum(len(output.token_ids) for output in outputs) >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_types_run_and_are_near_float32(folder: Path, tiny: SavedModel, dtype: str) -> None:
    loaded = load(folder, dtype=dtype)
    assert (loaded.info.dtype, loaded.info.kv_dtype) == (dtype, "bfloat16")
    assert loaded.info.weight_bytes < (2.1 if dtype == "bfloat16" else 1.2) * loaded.info.parameters
    prompt = [5, 6, 7, 8]
    token = answer(loaded.core, prompt, 1)[0]
    logits = tiny.logits(prompt)[-1]
    assert float(logits.max() - logits[token]) < 0.1 * float(logits.max() - logits.min())


def test_another_model_or_type_has_other_block_hashes(folder: Path, tmp_path: Path) -> None:
    def key(where: Path, **options: Any) -> bytes:
        return bytes(built(where, **options)["cache_key"])

    longer = tmp_path / "longer"
    shutil.copytree(folder, longer)
    config = json.loads((longer / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (longer / "config.json").write_text(json.dumps(config))
    keys = [key(folder), key(folder, dtype="bfloat16"), key(longer)]
    assert len(set(keys)) == 3
    assert key(folder, seed=5) == keys[0]
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec(torch.bfloat16)
    assert loader._cache_key(checkpoint, spec) == keys[1]
    assert loader._cache_key(checkpoint, dataclasses.replace(spec, weight_dtype=torch.bfloat16)) == keys[1]
    assert loader._cache_key(checkpoint, dataclasses.replace(spec, weight_dtype=torch.int8)) not in keys


# What is refused -----------------------------------------------------------------------------------------------------


def refusal(folder: Path, **options: Any) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)
    return caught.value


def test_a_length_beyond_the_models_is_refused(folder: Path) -> None:
    error = refusal(folder, max_model_len=257)
    assert "257" in error.message and "256" in error.message


def test_a_pool_beyond_memory_is_refused_with_what_would_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "available_memory", lambda: 400 * 2**20)
    error = refusal(folder, cache=CacheConfig(num_blocks=1_000_000))
    assert error.kind == "memory"
    assert "1,000,000 KV blocks" in error.message and "MiB are free" in error.message and "--kv-blocks" in error.message
    fitting = int(error.message.rsplit("--kv-blocks ", 1)[1].rstrip(")."))
    assert load(folder, cache=CacheConfig(num_blocks=fitting)).info.num_blocks == fitting
    assert refusal(folder, cache=CacheConfig(num_blocks=fitting + 1)).kind == "memory"


def test_host_memory_beyond_what_is_left_is_refused_with_what_would_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "available_memory", lambda: 400 * 2**20)
    error = refusal(folder, cache=CacheConfig(num_blocks=100, swap_blocks=1_000_000))
    assert error.kind == "memory" and "1,000,000 blocks of host memory" in error.message
    fitting = int(error.message.rsplit("--swap-blocks ", 1)[1].rstrip(")."))
    cache = CacheConfig(num_blocks=100, swap_blocks=fitting)
    assert load(folder, cache=cache).info.num_host_blocks == fitting
    assert refusal(folder, cache=CacheConfig(num_blocks=100, swap_blocks=fitting + 1)).kind == "memory"


def test_a_model_beyond_memory_is_refused_before_its_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "available_memory", lambda: 100 * 2**20)

    def never(*_: Any) -> Any:
        raise AssertionError("the weights were touched")

    monkeypatch.setattr(loader.Checkpoint, "tensors", never)
    error = refusal(folder)
    assert error.kind == "memory" and "100 MiB" in error.message and "float32" in error.message


def test_a_memory_limit_holds_for_the_blocks_of_a_later_core_too(folder: Path) -> None:
    loaded = load(folder, memory_limit=4 * 2**20)
    info = loaded.info
    assert info.weight_bytes + info.num_blocks * info.kv_bytes_per_block <= 4 * 2**20
    with pytest.raises(ModelLoadError, match=r"left by the memory limit"):
        loaded.fresh_core(SchedulerConfig(), kv_blocks=1_000_000)
    assert len(answer(loaded.fresh_core(SchedulerConfig()), [5, 6, 7])) == 5
    error = refusal(folder, memory_limit=1000)
    assert error.kind == "memory" and "memory_limit" in error.message


def test_float16_on_a_cpu_is_refused_with_the_way_out(folder: Path) -> None:
    error = refusal(folder, dtype="float16")
    assert error.kind == "unsupported" and "--dtype float32" in error.message


def test_weights_that_give_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    error = refusal(broken)
    assert error.kind == "damaged" and "finite" in error.message


# Devices -------------------------------------------------------------------------------------------------------------


def raise_always(*args: Any, **options: Any) -> Any:
    raise RuntimeError("CUDA driver initialization failed")


def break_every_call(patch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "current_device", "get_device_name", "mem_get_info", "is_bf16_supported", "init"):
        patch.setattr(torch.cuda, name, raise_always)


def claim_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """A driver that says yes, until the first operation."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch, "ones", raise_always)


def find_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("condition", [break_every_call, claim_a_gpu, find_none])
def test_no_state_of_a_gpu_keeps_the_cpu_from_working(
    folder: Path, monkeypatch: pytest.MonkeyPatch, condition: Callable[[pytest.MonkeyPatch], None]
) -> None:
    condition(monkeypatch)
    choice = choose_device(EngineConfig())
    assert choice.device.type == "cpu"
    if condition is not find_none:
        assert "CUDA driver initialization failed" in choice.reason
    loaded = load(folder, device="auto", dtype="auto")
    assert loaded.info.device == "cpu" and loaded.info.backend_reason == choice.reason
    error = refusal(folder, device="cuda")
    assert error.kind == "unsupported" and "device is cuda" in error.message and "--device cpu" in error.message


def test_a_gpu_that_fails_at_warm_up_is_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an installation: the GPU answers, its kernels do not compile. Auto falls back and says so."""
    attempts: list[str] = []

    def gpu(config: EngineConfig) -> device.DeviceChoice:
        return device.DeviceChoice(torch.device("cuda", 0), torch.float32, "the GPU works")

    def make(choice: device.DeviceChoice, **given: Any) -> Any:
        if choice.is_gpu:
            attempts.append("gpu")
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
        return device.make_backend(choice, **given)

    monkeypatch.setattr(loader, "choose_device", gpu)
    monkeypatch.setattr(backends, "make_backend", make)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**34, 2**34))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    loaded = load(folder, device="auto")
    assert attempts == ["gpu"] and loaded.info.device == "cpu"
    sentence = "the GPU cannot be used: no C compiler was found"
    assert sentence in loaded.info.backend_reason and "install gcc, or set CC" in loaded.info.backend_reason
    error = refusal(folder, device="cuda")
    assert error.kind == "unsupported" and sentence in error.message and "--device cpu" in error.message


def test_a_cpu_takes_int8_unless_it_is_told_otherwise() -> None:
    auto, int8 = (choose_device(EngineConfig(device="cpu", dtype=dtype)) for dtype in ("auto", "int8"))
    assert auto == int8 and "int8 products with " in auto.reason
    for dtype in (torch.bfloat16, torch.float32):
        choice = choose_device(EngineConfig(device="cpu", dtype=str(dtype).removeprefix("torch.")))
        assert (choice.dtype, choice.weight_dtype) == (dtype, None)


def test_int8_on_a_cpu_has_keys_and_values_in_bfloat16() -> None:
    choice = choose_device(EngineConfig(device="cpu", dtype="int8"))
    assert (choice.device.type, choice.dtype, choice.weight_dtype) == ("cpu", torch.bfloat16, torch.int8)


def find_one(patch: pytest.MonkeyPatch, *, bfloat16: bool = True) -> None:
    """A GPU that answers."""
    patch.setattr(device, "gpu_problem", lambda: None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)


@pytest.mark.parametrize(("bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_int8_on_a_gpu_has_the_rest_in_its_own_type(
    monkeypatch: pytest.MonkeyPatch, bfloat16: bool, dtype: torch.dtype
) -> None:
    find_one(monkeypatch, bfloat16=bfloat16)
    for asked in ("cuda", "auto"):
        choice = choose_device(EngineConfig(device=asked, dtype="int8"))
        assert (choice.device.type, choice.dtype, choice.weight_dtype) == ("cuda", dtype, torch.int8)
    auto = choose_device(EngineConfig())
    assert (auto.dtype, auto.weight_dtype) == (dtype, None)


def test_auto_takes_int8_on_a_gpu_without_room_for_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_one(monkeypatch)

    def choice_with(free: int, **options: Any) -> device.DeviceChoice:
        config = EngineConfig(model=str(folder), **options)
        source = preparation.Source(config, Checkpoint.open(folder), None, lambda: pytest.fail("not needed"))
        return preparation._in_a_type_that_fits(source, choose_device(config), free)

    assert choice_with(2**40).weight_dtype is None
    small = choice_with(2**20)
    assert (small.device.type, small.dtype, small.weight_dtype) == ("cuda", torch.bfloat16, torch.int8)
    assert "int8, because with room for" in small.reason and "and 1 MiB are free" in small.reason
    limited = choice_with(2**40, memory_limit=2**16)
    assert limited.weight_dtype == torch.int8 and "the memory limit is " in limited.reason
    assert choice_with(2**20, dtype="bfloat16").weight_dtype is None
    assert choice_with(2**20, device="cpu", dtype="bfloat16").weight_dtype is None

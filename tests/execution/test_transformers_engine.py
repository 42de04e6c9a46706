"""The whole engine on models that the Transformers library computes: the tokens of its own ``generate``, alone and
together, in chunks, after prefix hits, recomputed and swapped; and what the load says, takes and refuses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import loader
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.environment import module_environment
from engine.execution import preparation
from engine.execution.device import DeviceChoice
from engine.loader import LoadedEngine, load_engine
from engine.models.errors import ModelLoadError
from engine.request import SamplingParams
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.kernels.swap_contract import IMPOSSIBLE_PAIRS, assert_refused
from tests.models.families import VOCAB, SavedModel
from tests.models.transformers_families import save_library_family
from tests.oracles import EngineProbe, make_core

LENGTHS = (1, 7, 8, 9, 17, 40)
OUTPUT = 10


@pytest.fixture(scope="module", params=["gemma3", "phi3", "olmo2", "granite", "gpt-neox", "mixtral"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_library_family(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def make(saved: SavedModel) -> Callable[..., EngineCore]:
    def core(num_blocks: int = 100, block_size: int = 4, num_host_blocks: int = 0, **options: Any) -> EngineCore:
        model = PagedModel(saved.folder, block_size=block_size, num_blocks=num_blocks)
        model.backend.allocate_host_kv(num_host_blocks + 1)
        limits = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 256, "vocab_size": VOCAB}
        return make_core(runner=model.runner, num_host_blocks=num_host_blocks, **limits, **options)

    return core


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, VOCAB, seed=8) for length in LENGTHS]


@pytest.fixture(scope="module")
def generated(saved: SavedModel, prompts: list[list[int]]) -> list[list[int]]:
    """By the library alone, one after the other, whatever the tokens."""
    saved.reference.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        told = {"do_sample": False, "max_new_tokens": OUTPUT, "pad_token_id": 0}
        row = torch.tensor([prompt])
        output = saved.reference.generate(row, attention_mask=torch.ones_like(row), **told)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def run(probe: EngineProbe, prompts: list[list[int]]) -> list[list[int]]:
    ids = [probe.add(prompt, SamplingParams(max_tokens=OUTPUT)) for prompt in prompts]
    probe.run()
    return [probe.answers[request_id].token_ids for request_id in ids]


def test_alone_and_together(make: Callable[..., EngineCore], prompts: Any, generated: list[list[int]]) -> None:
    alone = EngineProbe(make(prefix_cache=False, token_budget=256, max_num_seqs=1))
    assert run(alone, prompts) == generated
    together = EngineProbe(make(prefix_cache=False, token_budget=256))
    assert run(together, prompts) == generated
    assert max(len(record.request_ids) for record in together.records) == len(LENGTHS)


def test_chunks_and_prefix_hits(make: Callable[..., EngineCore], prompts: Any, generated: list[list[int]]) -> None:
    probe = EngineProbe(make(token_budget=7))
    assert run(probe, prompts) == generated
    before = probe.records[-1].totals.prefix_hit_tokens
    assert run(probe, prompts) == generated
    assert probe.records[-1].totals.prefix_hit_tokens - before >= 40


def test_recompute_and_swap(make: Callable[..., EngineCore], prompts: Any, generated: list[list[int]]) -> None:
    recomputing = EngineProbe(make(num_blocks=18, token_budget=40))
    assert run(recomputing, prompts) == generated
    assert recomputing.records[-1].totals.recomputed_tokens > 0
    swapping = EngineProbe(make(num_blocks=18, num_host_blocks=40, token_budget=40, preemption="swap"))
    assert run(swapping, prompts) == generated
    assert swapping.records[-1].totals.swapped_in_blocks > 0


def test_drafts_change_nothing(make: Callable[..., EngineCore], prompts: Any, generated: list[list[int]]) -> None:
    probe = EngineProbe(make(token_budget=64, speculative="ngram", draft_tokens=3))
    repeated = [[*prompt, *prompt] for prompt in prompts]
    plain = run(EngineProbe(make(token_budget=64)), [*prompts, *repeated])
    assert run(probe, [*prompts, *repeated]) == plain
    assert plain[: len(prompts)] == generated


# Blocks --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_library_family("olmo2", tmp_path_factory.mktemp("olmo2"))


def test_blocks_that_do_not_exist_are_refused(olmo2: SavedModel) -> None:
    backend = PagedModel(olmo2.folder, block_size=4, num_blocks=11).backend
    with pytest.raises(RuntimeError, match="host"):
        backend.swap_out([(1, 1)])
    backend.allocate_host_kv(9)
    for pair in IMPOSSIBLE_PAIRS:
        assert_refused(backend, pair)


def test_copies_read_all_before_they_write(olmo2: SavedModel) -> None:
    """A copied block and one that went to the host and came back somewhere else give the same logits."""
    model = PagedModel(olmo2.folder, block_size=4, num_blocks=30)
    model.backend.allocate_host_kv(9)
    prompt = random_prompt(24, VOCAB)
    request = make_request(0, prompt)
    model.logits([(request, 20)])
    table = model.table(request)
    moved = [block for block in range(1, 31) if block not in table][: len(table)]
    model.backend.copy_blocks([(table[0], moved[0]), (table[1], moved[1]), (table[2], table[0])])
    model.backend.swap_out([(table[1], 3), (table[3], 4), (table[4], 5)])
    model.backend.swap_in([(3, table[3]), (4, moved[3]), (5, moved[4])])
    model._tables[0] = [moved[0], table[3], table[0], moved[3], moved[4]]
    [logits] = model.logits([(request, 4)])
    assert float((logits - olmo2.logits(prompt)[20:]).abs().max()) < 1e-4


def test_nothing_computes_before_there_are_weights_and_blocks(olmo2: SavedModel) -> None:
    from engine.execution.transformers_backend import TransformersBackend

    model = PagedModel(olmo2.folder, block_size=4, num_blocks=4)
    batch = model.plan([(make_request(0, [5, 6]), 2)])
    with pytest.raises(RuntimeError, match="load a model first"):
        TransformersBackend("cpu").allocate_kv(4, 4)
    model.backend._keys = []
    with pytest.raises(RuntimeError, match="allocate the KV storage first"):
        model.runner.execute(batch)


# Loading -------------------------------------------------------------------------------------------------------------


def with_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w9"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "tiny-gemma"
    save_library_family("gemma3", folder)
    return with_tokenizer(folder)


def load(folder: Path, **options: Any) -> LoadedEngine:
    given = {"device": "cpu", "threads": 1, "cache": CacheConfig(num_blocks=40), **options}
    given["scheduler"] = SchedulerConfig(max_num_batched_tokens=64)
    return load_engine(EngineConfig(model=str(folder), **given), lambda *_: None)


def answer(core: EngineCore, prompt: list[int], length: int = 5) -> list[int]:
    core.add_request(1, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            tokens += output.token_ids
    return tokens


def refusal(folder: Path, **options: Any) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)
    return caught.value


def test_a_loaded_engine_says_what_computes_it(folder: Path) -> None:
    loaded = load(folder)
    info = loaded.info
    assert (info.architecture, info.backend, info.dtype, info.kv_dtype) == (
        "Gemma3ForCausalLM",
        "transformers",
        "float32",
        "float32",
    )
    assert "Gemma3ForCausalLM runs through Transformers 5." in info.backend_reason
    assert "int8" not in info.backend_reason and "at most half of the free memory in float32" in info.backend_reason
    assert len(answer(loaded.core, [5, 6, 7, 8])) == 5
    assert loaded.model.block_bytes() == info.kv_bytes_per_block
    fewer = loaded.fresh_core(SchedulerConfig(), block_size=8, kv_blocks=10)
    assert len(answer(fewer, [5, 6, 7, 8])) == 5


def test_on_a_cpu_it_is_bfloat16_where_float32_would_fill_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.execution.sizing import WORKING_BYTES

    enough = WORKING_BYTES * 2
    monkeypatch.setattr(preparation, "available_memory", lambda: enough)
    library_choice = preparation.library_choice

    def at(free: int) -> Any:
        return lambda choice, config, spec, _: library_choice(choice, config, spec, free)

    spec = loader.Checkpoint.open(folder).spec(torch.float32)
    monkeypatch.setattr(preparation, "library_choice", at(2 * spec.parameters * 4 - 1))
    info = load(folder).info
    assert info.dtype == info.kv_dtype == "bfloat16" and "more than half" in info.backend_reason
    monkeypatch.setattr(preparation, "library_choice", at(2 * spec.parameters * 4))
    assert load(folder).info.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_type_that_is_asked_for_is_taken(folder: Path, dtype: str) -> None:
    info = load(folder, dtype=dtype).info
    assert info.dtype == info.kv_dtype == dtype and "device is cpu; Gemma3ForCausalLM runs" in info.backend_reason


def test_int8_is_refused_by_name(folder: Path) -> None:
    error = refusal(folder, dtype="int8")
    assert error.kind == "unsupported"
    assert "dtype is int8" in error.message and "Gemma3ForCausalLM" in error.message and "--dtype" in error.message


def test_a_length_beyond_long_rope_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_library_family("phi3-longrope", tmp_path)
    error = refusal(with_tokenizer(tmp_path), max_model_len=221)
    assert error.kind == "unsupported" and "221" in error.message and "--max-model-len 220" in error.message
    assert "LongRoPE" in error.message
    info = load(tmp_path).info
    assert info.max_model_len == 220 and "LongRoPE" in info.backend_reason


def test_one_model_drafts_for_another_of_its_kind(folder: Path, tmp_path: Path) -> None:
    save_library_family("gemma3", tmp_path, num_hidden_layers=1, layer_types=["full_attention"])
    speculative = SchedulerConfig(speculative=f"draft:{with_tokenizer(tmp_path)}", max_num_batched_tokens=64)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", threads=1, scheduler=speculative)
    loaded = load_engine(dataclasses.replace(config, cache=CacheConfig(num_blocks=40)), lambda *_: None)
    assert answer(loaded.core, [5, 6, 7], 12) == answer(load(folder, dtype="float32").core, [5, 6, 7], 12)


# Numbers that are too large for a type -------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model whose activations pass 65,504, as some of Gemma's do."""
    from safetensors.torch import load_file, save_file

    save_library_family("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.post_feedforward_layernorm.weight"] *= 1e5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return with_tokenizer(tmp_path)


def without_bfloat16(config: EngineConfig) -> DeviceChoice:
    """A device that computes no bfloat16: float16 is what auto takes there."""
    dtype = torch.float16 if config.dtype == "auto" else getattr(torch, config.dtype)
    return DeviceChoice(torch.device("cpu"), dtype, "this device has no bfloat16")


def test_float16_that_overflows_falls_back_where_nobody_asked_for_it(
    large: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "choose_device", without_bfloat16)
    info = load(large).info
    assert info.dtype == "float32" and "numbers are too large for float16" in info.backend_reason
    assert load(folder).info.dtype == "float16"


def test_float16_that_overflows_is_refused_where_it_was_asked_for(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "choose_device", without_bfloat16)
    error = refusal(large, dtype="float16")
    assert error.kind == "unsupported"
    assert "too large for float16" in error.message and "--dtype float32" in error.message


# The engine's own process --------------------------------------------------------------------------------------------

IN_A_PROCESS = """
import sys
from engine.quick_import import quick_import
with quick_import():
    from engine.loader import load_engine
assert "transformers" not in sys.modules
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
scheduler = SchedulerConfig(max_num_batched_tokens=64)
given = dict(device="cpu", dtype="float32", threads=1, cache=CacheConfig(num_blocks=20), scheduler=scheduler)
native = load_engine(EngineConfig(model=sys.argv[1], **given), lambda *_: None)
print(native.info.backend, "transformers" in sys.modules)
borrowed = load_engine(EngineConfig(model=sys.argv[2], **given), lambda *_: None)
print(borrowed.info.backend, "transformers" in sys.modules)
"""


def test_a_native_family_does_not_wait_for_the_library(folder: Path, tiny: SavedModel, tmp_path: Path) -> None:
    """In a process that has imported torch as the engine's does, without what shapes alone need."""
    import shutil

    native = with_tokenizer(Path(shutil.copytree(tiny.folder, tmp_path / "native")))
    done = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_PROCESS, str(native), str(folder)],
        capture_output=True,
        text=True,
        env=module_environment(),
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cpu False", "transformers True"]

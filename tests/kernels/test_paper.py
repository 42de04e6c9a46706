"""The arithmetic on paper against figures that come from elsewhere, and the README against the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from engine.models.architecture import expected_tensors
from kernels.cards import named_card
from kernels.sampling import SamplingBatch, SamplingRow
from kernels.spec import DecoderSpec, HostStep, StepLimits
from kernels.triton import attention_tiles, paged_attention
from kernels.triton.attention_kernels import combine_splits_kernel
from kernels.triton.backend import TritonBackend
from kernels.triton.graphs import Recording
from kernels.triton.sampling import host_columns, sample_rows, sampling_columns
from kernels.triton.step_inputs import StepInputs
from tests import paper

ROOT = Path(__file__).parents[2]
PARAMETERS = {"Llama 3.2 1B": 1_235_814_400, "Llama 3.1 8B": 8_030_261_248}
"""Of the checkpoints meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B."""
# Of torch's operators that a step calls.
LAUNCHING = {"linear"}
NOT_LAUNCHING = {"empty", "empty_like", "new_empty", "select", "slice", "view", "flatten", "copy_"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_reads_every_parameter_once_but_the_embedding(name: str) -> None:
    spec = paper.MODELS[name]
    unread = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    step = paper.decode_step(spec, 1, 1)
    assert step.weights == 2 * (PARAMETERS[name] - unread)
    assert step.logits == 2 * 128_256
    assert paper.resident_bytes(spec, 1, 1) == 2 * PARAMETERS[name] + step.kv
    halved = paper.decode_step(replace(spec, weight_dtype=torch.int8), 1, 1).weights
    assert step.weights / 2 < halved < 1.01 * step.weights / 2, "a byte each, and scales"


def test_keys_and_values_are_those_of_every_token() -> None:
    """Both models are known for their bytes per token: 32 KiB and 128 KiB."""
    for name, per_token in (("Llama 3.2 1B", 32 << 10), ("Llama 3.1 8B", 128 << 10)):
        assert paper.decode_step(paper.MODELS[name], 8, 1000).kv == 8 * 1001 * per_token


def test_operations_are_two_for_each_weight_and_attention() -> None:
    spec = paper.MODELS["Llama 3.1 8B"]
    norms = (2 * 32 + 1) * 4096
    multiplied = PARAMETERS["Llama 3.1 8B"] - 128_256 * 4096 - norms
    attention = 32 * 2 * (2 * 32 * 128 * 1000)
    assert paper.decode_step(spec, 1, 1000).operations == 2 * multiplied + attention
    assert paper.decode_step(spec, 5, 1000).operations == 5 * (2 * multiplied + attention)


def test_few_requests_are_bound_by_memory_and_very_many_by_products() -> None:
    card, spec = named_card("RTX 4090"), paper.MODELS["Llama 3.2 1B"]
    alone, crowd = paper.decode_step(spec, 1), paper.decode_step(spec, 4096, 1)
    assert alone.floor_s(card) == pytest.approx(alone.bytes / 1.008e12)
    assert crowd.floor_s(card) == pytest.approx(crowd.operations / 165.2e12)


class _Operators(TorchDispatchMode):
    """Notes torch's operators that give something on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if result.device.type == "meta":
            self.names.append(func.overloadpacket.__name__)
        return result


@dataclass(frozen=True)
class _Rerun:
    """Stands in for a graph: launches again what was launched when it was made."""

    run: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        self.run()


class _Capture:
    def record(self, run: Callable[[], torch.Tensor], beside: Recording | None) -> Recording:
        return _Rerun(run, run())


def _host_step(requests: int) -> HostStep:
    """Decodes of 1,024 tokens."""
    long, short = np.zeros(requests, np.int64), np.zeros(requests, np.int32)
    return HostStep(
        token_ids=long,
        positions=long,
        slot_mapping=long,
        query_start=np.arange(requests + 1, dtype=np.int32),
        seq_lens=short + paper.CONTEXT,
        block_tables=np.zeros((requests, paper.CONTEXT // paper.BLOCK_SIZE), np.int32),
        logits_rows=long,
    )


@pytest.mark.parametrize(("name", "spec"), paper.variants())
def test_a_step_launches_as_many_kernels(monkeypatch: pytest.MonkeyPatch, name: str, spec: DecoderSpec) -> None:
    """The backend computes steps on tensors without memory, two layers of the model, and each launch is counted."""
    if not isinstance(combine_splits_kernel, JITFunction):
        pytest.skip("this process interprets kernels")
    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: launched.append(self.fn.__name__))
    spec = replace(spec, num_layers=2)
    backend = TritonBackend("meta", capture=_Capture())
    shapes = expected_tensors(spec)
    backend.load(spec, {key: torch.empty(shape, dtype=spec.dtype, device="meta") for key, shape in shapes.items()})
    backend.allocate_kv(2, paper.BLOCK_SIZE)
    for card in paper.CARDS:
        processor = attention_tiles.Processor("sm_80", card.multiprocessors)
        monkeypatch.setattr(paged_attention, "processor", lambda device, found=processor: found)
        for requests in paper.BATCHES:
            backend.make_ready(StepLimits(max_requests=requests, max_tokens=requests, max_blocks=64))
            assert backend.graphs_problem == ""
            sampling = SamplingBatch([SamplingRow(temperature=0.7)] * requests)
            parameters = {key: torch.from_numpy(array) for key, array in host_columns(sampling).items()}
            columns = sampling_columns(sampling, parameters)
            launched.clear()
            with _Operators() as operators:
                logits = backend.forward(backend.upload(_host_step(requests), sampling))
                sample_rows(logits, columns, torch.empty(requests, dtype=torch.int64, device="meta"))
            assert set(operators.names) <= LAUNCHING | NOT_LAUNCHING
            assert operators.names.count("copy_") == 1, "one copy to the device"
            counted = len(launched) + sum(operator in LAUNCHING for operator in operators.names)
            assert counted == paper.added(spec, requests, card).kernels, (card.name, requests)


def test_the_upload_has_the_size_that_is_copied() -> None:
    spec, card = paper.MODELS["Llama 3.2 1B"], named_card("H200 SXM")
    for requests in paper.BATCHES:
        uploaded = StepInputs(torch.device("cpu")).upload(_host_step(requests))
        copied = uploaded.batch.token_ids.untyped_storage().nbytes()
        assert paper.added(spec, requests, card).upload == copied


def test_the_readme_shows_what_the_code_computes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for table in (paper.floor_table(), paper.added_table()):
        assert table in readme, "python -m tests.paper prints the tables for the README"

"""Recorded decode steps: the ids are the CPU backend's, whatever is recorded, padded, poisoned or not there."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kernels.triton.graphs as graphs
from kernels.cpu.backend import CpuBackend
from kernels.sampling import SamplingBatch, SamplingRow
from kernels.spec import DecoderSpec, HostStep, StepLimits
from kernels.triton.backend import TritonBackend
from kernels.triton.graphs import graph_sizes
from kernels.triton.sampling import host_columns
from kernels.triton.step_inputs import StepInputs, StepShape
from tests.kernels.interpreted.stand_in import KeptSteps, PoisonedBackend
from tests.kernels.interpreted.tiny_engine import run_engine, tiny_spec, tiny_weights

SPEC = tiny_spec(num_heads=3, head_dim=16, num_layers=2, hidden_size=24, intermediate_size=24, sliding_window=(8, None))
BLOCK_SIZE = 4
ROWS = 7
"""Requests of the steps that are made here one by one."""
WIDTH = 3
"""Blocks of each."""


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({"prompt_lengths": ()}, False),
        ({"preemption": "recompute"}, False),
        ({"preemption": "recompute"}, True),
        ({"preemption": "swap"}, True),
    ],
)
def test_the_ids_of_the_cpu_backend(options: dict[str, Any], overlap: bool) -> None:
    expected = run_engine(CpuBackend(), SPEC, **options)
    capture = KeptSteps()
    backend = PoisonedBackend("cpu", capture=capture)
    result = run_engine(backend, SPEC, overlap=overlap, **options)
    assert backend.graphs_problem == ""
    assert capture.sizes() == [4, 2, 1]
    assert result.token_ids == expected.token_ids
    if options.get("prompt_lengths") == ():
        assert set(capture.replays()) == {1}
    else:
        assert result.preemptions > 0 and result.cached_tokens > 0
        assert len(capture.replays()) > 1


def test_a_model_that_drafts_has_graphs_of_its_own() -> None:
    """It is run several times a step, with fewer rows each time and at the end for keys and values alone."""
    options: dict[str, Any] = {"prompt_lengths": (2, 6), "num_blocks": 12}
    expected = run_engine(CpuBackend(), SPEC, **options)
    model, drafts = KeptSteps(), KeptSteps()
    result = run_engine(
        PoisonedBackend("cpu", capture=model),
        SPEC,
        drafting=PoisonedBackend("cpu", capture=drafts),
        **options,
    )
    assert result.token_ids == expected.token_ids
    assert sum(drafts.replays().values()) > 2


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(16) == [1, 2, 4, 8, 16]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert graph_sizes(256) == [1, 2, 4, 8, *range(16, 257, 16)]


def _ready(backend: TritonBackend, limits: StepLimits, spec: DecoderSpec = SPEC) -> TritonBackend:
    """With a storage whose blocks, the null block aside, hold numbers."""
    backend.load(spec, tiny_weights(spec))
    backend.allocate_kv(1 + ROWS * WIDTH, BLOCK_SIZE)
    with torch.inference_mode():
        backend.kv.copy_(torch.randn(backend.kv.shape, generator=torch.Generator().manual_seed(1)))
    backend.make_ready(limits)
    return backend


def _decodes(count: int, *, longest: int = WIDTH * BLOCK_SIZE, logits: list[int] | None = None) -> HostStep:
    """One token each of ``count`` requests in the middle of their blocks; ``logits``: the rows that want them."""
    tables = (1 + np.arange(ROWS * WIDTH, dtype=np.int32)).reshape(ROWS, WIDTH)[:count]
    positions = longest - 1 - np.arange(count, dtype=np.int64) % longest
    blocks = tables[np.arange(count), positions // BLOCK_SIZE].astype(np.int64)
    return HostStep(
        token_ids=np.arange(3, 3 + count, dtype=np.int64),
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        block_tables=tables[:, : -(-longest // BLOCK_SIZE)].copy(),
        logits_rows=np.arange(count) if logits is None else np.array(logits, dtype=np.int64),
    )


ROOM = StepLimits(max_requests=ROWS, max_tokens=ROWS, max_blocks=WIDTH)


@pytest.fixture(scope="module")
def backends() -> tuple[PoisonedBackend, KeptSteps, TritonBackend]:
    """With graphs, what they are, and without."""
    capture = KeptSteps()
    return _ready(PoisonedBackend("cpu", capture=capture), ROOM), capture, _ready(TritonBackend("cpu"), ROOM)


@pytest.mark.parametrize("longest", [2, 12])
@pytest.mark.parametrize("count", range(1, ROWS + 1))
def test_padding_at_every_size(
    count: int, longest: int, backends: tuple[PoisonedBackend, KeptSteps, TritonBackend]
) -> None:
    graphs, capture, plain = backends
    before = capture.replays()
    step = _decodes(count, longest=longest)
    result, expected = graphs.forward(graphs.upload(step)), plain.forward(plain.upload(step))
    (used,) = {size for size, replays in capture.replays().items() if replays != before.get(size)}
    assert used == min(size for size in capture.sizes() if size >= count)
    assert result.shape == expected.shape and torch.allclose(result, expected, atol=1e-5)
    # Padding wrote to the null block alone.
    assert torch.allclose(graphs.kv[:, :, 1:], plain.kv[:, :, 1:], atol=1e-5)


@pytest.mark.parametrize("logits", [[], [1], [0, 2]])
def test_only_the_wanted_rows_have_logits(
    logits: list[int], backends: tuple[PoisonedBackend, KeptSteps, TritonBackend]
) -> None:
    graphs, capture, plain = backends
    before = sum(capture.replays().values())
    step = _decodes(3, logits=logits)
    result, expected = graphs.forward(graphs.upload(step)), plain.forward(plain.upload(step))
    assert sum(capture.replays().values()) == before + 1
    assert result.shape == (len(logits), SPEC.vocab_size) and torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("at_home", [True, False])
def test_ids_that_the_host_does_not_know(
    at_home: bool, backends: tuple[PoisonedBackend, KeptSteps, TritonBackend]
) -> None:
    graphs, capture, plain = backends
    known = _decodes(3)
    expected = plain.forward(plain.upload(known))
    logits = torch.full((4, SPEC.vocab_size), -1.0)
    logits[[0, 1, 2, 3], [50, 5, 51, 3]] = 1.0
    sampled = graphs.sample(logits, SamplingBatch([SamplingRow()] * 4))
    assert sampled.on_host().tolist() == [50, 5, 51, 3]
    previous = sampled.token_ids if at_home else sampled.token_ids.clone()
    if not at_home:
        graphs.sample(logits.flip(0), SamplingBatch([SamplingRow()] * 4))
    unknown = replace(known, token_ids=np.array([0, 4, 0]), token_source=np.array([3, -1, 1], dtype=np.int32))
    before = sum(capture.replays().values())
    assert torch.allclose(graphs.forward(graphs.upload(unknown, previous=previous)), expected, atol=1e-5)
    assert sum(capture.replays().values()) == before + 1
    with pytest.raises(ValueError, match="none"):
        graphs.upload(unknown)
    # Ids that have arrived stay what they are when others are sampled.
    graphs.sample(logits.flip(0), SamplingBatch([SamplingRow()] * 4))
    assert sampled.on_host().tolist() == [50, 5, 51, 3]


def test_parameters_travel_with_the_step(backends: tuple[PoisonedBackend, KeptSteps, TritonBackend]) -> None:
    graphs, _, plain = backends
    rows = [SamplingRow(temperature=0.9, seed=2**63 + seed, position=9) for seed in range(3)]
    rows[1] = replace(rows[1], top_k=20, top_p=0.9, min_p=0.01)
    sampling = SamplingBatch(rows)
    step = _decodes(3)
    expected = plain.sample(plain.forward(plain.upload(step)), SamplingBatch(rows)).on_host()
    result = graphs.sample(graphs.forward(graphs.upload(step, sampling)), sampling).on_host()
    assert result.tolist() == expected.tolist()
    greedy = graphs.sample(graphs.forward(graphs.upload(step)), SamplingBatch([SamplingRow()] * 3)).on_host()
    assert result.tolist() != greedy.tolist()


def test_a_step_beyond_the_limits_is_computed() -> None:
    capture = KeptSteps()
    graphs = _ready(PoisonedBackend("cpu", capture=capture), StepLimits(max_requests=2, max_tokens=2, max_blocks=1))
    plain = _ready(TritonBackend("cpu"), ROOM)
    home = graphs._inputs.memory
    for step in (_decodes(2, longest=2), _decodes(5), _decodes(2), _decodes(2, longest=2)):
        result = graphs.forward(graphs.upload(step))
        assert torch.allclose(result, plain.forward(plain.upload(step)), atol=1e-5)
    # The first and the last fit, the others are too many or have too wide a table; the recorded inputs stay in place.
    assert capture.replays() == {2: 2}
    assert graphs._inputs.memory is home


def test_limits_may_grow_and_memory_may_change() -> None:
    capture = KeptSteps()
    graphs = _ready(PoisonedBackend("cpu", capture=capture), StepLimits(max_requests=1, max_tokens=1, max_blocks=WIDTH))
    plain, step = _ready(TritonBackend("cpu"), ROOM), _decodes(2)
    capture.recordings.clear()
    graphs.make_ready(ROOM)
    assert capture.sizes() == [7, 4, 2, 1]
    expected = plain.forward(plain.upload(step))
    assert torch.allclose(graphs.forward(graphs.upload(step)), expected, atol=1e-5)
    assert capture.replays() == {2: 1}
    # Another storage: what was recorded writes to the old one.
    blocks = graphs.kv.clone()
    graphs.allocate_kv(1 + ROWS * WIDTH, BLOCK_SIZE)
    with torch.inference_mode():
        graphs.kv.copy_(blocks)
    assert torch.allclose(graphs.forward(graphs.upload(step)), expected, atol=1e-5)
    assert capture.replays() == {2: 1}


def test_a_recording_that_fails_is_said_and_done_without() -> None:
    capture = KeptSteps(fail_at=1)
    limits = StepLimits(max_requests=2, max_tokens=2, max_blocks=WIDTH)
    graphs = _ready(PoisonedBackend("cpu", capture=capture), limits)
    assert "OutOfMemoryError: out of memory" in graphs.graphs_problem and "where" not in graphs.graphs_problem
    assert torch.isfinite(graphs.forward(graphs.upload(_decodes(2)))).all()
    assert not capture.replays()
    capture.fail_at = None
    capture.recordings.clear()
    graphs.make_ready(limits)
    assert graphs.graphs_problem == ""


def test_without_graphs_nothing_is_recorded() -> None:
    capture = KeptSteps()
    graphs = _ready(PoisonedBackend("cpu", cuda_graphs=False, capture=capture), ROOM)
    assert torch.isfinite(graphs.forward(graphs.upload(_decodes(2)))).all()
    assert not capture.recordings and graphs.graphs_problem == ""


def test_parts_of_the_inputs_lie_apart_and_aligned() -> None:
    inputs = StepInputs(torch.device("cpu"))
    inputs.reserve(ROOM)
    assert inputs.fits(StepShape(ROWS, ROWS, ROWS), WIDTH) and not inputs.fits(StepShape(ROWS, ROWS, ROWS), WIDTH + 4)
    step = inputs.upload(_decodes(3, logits=[0, 2]), host_columns(SamplingBatch([SamplingRow()] * 2)))
    batch = step.batch
    parts = [
        *(batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start, batch.seq_lens, batch.logits_rows),
        *(batch.table_stride, batch.block_tables, step.token_source, *step.columns.values()),
    ]
    places = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts if part is not None)
    assert len(places) == 15 and places[0][0] == inputs.memory.data_ptr()
    assert all(begin % 16 == 0 for begin, _ in places)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert places[-1][0] == batch.block_tables.data_ptr(), "the tables come last"


@pytest.mark.parametrize("room", [ROOM, StepLimits(max_requests=1, max_tokens=1, max_blocks=1)])
def test_inputs_are_what_the_host_laid_out(room: StepLimits) -> None:
    """Padded or not, at the fixed address or not."""
    inputs = StepInputs(torch.device("cpu"))
    inputs.reserve(room)
    host = replace(_decodes(3), token_source=np.array([-1, 1, 0], dtype=np.int32))
    rows = [SamplingRow(temperature=0.5, top_k=i, top_p=0.75, min_p=0.25, seed=i, position=7) for i in range(3)]
    columns = host_columns(SamplingBatch(rows))
    for shape in (None, StepShape(5, 5, 5)):
        step = inputs.upload(host, columns, shape=shape)
        for name in (
            "token_ids",
            "positions",
            "slot_mapping",
            "query_start",
            "seq_lens",
            "block_tables",
            "logits_rows",
        ):
            found, expected = getattr(step.batch, name), torch.from_numpy(getattr(host, name))
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
        assert step.batch.query_lens_list == [1, 1, 1] and step.batch.seq_lens_list == [12, 11, 10]
        assert step.batch.table_stride is not None and step.batch.table_stride.tolist() == [WIDTH]
        assert step.token_source.tolist() == [-1, 1, 0]
        assert all(torch.equal(step.columns[name], torch.from_numpy(array)) for name, array in columns.items())


@pytest.mark.parametrize(
    ("failing", "events", "num_kept"),
    [
        ("", "run begin run end", 0),
        ("begin", "run begin", 1),
        ("end", "run begin run end", 1),
        ("run", "run begin run end", 0),
    ],
)
def test_a_driver_that_refuses(failing: str, events: str, num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that the allocator still asks is kept; one that ended is not, and neither does anything stay begun."""
    done: list[str] = []

    def note(event: str) -> None:
        done.append(event)
        if event == failing and (event != "run" or done.count("run") == 2):
            raise RuntimeError(event)

    def begin(**_: object) -> None:
        assert not torch.is_inference_mode_enabled()
        note("begin")

    def run() -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        note("run")
        return torch.zeros(1)

    graph = SimpleNamespace(capture_begin=begin, capture_end=lambda: note("end"))
    stream = SimpleNamespace(device=None, wait_stream=lambda _: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(graphs, "_broken", [])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=failing) if failing else nullcontext():
        graphs.CudaCapture(torch.device("cuda")).record(run, None)
    assert " ".join(done) == events
    assert graphs._broken == [graph] * num_kept

"""The fold of the events that a small run seldom gives: swap, static batches, changed knobs; told by hand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.events import (
    Admitted,
    Arrived,
    BatchEnded,
    BatchStarted,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    Ended,
    Finished,
    Keyframe,
    Preempted,
    Reconfigured,
    Recovered,
    Reprioritised,
    RequestState,
    RunTotals,
    StepRecord,
    StepTimings,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.request import RequestStatus
from engine.run_state import RunState


class Tale:
    """Steps told by hand; after each the state, written out and read again, is the same state."""

    def __init__(self) -> None:
        self.state = RunState()
        self.state.restore(
            Keyframe(0, 0.0, 10, 16, 8, 64, [], [], None, RunTotals(), 6, "vllm", "fcfs", "swap"),
        )

    def step(self, *events: Any, rows: dict[int, tuple[int, int]] | None = None) -> None:
        """rows: request id -> (computed tokens after the step, new tokens)."""
        rows = rows or {}
        state = self.state
        state.apply(
            StepRecord(
                step=state.step + 1,
                time=state.time + 0.1,
                timings=StepTimings(forward=0.05),
                events=list(events),
                request_ids=list(rows),
                num_tokens=[1] * len(rows),
                num_computed=[computed for computed, _ in rows.values()],
                kinds=[0] * len(rows),
                new_tokens=[new for _, new in rows.values()],
                num_running=0,
                num_waiting=0,
                free_blocks=0,
                cached_blocks=0,
                token_budget=64,
                totals=RunTotals(),
            )
        )
        again = RunState()
        again.restore(state.keyframe())
        assert again.keyframe() == state.keyframe()
        assert (again.block_refs == state.block_refs).all() and (again.block_hashed == state.block_hashed).all()
        assert (again.block_parent == state.block_parent).all()

    def arrive(self, request_id: int, parent: int = 0) -> None:
        self.step(Arrived(request_id, 40, 30, 0, "", 0.0, parent))

    def of(self, request_id: int) -> RequestState:
        return self.state.requests[request_id]

    @property
    def refs(self) -> list[int]:
        return self.state.block_refs[1:].tolist()


@pytest.fixture
def tale() -> Tale:
    """Request 1 with the blocks 1, 2, 3, of which request 2 shares the first, and 4 of its own."""
    told = Tale()
    told.arrive(1)
    told.arrive(2)
    told.step(
        Admitted(1, 0, 0.0, False),
        BlocksAllocated(1, [1, 2, 3]),
        BlocksCached(1, [1]),
        Admitted(2, 16, 0.0, False),
        BlocksShared(2, [1]),
        BlocksAllocated(2, [4]),
        rows={1: (40, 1), 2: (30, 0)},
    )
    return told


def swap_out(tale: Tale) -> None:
    tale.step(
        Preempted(1, 2, "latest arrival", "swap", 40, 2, swapped_blocks=2),
        SwappedOut(1, [2, 3], [5, 6]),
        rows={2: (40, 1)},
    )


def test_what_is_swapped_out_keeps_its_shared_blocks_and_its_progress(tale: Tale) -> None:
    swap_out(tale)
    request = tale.of(1)
    assert request.status == RequestStatus.SWAPPED and request.num_computed == 40 and request.preemptions == 1
    assert request.blocks == [1, 0, 0] and request.host_blocks == [5, 6]
    assert tale.refs[:4] == [2, 0, 0, 1] and tale.state.block_refs[0] == 0
    state = tale.state
    assert (state.num_running, state.num_waiting, state.num_swapped) == (1, 1, 1)
    assert (state.host_blocks_used, state.num_host_blocks) == (2, 6)


def test_what_comes_back_fills_the_empty_places_in_order(tale: Tale) -> None:
    swap_out(tale)
    tale.step(
        SwappedIn(1, [7, 8], [5, 6]),
        Admitted(1, 40, 0.1, True),
        BlocksAllocated(1, [9]),
        Recovered(1, 0.2, 0),
        rows={1: (41, 1)},
    )
    request = tale.of(1)
    assert request.status == RequestStatus.RUNNING and request.num_computed == 41
    assert request.blocks == [1, 7, 8, 9] and request.host_blocks == []
    assert tale.refs == [2, 0, 0, 1, 0, 0, 1, 1, 1, 0]
    assert tale.state.block_owner[7] == 1 and tale.state.host_blocks_used == 0
    assert request.cached_tokens == 0, "a resumption is no hit of the prefix cache"


def test_a_dropped_swap_is_a_recomputation(tale: Tale) -> None:
    swap_out(tale)
    tale.step(SwapDropped(1, [5, 6], "its prefix is wanted"), BlocksFreed(1, [1]))
    request = tale.of(1)
    assert request.status == RequestStatus.PREEMPTED and request.num_computed == 0
    assert request.blocks == [] == request.host_blocks
    assert tale.refs[0] == 1


def test_a_swapped_request_that_ends_leaves_nothing(tale: Tale) -> None:
    swap_out(tale)
    tale.step(BlocksFreed(1, [1]), Finished(1, "abort", 1))
    assert 1 not in tale.state.requests and tale.state.host_blocks_used == 0
    assert tale.refs[:4] == [1, 0, 0, 1]
    assert tale.state.finished[-1].blocks == [] == tale.state.finished[-1].host_blocks


def test_a_recomputation_gives_all_back(tale: Tale) -> None:
    tale.step(Preempted(1, 1, "", "recompute", 40, 3), BlocksFreed(1, [1, 2, 3]))
    request = tale.of(1)
    assert request.status == RequestStatus.PREEMPTED and request.num_computed == 0 and request.blocks == []
    tale.step(Admitted(1, 16, 0.1, True), BlocksShared(1, [1]), BlocksAllocated(1, [5, 6]), rows={1: (30, 0)})
    tale.step(Recovered(1, 0.3, 24), rows={1: (41, 1)})


def test_an_answer_that_ended_keeps_its_place_until_its_batch_does(tale: Tale) -> None:
    tale.step(BatchStarted(1, [1, 2], 40), rows={1: (41, 1), 2: (40, 1)})
    assert tale.state.batch == BatchStarted(1, [1, 2], 40)
    tale.step(Ended(2, "length", 2), rows={1: (42, 1), 2: (41, 1)})
    request = tale.of(2)
    assert request.status == RequestStatus.ENDED and request.finish_reason == "length"
    assert request.output_tokens == 2 and request.blocks and request.finished_time is None
    assert (tale.state.num_running, tale.state.num_waiting) == (2, 0)
    tale.step(rows={1: (43, 1), 2: (41, 0)})
    ended = BatchEnded(1, 2, 3, 120, 40, 0.7, 0.75, 0.75)
    tale.step(
        Ended(1, "stop", 5),
        ended,
        BlocksFreed(1, [1, 2, 3]),
        Finished(1, "stop", 5),
        BlocksFreed(2, [1, 4]),
        Finished(2, "length", 2),
        rows={1: (44, 1), 2: (41, 0)},
    )
    assert tale.state.requests == {} and tale.state.batch is None and list(tale.state.batches) == [ended]
    assert [r.finish_reason for r in tale.state.finished] == ["stop", "length"]
    assert sum(tale.refs) == 0


def test_knobs_and_further_answers_are_told(tale: Tale) -> None:
    tale.step(Reconfigured("vllm", "fair", "auto", "static"))
    state = tale.state
    assert (state.discipline, state.order, state.preemption) == ("vllm", "fair", "auto")
    assert state.pending_discipline == "static"
    tale.step(Reconfigured("static", "fair", "auto"))
    assert (state.discipline, state.pending_discipline) == ("static", "")
    tale.arrive(2 + (1 << 32), parent=2)
    assert tale.of(2 + (1 << 32)).parent == 2


def test_a_static_batch_is_known_wherever_a_fold_begins(tale: Tale) -> None:
    tale.step(BatchStarted(1, [2], 40))
    again = RunState()
    again.restore(tale.state.keyframe())
    assert again.batch == BatchStarted(1, [2], 40)


def test_a_block_hangs_from_what_comes_before_it_until_either_is_taken(tale: Tale) -> None:
    def parents() -> list[int]:
        return tale.state.block_parent[1:5].tolist()

    tale.step(BlocksCached(1, [2, 3], [1, 2]), BlocksCached(2, [4], [1]))
    assert parents() == [0, 1, 2, 1] and tale.state.block_parent.dtype == "int32"
    tale.step(BlocksFreed(1, [1, 2, 3]), Finished(1, "stop", 1))
    tale.step(BlocksEvicted(2, [3, 2]))
    assert parents() == [0, 0, 0, 1]
    tale.step(BlocksEvicted(2, [1]))
    assert parents() == [0, 0, 0, 0], "what it came after is gone"
    tale.step(BlocksCached(2, [1]))
    assert parents() == [0, 0, 0, 0], "the same block, but another content"


def test_a_static_batch_is_over_when_all_of_it_are_aborted(tale: Tale) -> None:
    tale.step(BatchStarted(1, [1, 2], 40))
    tale.step(BlocksFreed(1, [1, 2, 3]), Finished(1, "abort", 1))
    assert tale.state.batch is not None
    tale.step(BlocksFreed(2, [1, 4]), Finished(2, "abort", 1))
    assert tale.state.batch is None


def test_priorities_and_all_knobs_are_told(tale: Tale) -> None:
    tale.step(Reprioritised(1, -3), Reprioritised(77, 1))
    assert tale.of(1).priority == -3 and tale.of(2).priority == 0
    knobs = SchedulerConfig(chunk_size=32)
    tale.step(Reconfigured("vllm", "fcfs", "swap", scheduler=knobs))
    tale.step(Reconfigured("vllm", "fcfs", "recompute"))
    assert tale.state.scheduler == knobs and tale.state.preemption == "recompute"

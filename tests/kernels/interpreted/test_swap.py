"""Swaps on a stream of their own: whatever touches the same block is in order, and what does not is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
import torch

import kernels.triton.backend as backend_module
import kernels.triton.host_memory as host_memory
from kernels.spec import HostStep
from kernels.triton.backend import TritonBackend
from kernels.triton.swap import SwapLane
from tests.kernels.interpreted.tiny_engine import tiny_spec, tiny_weights

BLOCK_SIZE = 4
Clock = dict[str, int]
Place = tuple[str, int]
"""Where a block is, ``device`` or ``host``, and its number."""


@dataclass(frozen=True)
class Work:
    """Something that was given to a stream."""

    name: str
    stream: str
    number: int
    """In the order of its stream."""
    after: Clock
    """Per stream, up to which number everything is over when this begins."""
    reads: frozenset[Place]
    writes: frozenset[Place]

    def conflicts(self, other: Work) -> bool:
        return bool(self.writes & (other.reads | other.writes) or other.writes & self.reads)

    def is_over_before(self, other: Work) -> bool:
        return self.number <= other.after[self.stream]


@dataclass
class FakeStream:
    """A stream with a vector clock (Fidge, "Timestamps in message-passing systems", 1988)."""

    name: str
    clock: Clock = field(default_factory=lambda: {"compute": 0, "side": 0})

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for name, number in event.items():
            self.clock[name] = max(self.clock[name], number)

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


@dataclass
class FakeStreams:
    compute: FakeStream = field(default_factory=lambda: FakeStream("compute"))
    side: FakeStream = field(default_factory=lambda: FakeStream("side"))
    log: list[Work] = field(default_factory=list)
    _current: str = "compute"

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._current = "side"
        yield
        self._current = "compute"

    def launch(self, name: str, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        """On the current stream."""
        stream = self.side if self._current == "side" else self.compute
        after = dict(stream.clock)
        stream.clock[stream.name] += 1
        number = stream.clock[stream.name]
        self.log.append(Work(name, stream.name, number, after, frozenset(reads), frozenset(writes)))

    def move(self, name: str, pairs: list[tuple[int, int]], source: str, destination: str) -> None:
        self.launch(name, [(source, block) for block, _ in pairs], [(destination, block) for _, block in pairs])

    def work(self, name: str) -> Work:
        (found,) = (work for work in self.log if work.name == name)
        return found

    def check(self) -> None:
        for first, second in combinations(self.log, 2):
            assert not first.conflicts(second) or first.is_over_before(second), f"{first} and {second} are not in order"


class Timeline:
    """Does with a lane what the backend does."""

    def __init__(self) -> None:
        self.streams = FakeStreams()
        self.lane = SwapLane(self.streams)

    def step(self, name: str, tables: list[list[int]], written: list[int]) -> None:
        self.lane.begin_step(host_step(tables, written))
        self.streams.launch(f"upload {name}")
        self.lane.join()
        touched = {block for table in tables for block in table if block}
        self.streams.launch(name, [("device", b) for b in touched], [("device", b) for b in written])

    def unknown_step(self, name: str, touched: list[int]) -> None:
        self.lane.join()
        self.lane.begin_unknown()
        self.streams.launch(name, [("device", b) for b in touched], [("device", b) for b in touched])

    def out(self, name: str, pairs: list[tuple[int, int]]) -> None:
        self.lane.out(pairs, BLOCK_SIZE, lambda: self.streams.move(name, pairs, "device", "host"))

    def back(self, name: str, pairs: list[tuple[int, int]]) -> None:
        self.lane.back(pairs, BLOCK_SIZE, lambda: self.streams.move(name, pairs, "host", "device"))

    def copy(self, name: str, pairs: list[tuple[int, int]]) -> None:
        self.lane.join()
        self.streams.move(name, pairs, "device", "device")
        self.lane.note_copies(pairs)

    def order(self, first: str, second: str) -> bool:
        return self.streams.work(first).is_over_before(self.streams.work(second))


def host_step(tables: list[list[int]], written: list[int]) -> HostStep:
    """A step of requests with these tables, that writes a token to each of the blocks ``written``."""
    widest = max(len(table) for table in tables)
    slots = np.array(written, dtype=np.int64) * BLOCK_SIZE + 1
    return HostStep(
        token_ids=np.zeros(len(written), dtype=np.int64),
        positions=np.zeros(len(written), dtype=np.int64),
        slot_mapping=slots,
        query_start=np.arange(len(written) + 1, dtype=np.int32),
        seq_lens=np.ones(len(written), dtype=np.int32),
        block_tables=np.array([table + [0] * (widest - len(table)) for table in tables], dtype=np.int32),
        logits_rows=np.arange(len(written)),
    )


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    timeline = Timeline()
    timeline.step("before", [[1, 2], [3, 4], [5]], [2, 4, 5])
    timeline.step("in flight", [[1, 2], [3, 4]], [2, 4])
    yield timeline
    timeline.step("next", [[1, 2], [6, 7]], [2, 7])
    timeline.streams.check()


def test_a_victim_that_the_step_in_flight_writes_leaves_behind_it(timeline: Timeline) -> None:
    timeline.out("out", [(3, 1), (4, 2)])
    assert timeline.order("in flight", "out")


def test_blocks_that_are_only_read_leave_beside_the_step_in_flight(timeline: Timeline) -> None:
    timeline.out("out", [(1, 1), (3, 2), (5, 3)])
    assert not timeline.order("in flight", "out")
    assert timeline.order("before", "out")


def test_free_blocks_are_filled_beside_the_step_in_flight(timeline: Timeline) -> None:
    timeline.back("back", [(1, 6), (2, 5)])
    assert not timeline.order("in flight", "back")
    assert timeline.order("before", "back")


def test_a_block_that_the_step_in_flight_still_reads_is_filled_behind_it(timeline: Timeline) -> None:
    timeline.back("back", [(1, 3)])
    assert timeline.order("in flight", "back")


def test_a_block_leaves_and_its_place_is_filled_in_one_plan(timeline: Timeline) -> None:
    timeline.out("out", [(5, 1)])
    timeline.back("back", [(2, 5)])
    assert timeline.order("out", "back")
    assert not timeline.order("in flight", "back")


def test_a_block_leaves_is_copied_over_and_the_copy_s_source_is_filled(timeline: Timeline) -> None:
    timeline.out("out", [(5, 1)])
    timeline.copy("copy", [(1, 5)])
    timeline.back("back", [(2, 1)])
    assert timeline.order("out", "copy") and timeline.order("copy", "back")


def test_a_host_block_is_read_and_then_written(timeline: Timeline) -> None:
    timeline.back("back", [(1, 6)])
    timeline.out("out", [(5, 1)])
    assert timeline.order("back", "out")


def test_the_next_step_reads_what_came_back(timeline: Timeline) -> None:
    timeline.back("back", [(1, 6), (2, 7)])
    timeline.step("reader", [[6, 7]], [7])
    assert timeline.order("back", "reader")
    assert not timeline.order("back", "upload reader"), "its inputs travel meanwhile"


def test_behind_a_step_that_nobody_uploaded_everything_waits(timeline: Timeline) -> None:
    timeline.unknown_step("unknown", [6])
    timeline.back("back", [(1, 6)])
    assert timeline.order("unknown", "back")


def test_the_first_swap_comes_behind_all_that_was_there() -> None:
    timeline = Timeline()
    timeline.streams.launch("zeros", writes=[("device", 1)])
    timeline.back("back", [(1, 1)])
    assert timeline.order("zeros", "back")


def test_new_memory_is_filled_behind_the_zeros_that_it_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "synchronize", lambda _: None)
    timeline = Timeline()
    timeline.step("last on the old memory", [[1]], [1])
    timeline.copy("copy", [(1, 2)])
    timeline.lane.finish()
    timeline.streams.launch("zeros", writes=[("device", 5)])
    timeline.back("back", [(1, 5)])
    assert timeline.order("zeros", "back")


def test_without_streams_things_happen_at_once() -> None:
    lane, done = SwapLane(None), []
    lane.begin_step(host_step([[1]], [1]))
    lane.out([(1, 1)], BLOCK_SIZE, lambda: done.append("out"))
    lane.back([(1, 1)], BLOCK_SIZE, lambda: done.append("back"))
    lane.join()
    lane.finish()
    assert done == ["out", "back"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_planned_is_in_order(seed: int) -> None:
    """Any plan, also such as no scheduler would make."""
    rng = random.Random(seed)
    timeline = Timeline()
    blocks, host_blocks = range(1, 9), range(1, 6)

    def pairs(sources: range, destinations: range) -> list[tuple[int, int]]:
        count = rng.randint(1, 3)
        return list(zip(rng.sample(sources, count), rng.sample(destinations, count), strict=True))

    actions: list[Callable[[str], None]] = [
        lambda name: timeline.out(name, pairs(blocks, host_blocks)),
        lambda name: timeline.back(name, pairs(host_blocks, blocks)),
        lambda name: timeline.copy(name, pairs(blocks, blocks)),
        lambda name: timeline.unknown_step(name, rng.sample(blocks, 2)),
    ]
    for step in range(40):
        tables = [rng.sample(blocks, rng.randint(1, 3)) for _ in range(2)]
        timeline.step(f"step {step}", tables, [table[-1] for table in tables])
        for action in rng.choices(actions, weights=[4, 4, 2, 1], k=rng.randint(0, 4)):
            action(f"{step}/{len(timeline.streams.log)}")
    timeline.streams.check()
    beside, last = 0, None
    for work in timeline.streams.log:
        last = work if work.name.startswith("step") else last
        beside += work.stream == "side" and last is not None and not last.is_over_before(work)
    assert beside > 5


def test_the_backend_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    spec = tiny_spec(num_heads=1, head_dim=16, hidden_size=16, intermediate_size=16, num_layers=1)

    class Logged(TritonBackend):
        def _layers(self, batch: object, *known: object) -> object:
            tables, slots = batch.block_tables, batch.slot_mapping  # type: ignore[attr-defined]
            written = {("device", int(slot) // BLOCK_SIZE) for slot in slots}
            streams.launch(f"step {len(streams.log)}", {("device", int(b)) for b in tables.ravel() if b}, written)
            return super()._layers(batch, *known)  # type: ignore[arg-type]

    def moved(source: torch.Tensor, destination: torch.Tensor, pairs: list[tuple[int, int]], _: object) -> None:
        leaves = source.shape[1] > destination.shape[1]
        streams.move("out" if leaves else "back", pairs, *(("device", "host") if leaves else ("host", "device")))

    monkeypatch.setattr(host_memory, "move_blocks", moved)
    monkeypatch.setattr(backend_module, "copy_blocks", lambda _, pairs: streams.move("copy", pairs, "device", "device"))
    backend = Logged("cpu")
    backend.load(spec, tiny_weights(spec))
    backend.allocate_kv(9, BLOCK_SIZE)
    backend.allocate_host_kv(5)
    backend._swaps = SwapLane(streams)
    batch = backend.upload(host_step([[1, 2], [3, 4]], [2, 4]))
    backend.forward(batch)
    backend.upload(host_step([[1, 2], [3, 4]], [2, 4]))
    backend.forward(backend.upload(host_step([[1, 2], [5]], [2, 5])))
    backend.swap_out([(3, 1), (2, 2)])
    backend.copy_blocks([(1, 3)])
    backend.swap_in([(3, 1), (4, 2)])
    backend.forward(backend.upload(host_step([[3], [1, 2]], [3, 2])))
    backend.forward(batch)  # not the one that was uploaded last
    streams.check()
    out, back = streams.work("out"), streams.work("back")
    steps = [work for work in streams.log if work.name.startswith("step")]
    assert out.stream == back.stream == "side"
    assert steps[1].is_over_before(out), "it writes block 2"

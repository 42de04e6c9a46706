"""What of ``python -m tests.gpu_check`` only a GPU goes through, on a torch.cuda that writes its calls down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.triton.graphs import CudaCapture
from tests import gpu_check
from tests.gpu import card as card_module
from tests.gpu import ceilings, environment
from tests.gpu.card import Card
from tests.gpu.figures import Figure, Report
from tests.gpu.lane import Lane


class Cuda:
    """What a section calls of torch.cuda, in order. An event is a reading of a clock that each replay moves on."""

    def __init__(self, replay_milliseconds: float) -> None:
        self.calls: list[str] = []
        self._step = replay_milliseconds
        self._clock = 0.0
        self._recording = False

    def synchronize(self, device: Any = None) -> None:
        self.calls.append("synchronize")

    def sleep(self, cycles: int) -> None:
        assert cycles >= 10_000_000
        self.calls.append("sleep")

    def work(self) -> None:
        """A launch."""
        self.calls.append("captured" if self._recording else "launch")

    def replay(self) -> None:
        self.calls.append("replay")
        self._clock += self._step

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None, synchronize=lambda: self.calls.append("wait"))

        def record() -> None:
            self.calls.append("event")
            event.at = self._clock

        event.record = record
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def stream(self, device: Any = None) -> Any:
        return SimpleNamespace(
            device=device,
            wait_stream=lambda other: self.calls.append("wait_stream"),
            synchronize=lambda: self.calls.append("wait"),
        )

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        yield

    def graph(self) -> Any:
        def begin(*, pool: Any, capture_error_mode: str) -> None:
            # Tensors of the random generator that are made in here are written to by Transformers' recordings too.
            assert not torch.is_inference_mode_enabled()
            self._recording = True

        def end() -> None:
            self._recording = False

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=self.replay)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    script = Cuda(replay_milliseconds=3.0)
    properties = SimpleNamespace(
        name="a card",
        major=9,
        minor=0,
        L2_cache_size=2**20,
        multi_processor_count=132,
        total_memory=2**37,
    )
    monkeypatch.setattr(card_module, "_capture", CudaCapture)
    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (2**20, 2**21),
        "synchronize": script.synchronize,
        "empty_cache": lambda: None,
        "_sleep": script.sleep,
        "Event": script.event,
        "Stream": script.stream,
        "current_stream": script.stream,
        "stream": script.on_stream,
        "CUDAGraph": script.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return script


def _card(device: str = "cuda:0") -> Card:
    card = Card.find(rehearsal=False)
    assert isinstance(card, Card) and card.device == torch.device("cuda", 0)
    return Card(torch.device(device), card.rehearsal, card.l2_bytes, card.target)


@pytest.mark.parametrize(("capability", "target"), [((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_89")])
def test_a_card_takes_the_kernels_of_the_nearest_target_below(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: str
) -> None:
    assert _card().target == "sm_90"
    properties = SimpleNamespace(major=capability[0], minor=capability[1], L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert _card().target == target


@torch.inference_mode()
def test_a_graph_is_captured_after_a_launch(cuda: Cuda) -> None:
    replay = _card().captured(cuda.work)
    assert cuda.calls == ["wait_stream", "launch", "wait", "captured", "wait_stream"]
    replay()
    assert cuda.calls[-1] == "replay"


def test_queued_replays_are_behind_a_sleep_and_between_two_events(cuda: Cuda) -> None:
    assert _card().queued_seconds(cuda.replay, 4, rounds=2) == pytest.approx(3e-3)
    assert cuda.calls == ["sleep", "event", *["replay"] * 4, "event", "wait"] * 2


def test_a_replay_on_an_idle_card_is_timed_alone(cuda: Cuda) -> None:
    def before(index: int) -> None:
        cuda.calls.append(f"before {index}")

    assert _card().idle_seconds(cuda.replay, 2, before=before) == pytest.approx(3e-3)
    one = ["synchronize", "event", "replay", "event", "wait"]
    assert cuda.calls == ["before 0", *one, "before 1", *one]


def test_a_broken_context_is_not_sound(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _card().is_sound()

    def broken(device: Any = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not _card().is_sound()
    _card().release()


def test_the_ceilings_of_a_card(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MATRIX", 16)
    card, figures, facts = _card("cpu"), list[Figure](), dict[str, Any]()
    monkeypatch.setattr(Card, "queued_seconds", lambda self, replay, count: (replay(), 2e-3)[1])
    monkeypatch.setattr(Card, "idle_seconds", lambda self, replay, count: (replay(), 5e-6)[1])
    ceilings.run(card, Report("ceilings", figures.append, rehearsal=False), facts)
    # A quarter of the free memory is copied: read and written.
    assert facts == {"bandwidth": 2 * 2**18 / 2e-3, "matrix_rate": 2 * 16**3 / 2e-3, "launch": 5e-6}
    assert [figure.unit for figure in figures] == ["TB/s", "TFLOP/s", "µs"]


@pytest.mark.parametrize(("mode", "alone"), [("Default", False), ("Exclusive_Process", True), ("not told: x", False)])
def test_the_environment_of_a_card(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, mode: str, alone: bool) -> None:
    monkeypatch.setattr(environment, "_asked", lambda what: mode if what == "compute_mode" else "driver")
    figures, facts = list[Figure](), dict[str, Any]()
    environment.run(_card(), Report("environment", figures.append, rehearsal=False), facts)
    assert facts == {"one_process": alone}
    values = {figure.name: figure.value for figure in figures}
    assert values["card"] == "a card" and values["memory"] == 128.0 and values["target"] == "sm_90"


def _lanes_of(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> list[list[str]]:
    """The items of each lane of a run of everything, in the order in which they begin."""
    begun: list[list[str]] = []
    together = threading.Lock()

    def run(self: Lane) -> None:
        with together:
            begun.append(list(self.items))
        if "environment" in self.items:
            self.facts.update(facts)

    monkeypatch.setattr(Lane, "run", run)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    gpu_check.run_sections(gpu_check.Run(rehearsal=False), list(gpu_check.LIMITS), 290.0)
    return begun


def test_what_is_only_checked_shares_the_card_and_what_is_measured_has_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *checked, last = _lanes_of(monkeypatch, {})
    assert first == ["environment", "ceilings"] and last == ["decode", "rates", "prefill", "swap"]
    assert sorted(checked) == [["ids"], *([f"kernels:{index}/4"] for index in range(4))]


def test_a_card_for_one_process_at_a_time_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = _lanes_of(monkeypatch, {"one_process": True})
    assert lanes == [["environment", "ceilings"], ["ids", "kernels"], ["decode", "rates", "prefill", "swap"]]


def test_what_goes_wrong_beside_others_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def run(self: Lane) -> None:
        if self.items == ["ids"]:
            raise OSError("no process can be started")
        ended.append(self.items[0])

    monkeypatch.setattr(Lane, "run", run)
    with pytest.raises(OSError, match="no process"):
        gpu_check.run_sections(gpu_check.Run(rehearsal=False), ["ids", "kernels"], 290.0)
    assert ended


@pytest.mark.parametrize("rehearsal", [True, False])
@pytest.mark.parametrize("detail", [float("nan"), object()])
def test_what_json_has_no_word_for_shows_in_a_rehearsal_too(rehearsal: bool, detail: object) -> None:
    send: Callable[[Figure], None] = list[Figure]().append
    with pytest.raises((ValueError, TypeError)):
        Report("decode", send, rehearsal=rehearsal).rate("share", 1.0, "%", bytes=detail)

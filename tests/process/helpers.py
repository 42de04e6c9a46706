"""Waiting for an engine process, by condition and never by sleeping."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from engine.client import EngineClient, EngineDied
from engine.config import EngineConfig
from engine.messages import AckFrame, Frame, LoadFailed, Output, Ready

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


class Listener:
    """Collects what a client delivers. ``acknowledges``: whether it takes frames, as a window does."""

    def __init__(self, client: EngineClient, *, acknowledges: bool = True) -> None:
        self.client = client
        self.acknowledges = acknowledges
        self.seen: list[Any] = []

    def take(self, timeout: float) -> list[Any]:
        """What arrives, waiting for the first of it."""
        arrived = self.client.poll(timeout)
        self.seen += arrived
        for arrival in arrived:
            if self.acknowledges and isinstance(arrival, Frame):
                self.client.send(AckFrame(arrival.number))
        return arrived

    def wait(self, condition: Callable[[Any], bool], timeout: float = 60.0) -> Any:
        """The first arrival from now on for which ``condition`` holds; AssertionError with what came instead."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            found = next(filter(condition, self.take(min(left, 0.5))), None)
            if found is not None:
                return found
        raise AssertionError(f"nothing of the kind within {timeout} s; the last to come: {self.seen[-5:]}")

    def wait_for(self, kind: type, timeout: float = 60.0) -> Any:
        return self.wait(lambda arrival: isinstance(arrival, kind), timeout)

    def wait_ready(self, timeout: float = 120.0) -> Ready:
        arrival = self.wait(lambda arrival: isinstance(arrival, Ready | LoadFailed | EngineDied), timeout)
        assert isinstance(arrival, Ready), arrival
        return arrival

    def wait_finished(self, request_id: int, timeout: float = 60.0) -> Output:
        """The last output of a request, wherever among the arrivals."""

        def last(arrival: Any) -> bool:
            return isinstance(arrival, Output) and arrival.request_id == request_id and bool(arrival.finish_reason)

        return next(filter(last, self.seen), None) or self.wait(last, timeout)

    def outputs(self, request_id: int) -> list[Output]:
        return [seen for seen in self.seen if isinstance(seen, Output) and seen.request_id == request_id]

    def frames(self) -> list[Frame]:
        return [seen for seen in self.seen if isinstance(seen, Frame)]

    def text(self, request_id: int) -> str:
        return "".join(output.text for output in self.outputs(request_id))

    def token_ids(self, request_id: int) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.token_ids]


def fake_client(mode: str) -> EngineClient:
    """A started engine process around ``fake_engine.py``, told to load."""
    client = EngineClient(command=[sys.executable, str(FAKE_ENGINE), mode])
    client.start()
    client.load(EngineConfig())
    return client


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

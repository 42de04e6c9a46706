"""Joins the engine's client to Qt: one queued wake-up from the reader thread, one frame timer, one fold.

```
 engine process ─pipe─▶ reader thread ─on_activity─▶ queued signal ─▶ frame timer (single shot, paced)
                             │                                             │ GUI thread
                             └──────────── client.poll() ◀─────────────────┘ fold into RunState, ack, emit
```

Nothing polls: with nothing arriving no timer runs. A frame drains everything that has come, so tokens wait at most one
interval, and the engine sends its next step records only after the frame before was acknowledged.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from engine.client import EngineClient, EngineDied
from engine.config import EngineConfig, SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    AnyReply,
    ChatMessage,
    ConfigRefused,
    CountTokens,
    Frame,
    Hello,
    LoadFailed,
    Loading,
    ModelInfo,
    Output,
    Ready,
    Reconfigure,
    TokenCount,
)
from engine.request import FinishReason, SamplingParams
from engine.run_state import RunState

State = Literal["stopped", "starting", "loading", "ready", "failed", "dead"]

SHUTDOWN_SECONDS = 2.0
"""How long the engine may take to end by itself before it is ended by force."""


class Fold(Protocol):
    """Something that is made of step records besides the run state: histories, lanes, percentiles."""

    def restore(self, keyframe: Keyframe) -> None: ...

    def apply(self, record: StepRecord) -> None: ...


class FramePacer:
    """How long a frame waits after the one before it.

    At most 30 frames a second. Where the engine computes on the CPU the window's frames cost it tokens: with few cores
    they come slower while it works. A frame that was dear to draw is followed by a longer pause, so that drawing takes
    about an eighth of one core at most, down to six frames a second.
    """

    FASTEST = 1 / 30
    SLOWEST = 0.16
    SHARE = 8.0

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores if cores is not None else (os.cpu_count() or 1)
        self._cost = 0.0

    def note_cost(self, seconds: float) -> None:
        """Processor time of a frame on the GUI thread: where the engine has the cores, the clock says little."""
        self._cost += 0.2 * (seconds - self._cost)

    def interval(self, *, busy_on_cpu: bool) -> float:
        """Seconds from the beginning of one frame to the beginning of the next."""
        base = self.FASTEST
        if busy_on_cpu:
            base = 1 / 11 if self._cores <= 2 else 1 / 15 if self._cores <= 4 else 1 / 20 if self._cores <= 8 else base
        return min(self.SLOWEST, max(base, self.SHARE * self._cost))


class EngineBridge(QObject):
    """The engine as the window sees it. Lives on the GUI thread; only ``_woken`` is emitted elsewhere."""

    loading = Signal(object)
    """:class:`engine.messages.Loading`."""
    ready = Signal(object)
    """:class:`engine.messages.ModelInfo`."""
    load_failed = Signal(object)
    """:class:`engine.messages.LoadFailed`."""
    died = Signal(object)
    """:class:`engine.client.EngineDied`: the process ended though nobody asked it to."""
    outputs = Signal(list)
    """New tokens, in order: a list of :class:`engine.messages.Output`."""
    stepped = Signal()
    """``run_state`` has moved on."""
    state_changed = Signal(str)
    token_counted = Signal(object)
    """:class:`engine.messages.TokenCount`."""
    config_changed = Signal()
    """``config`` is another, though the engine was not started anew."""
    config_refused = Signal(str)
    """Why the engine did not take what :meth:`reconfigure` asked; ``config`` is again what it runs with."""
    _woken = Signal()

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        client: EngineClient | None = None,
        pacer: FramePacer | None = None,
    ) -> None:
        super().__init__(parent)
        self.run_state = RunState()
        self.info: ModelInfo | None = None
        self.state: State = "stopped"
        self.config = EngineConfig()
        """What the engine was last started with, and asked to change to since: what a restart begins with."""
        self._started_with = self.config.scheduler
        self.pacer = pacer or FramePacer()
        self.frame_seconds = self.frame_cpu_seconds = 0.0
        """What the last frame took to drain, fold and tell, slots included, paint not: by the clock and of the core."""
        self._client = client or EngineClient()
        self._client.on_activity = self._woken.emit
        self._folds: list[Fold] = []
        self._query_ids = itertools.count(1)
        self._refused: list[Output] = []
        self._last_frame = 0.0
        self._run = 0
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._frame)
        self._woken.connect(self._schedule_frame, Qt.ConnectionType.QueuedConnection)

    # Life of the process -----------------------------------------------------------------------------------------

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._client.pid

    def start(self, config: EngineConfig) -> None:
        """Starts a fresh engine process and has it load ``config.model``."""
        self.shutdown()
        self.config = config
        self._started_with = config.scheduler
        self.info = None
        self._run += 1
        self._set_state("starting")
        self._client.start()
        self._client.load(config)

    def restart(self) -> None:
        """A fresh process with the same configuration."""
        self.start(self.config)

    def shutdown(self) -> None:
        """Ends the engine, in under five seconds whatever it is doing. What it still had to say is not emitted."""
        self._timer.stop()
        self._client.close(SHUTDOWN_SECONDS)
        self._set_state("stopped")

    def add_fold(self, fold: Fold) -> None:
        """Has ``fold`` follow the run from the next record on, before ``stepped`` is emitted."""
        self._folds.append(fold)

    # Commands ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        *,
        params: SamplingParams,
        messages: Sequence[ChatMessage] | None = None,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        priority: int = 0,
        user: str = "",
        arrival_time: float | None = None,
        ends_after: int | None = None,
        stream_text: bool = True,
        synthetic_seed: int = 0,
    ) -> int:
        """Sends a request and returns its id. With no engine ready the answer is an output that says so."""
        request_id = self._client.next_request_id()
        if self.state != "ready":
            self._refuse(request_id)
            return request_id
        self._client.send(
            AddRequest(
                request_id=request_id,
                params=params,
                messages=None if messages is None else list(messages),
                prompt=prompt,
                prompt_token_ids=None if prompt_token_ids is None else list(prompt_token_ids),
                prompt_tokens=prompt_tokens,
                synthetic_seed=synthetic_seed,
                priority=priority,
                user=user,
                arrival_time=arrival_time,
                ends_after=ends_after,
                stream_text=stream_text,
            )
        )
        return request_id

    def abort(self, request_id: int) -> None:
        self._client.send(Abort(request_id))

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Changes the scheduler's knobs while the engine runs; the run state tells when they are in force."""
        self.config = replace(self.config, scheduler=scheduler)
        if self.state == "ready":
            self._client.send(Reconfigure(scheduler))
        self.config_changed.emit()

    def _refused_config(self, message: str) -> None:
        state = self.run_state
        in_force = replace(
            self._started_with,
            discipline=state.pending_discipline or state.discipline,
            order=state.order,
            preemption=state.preemption,
        )
        self.config = replace(self.config, scheduler=in_force)
        self.config_changed.emit()
        self.config_refused.emit(message)

    def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Asks how long a conversation is as a prompt; ``token_counted`` answers with this query id."""
        query_id = next(self._query_ids)
        self._client.send(CountTokens(query_id, list(messages)))
        return query_id

    def _refuse(self, request_id: int) -> None:
        hint = "wait until the model is loaded" if self.state in ("starting", "loading") else "start it again"
        self._refused.append(
            Output(
                request_id=request_id,
                time=time.perf_counter(),
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error=f"The engine is not ready ({self.state}): {hint}, then send the request once more.",
            )
        )
        self._schedule_frame()

    # Frames ------------------------------------------------------------------------------------------------------

    def _schedule_frame(self) -> None:
        """Many arrivals between two frames make one wake-up: the client tells only of the first that nobody polled."""
        if self._timer.isActive() or (self.state == "stopped" and not self._refused):
            return
        due = self._last_frame + self.pacer.interval(busy_on_cpu=self._busy_on_cpu())
        self._timer.start(max(0, round((due - time.perf_counter()) * 1000)))

    def _busy_on_cpu(self) -> bool:
        if self.state == "ready":
            return bool(self.run_state.requests) and self.info is not None and self.info.device == "cpu"
        return self.state in ("starting", "loading")

    def _frame(self) -> None:
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        self._last_frame = begun
        self._take_all()
        self.frame_seconds = time.perf_counter() - begun
        self.frame_cpu_seconds = time.thread_time() - begun_cpu

    def _take_all(self) -> None:
        outputs, self._refused = self._refused, []
        stepped = False
        run = self._run
        for reply in self._client.poll() if self.state != "stopped" else []:
            if isinstance(reply, Output):
                outputs.append(reply)
            elif isinstance(reply, Frame):
                stepped |= self._fold(reply)
            else:
                self._flush(outputs)
                outputs = []
                self._handle(reply)
                if self._run != run or self.state == "stopped":
                    return  # a slot ended or replaced the engine: the rest is of the old one
        self._flush(outputs)
        if stepped:
            self.stepped.emit()

    def _flush(self, outputs: list[Output]) -> None:
        if outputs:
            self.outputs.emit(outputs)

    def _fold(self, frame: Frame) -> bool:
        self._client.send(AckFrame(frame.number))  # first: the engine may gather the next while this one is folded
        if frame.keyframe is not None:
            self._restore(frame.keyframe)
        for record in frame.records:
            self.run_state.apply(record)
            for fold in self._folds:
                fold.apply(record)
        return bool(frame.records) or frame.keyframe is not None

    def _restore(self, keyframe: Keyframe) -> None:
        self.run_state.restore(keyframe)
        for fold in self._folds:
            fold.restore(keyframe)

    def _handle(self, reply: AnyReply | EngineDied) -> None:
        if isinstance(reply, Hello):
            self._set_state("loading")
        elif isinstance(reply, Loading):
            self._set_state("loading")
            self.loading.emit(reply)
        elif isinstance(reply, Ready):
            self.info = reply.info
            self._restore(reply.keyframe)
            self._set_state("ready")
            self.ready.emit(reply.info)
            self.stepped.emit()
        elif isinstance(reply, LoadFailed):
            self._set_state("failed")
            self.load_failed.emit(reply)
        elif isinstance(reply, TokenCount):
            self.token_counted.emit(reply)
        elif isinstance(reply, ConfigRefused):
            self._refused_config(reply.message)
        elif isinstance(reply, EngineDied):
            self._set_state("dead")
            self.died.emit(reply)

    def _set_state(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self.state_changed.emit(state)

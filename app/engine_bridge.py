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
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.frame_pacer import FramePacer
from engine.client import EngineClient, EngineDied
from engine.config import EngineConfig, SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    AnyReply,
    CancelCompare,
    ChatMessage,
    Compare,
    CompareDone,
    ComparePlan,
    CompareProgress,
    ConfigRefused,
    ContextCut,
    CountTokens,
    Frame,
    Hello,
    LoadFailed,
    Loading,
    ModelInfo,
    Output,
    Paced,
    PoolShrank,
    Ready,
    Reconfigure,
    Record,
    RecordingFailed,
    SetPace,
    SetPriority,
    StepOnce,
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
    context_cut = Signal(object)
    """:class:`engine.messages.ContextCut`: emitted before the first output of its request."""
    config_changed = Signal()
    """``config`` is another, though the engine was not started anew."""
    config_refused = Signal(str)
    """Why the engine did not take what :meth:`reconfigure` asked; ``config`` is again what it runs with."""
    paced = Signal(bool)
    """``paused`` is another: the engine pauses, or runs on."""
    recording_failed = Signal(str)
    """The run file cannot be written any more; the engine goes on without."""
    pool_shrank = Signal(str)
    """Memory ran out, and the engine goes on with fewer KV blocks, which ``info`` has; the sentence for the user."""
    compare_progress = Signal(object)
    """:class:`engine.messages.CompareProgress`."""
    compare_done = Signal(object)
    """:class:`engine.messages.CompareDone`: emitted once for every :meth:`compare`, however it ended."""
    _woken = Signal()
    _ended = Signal()

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
        self.paused = False
        """Whether the engine pauses, as it has confirmed."""
        self.comparing = False
        """Whether a comparison has the engine to itself: from its first progress on, until it is over."""
        self._compare_asked = False
        self.pacer = pacer or FramePacer()
        self.frame_seconds = 0.0
        """What the last frame took to drain, fold and tell, slots included, paint not."""
        self._client = client or EngineClient()
        self._client.on_activity = self._woken.emit
        self._folds: list[Fold] = []
        self._query_ids = itertools.count(1)
        self._answered_here: list[AnyReply] = []
        """Replies to what no engine was there to answer."""
        self._kept: list[AnyReply | EngineDied] = []
        """Replies that came with ends and wait for their frame."""
        self._last_frame = 0.0
        self._run = 0
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._frame)
        self._woken.connect(self._schedule_frame, Qt.ConnectionType.QueuedConnection)
        self._ended.connect(self._take_outputs, Qt.ConnectionType.QueuedConnection)

    # Life of the process -----------------------------------------------------------------------------------------

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._client.pid

    @property
    def last_lines(self) -> list[str]:
        """The end of what the engine has written to its error output, also after its end."""
        return self._client.last_lines

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
        self._kept.clear()
        self._set_state("stopped")
        self._end_control("The engine was ended before the comparison was complete.")

    def add_fold(self, fold: Fold) -> None:
        """Has ``fold`` follow the run from the next record on, before ``stepped`` is emitted."""
        self._folds.append(fold)

    # Commands ----------------------------------------------------------------------------------------------------

    def add_request(self, *, params: SamplingParams, **fields: Any) -> int:
        """Sends a request, ``fields`` being those of :class:`engine.messages.AddRequest`, and returns its id. With no
        engine ready the answer is an output that says so."""
        request_id = self._client.next_request_id()
        if self.state == "ready":
            self._client.send(AddRequest(request_id=request_id, params=params, **fields))
        else:
            self._refuse(request_id)
        return request_id

    def abort(self, request_id: int) -> None:
        self._client.send(Abort(request_id))

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Changes the scheduler's knobs while the engine runs; the run state tells when they are in force."""
        self.config = replace(self.config, scheduler=scheduler)
        if self.state == "ready":
            self._client.send(Reconfigure(scheduler))
        self.config_changed.emit()

    def set_priority(self, request_id: int, priority: int) -> None:
        """Another priority for a request that waits or runs, from the next step on; the smaller goes first."""
        self._client.send(SetPriority(request_id, priority))

    def set_paused(self, paused: bool) -> None:
        """Has the engine pause after the step in progress, or run on; ``paced`` tells when it does."""
        self._client.send(SetPace(paused))

    def step_once(self) -> None:
        """While the engine pauses: one step, where there is something to do."""
        self._client.send(StepOnce())

    def record(self, path: str, limit_bytes: int, texts: bool = False) -> None:
        """Has every step from the next on written to a run file of at most ``limit_bytes``; an empty path ends it."""
        self._client.send(Record(path, limit_bytes, texts))

    def compare(self, plan: ComparePlan) -> None:
        """Runs a comparison once the running answers have ended. Requests that are added meanwhile wait until it is
        over. ``compare_done`` comes in any case, at once where no engine is ready."""
        if self.state != "ready":
            self._answer_here(CompareDone(b"", f"The engine is not ready ({self.state}): {self._hint()}."))
            return
        self._compare_asked = True
        self._client.send(Compare(plan))

    def cancel_compare(self) -> None:
        """Ends the comparison after the step in progress; what is complete is its result."""
        self._client.send(CancelCompare())

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

    def count_tokens(
        self, messages: Sequence[ChatMessage], continues: bool = False, max_tokens: int | None = None
    ) -> int:
        """Asks how long a conversation is as a prompt, and what of it would be left out for an answer of
        ``max_tokens``; ``token_counted`` answers with this query id. An engine that is not ready does not answer."""
        query_id = next(self._query_ids)
        if self.state == "ready":
            self._client.send(CountTokens(query_id, list(messages), continues, max_tokens))
        return query_id

    def _hint(self) -> str:
        return "wait until the model is loaded" if self.state in ("starting", "loading") else "start it again"

    def _refuse(self, request_id: int) -> None:
        message = f"The engine is not ready ({self.state}): {self._hint()}, then send the request once more."
        self._answer_here(Output(request_id, time.perf_counter(), [], finish_reason=FinishReason.ERROR, error=message))

    def _answer_here(self, reply: AnyReply) -> None:
        self._answered_here.append(reply)
        self._schedule_frame()

    def hurry_ends(self, wanted: bool) -> None:
        """Whether an answer's end does not wait for the next frame, with what was said before it: who sends the next
        request on it, as a closed loop does, would leave the engine's place in the batch empty until then."""
        self._client.on_end = self._ended.emit if wanted else None

    # Frames ------------------------------------------------------------------------------------------------------

    def _schedule_frame(self) -> None:
        """Many arrivals between two frames make one wake-up: the client tells only of the first that nobody polled."""
        if self._timer.isActive() or (self.state == "stopped" and not self._answered_here):
            return
        due = self._last_frame + self.pacer.interval(busy_on_cpu=self._busy_on_cpu())
        self._timer.start(max(0, round((due - time.perf_counter()) * 1000)))

    def _busy_on_cpu(self) -> bool:
        if self.state == "ready":
            working = bool(self.run_state.requests) and not self.paused
            return working and self.info is not None and self.info.device == "cpu"
        return self.state in ("starting", "loading")

    def _frame(self) -> None:
        self.pacer.begin_frame()
        self._last_frame = time.perf_counter()
        self._take_all()
        self.frame_seconds = time.perf_counter() - self._last_frame

    def _take_outputs(self) -> None:
        """Hand out the outputs that have come; everything else waits for its frame, in order."""
        if self.state == "stopped":
            return
        arrived = self._client.poll()
        for reply in arrived:
            if isinstance(reply, ContextCut):
                self.context_cut.emit(reply)
        self._kept += [reply for reply in arrived if not isinstance(reply, Output | ContextCut)]
        if self._kept:
            self._schedule_frame()
        self._flush([reply for reply in arrived if isinstance(reply, Output)])

    def _take_all(self) -> None:
        arrived: list[AnyReply | EngineDied] = [*self._answered_here]
        self._answered_here = []
        if self.state != "stopped":
            arrived += [*self._kept, *self._client.poll()]
            self._kept.clear()
        outputs: list[Output] = []
        stepped = False
        before = self._run, self.state == "stopped"
        for reply in arrived:
            if isinstance(reply, Output):
                outputs.append(reply)
            elif isinstance(reply, Frame):
                stepped |= self._fold(reply)
            else:
                self._flush(outputs)
                outputs = []
                self._handle(reply)
                if (self._run, self.state == "stopped") != before:
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
        elif isinstance(reply, ContextCut):
            self.context_cut.emit(reply)
        elif isinstance(reply, ConfigRefused):
            self._refused_config(reply.message)
        elif isinstance(reply, Paced):
            self._set_paused(reply.paused)
        elif isinstance(reply, RecordingFailed):
            self.recording_failed.emit(reply.message)
        elif isinstance(reply, PoolShrank):
            self.info = reply.info
            self.pool_shrank.emit(reply.message)
        elif isinstance(reply, CompareProgress):
            self.comparing = True
            self.compare_progress.emit(reply)
        elif isinstance(reply, CompareDone):
            self.comparing = self._compare_asked = False
            self.compare_done.emit(reply)
        elif isinstance(reply, EngineDied):
            self._set_state("dead")
            self._end_control(f"{reply.reason} The comparison is lost.")
            self.died.emit(reply)

    def _set_paused(self, paused: bool) -> None:
        if paused != self.paused:
            self.paused = paused
            self.paced.emit(paused)

    def _end_control(self, message: str) -> None:
        """There is no engine any more that could pause or compare; ``message`` is for who waits for a comparison."""
        self._set_paused(False)
        asked, self.comparing, self._compare_asked = self._compare_asked, False, False
        if asked:
            self.compare_done.emit(CompareDone(b"", message))

    def _set_state(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self.state_changed.emit(state)

"""Between the pipes and :class:`engine.core.EngineCore`: takes commands between steps, sends what the steps gave."""

from __future__ import annotations

import dataclasses
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import ConfigError, SchedulerConfig
from engine.floor import Turn
from engine.frames import FrameStream
from engine.intake import Intake
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    CancelCompare,
    Compare,
    CompareDone,
    ComparePlan,
    ConfigRefused,
    CountTokens,
    Paced,
    PoolShrank,
    Reconfigure,
    Record,
    RecordingFailed,
    Reply,
    SetPace,
    SetPriority,
    Shutdown,
    StepOnce,
)
from engine.recording import RunHeader
from engine.run_log import RunLog
from engine.wire import BadConfig, BadPlan, BadRequest, Incoming

if TYPE_CHECKING:
    from engine.core import EngineCore, StepResult
    from engine.loader import LoadedEngine

INTAKE_SECONDS = 0.02
"""How long new requests may be taken in between two steps while answers are running."""


class EngineLoop:
    """Takes commands between steps and sends what the steps gave.

    While it pauses, it waits for commands: what they change is taken into the queue and told, but nothing is scheduled
    until a step is asked for. While a comparison has its turn, it is the :class:`engine.floor.Floor` of that.
    """

    def __init__(self, loaded: LoadedEngine, commands: queue.SimpleQueue[Incoming], send: Callable[..., None]) -> None:
        self.loaded = loaded
        self.core: EngineCore = loaded.core
        self._intake = Intake(loaded.codec, loaded.info, send)
        self._commands = commands
        self._set_aside: deque[Incoming] = deque()
        """Commands that came while a step ran, taken from the queue already."""
        self._send = send
        self._frames = FrameStream(self.core.keyframe)
        self._log = RunLog(lambda reason: send(RecordingFailed(reason)))
        self._arriving: dict[int, AddRequest] = {}
        """Requests that have come and are not yet in the core, in order of arrival."""
        self._paused = False
        self._steps_due = 0
        """Single steps that were asked for while it pauses."""
        self._turn: Turn | None = None

    def run(self) -> None:
        """Until ``Shutdown``. An exception of a step passes through: the engine's state is then not to be trusted."""
        try:
            while self._take_commands():
                if self._turn is not None and (self._turn.cancelled or not (self.core.has_work or self._arriving)):
                    self._compare(self._turn)
                elif self.core.has_work:
                    self._advance()
                else:
                    self._steps_due = 0
                self._send_frame()
        finally:
            self._log.close()

    def _advance(self) -> None:
        """One step, or, while it pauses, what there is to take in."""
        if not self._paused:
            self._tell(self.core.step())
        elif self._steps_due:
            self._steps_due -= 1
            self._tell(self.core.step(overlap=False))  # who steps by hand sees what the step gave
        else:
            self._tell(self.core.take_in())

    def _tell(self, result: StepResult) -> None:
        if result.record is not None:
            self._frames.add(result.record)
        self._log.add(result, self.core.keyframe)  # texts may come without a record
        self._send(*result.outputs)
        if result.notice:
            self._know_the_pool(result.notice)
        self._take_acknowledgements()
        self._tell_turn()

    def _know_the_pool(self, message: str) -> None:
        """It is smaller than it was: what no longer fits is refused, and conversations are cut to it."""
        info = self.loaded.info_of(self.core)
        self._intake = Intake(self.loaded.codec, info, self._send)
        self._send(PoolShrank(message, info))

    def _tell_turn(self) -> None:
        if self._turn is not None:
            self._turn.tell_waiting(self.core.num_requests + len(self._arriving))

    def _send_frame(self) -> None:
        frame = self._frames.next_frame()
        if frame is not None:
            self._send(frame)

    # Commands ----------------------------------------------------------------------------------------------------

    def _take_acknowledgements(self) -> None:
        """What was acknowledged while the step ran, so that every step can have its frame; the rest waits its turn."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, AckFrame):
                self._frames.acknowledge(command.number)
            else:
                self._set_aside.append(command)

    def _next_command(self, wait: bool) -> Incoming:
        """The oldest command. Raises queue.Empty where there is none and ``wait`` is not set."""
        return self._set_aside.popleft() if self._set_aside else self._commands.get(block=wait)

    def _take_commands(self) -> bool:
        """Take what has come; with nothing to do wait for it. False: the process is to end.

        Commands that cost nothing are all obeyed. Requests must be tokenised: while answers are running they are taken
        in for a short time only, so that a flood of them does not hold the answers up.
        """
        wait = self._idle
        if wait:
            self._log.flush()
        while True:
            try:
                command = self._next_command(wait)
            except queue.Empty:
                break
            if isinstance(command, Shutdown):
                if self._log.writes and self.core.has_notes:  # the texts of a step in flight; nobody else wants them
                    self._log.add(self.core.take_in(), self.core.keyframe)
                return False
            self._obey(command)
            wait = False
        deadline = time.perf_counter() + INTAKE_SECONDS
        while self._arriving and (time.perf_counter() < deadline or self._paused or not self.core.has_work):
            self._add(next(iter(self._arriving)))
        return True

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to do before another command comes."""
        if self._arriving or self._turn is not None:
            return False
        return not (self.core.has_notes if self._paused and not self._steps_due else self.core.has_work)

    def _obey(self, command: Incoming) -> None:
        if self._turn is not None and self._turn.take(command):
            return
        match command:
            case AddRequest(request_id=request_id):
                self._add(request_id)
                self._arriving[request_id] = command
            case Abort(request_id=request_id):
                self._add(request_id)
                self.core.abort(request_id)
            case SetPriority(request_id=request_id, priority=priority):
                self._add(request_id)
                self.core.set_priority(request_id, priority)
            case AckFrame(number=number):
                self._frames.acknowledge(number)
            case CountTokens():
                self._send(self._intake.count_tokens(command))
            case Reconfigure(scheduler=scheduler):
                self._reconfigure(scheduler)
            case SetPace(paused=paused):
                self._pace(paused and self._turn is None)
            case StepOnce():
                self._steps_due += self._paused and bool(self.core.has_work or self._arriving)
            case Record():
                self._record(command)
            case Compare(plan=plan):
                self._begin_turn(plan)
            case CancelCompare():
                pass  # it is over already
            case BadConfig(message=message):
                self._send(ConfigRefused(message))
            case BadPlan(message=message):
                self._send(CompareDone(b"", f"The comparison cannot be read: {message}"))
            case BadRequest(request_id=request_id, message=message):
                self.core.reject(request_id, message)
            case _:
                print(f"{type(command).__name__} is ignored: a model is loaded already", file=sys.stderr, flush=True)

    def _reconfigure(self, scheduler: SchedulerConfig) -> None:
        try:
            self.core.reconfigure(scheduler)
        except ConfigError as error:
            self._send(ConfigRefused(str(error)))

    def _pace(self, paused: bool) -> None:
        self._paused, self._steps_due = paused, 0
        self._send(Paced(paused))

    def _record(self, command: Record) -> None:
        if self.core.has_notes:  # a file ends, and begins, with nothing in flight
            self._tell(self.core.take_in())
        self._log.close()
        if command.path:
            config = dataclasses.replace(self.loaded.config, scheduler=self.scheduler)
            header = RunHeader(config=config, info=self.loaded.info, texts=command.texts)
            self._log.open(command.path, header, self.core.keyframe(), command.limit_bytes)

    def _add(self, request_id: int) -> None:
        """Hand an arriving request to the core; nothing where there is none of that id."""
        command = self._arriving.pop(request_id, None)
        if command is not None:
            self._intake.add(self.core, command)
            self._log.asked(command)

    # A comparison ------------------------------------------------------------------------------------------------

    def _begin_turn(self, plan: ComparePlan) -> None:
        """Let the running answers end; a pause ends with that."""
        if self._paused:
            self._pace(False)
        self._turn = Turn(plan, self._send)
        self._tell_turn()

    def _compare(self, turn: Turn) -> None:
        """Give the engine away, then begin afresh with what came meanwhile."""
        if turn.cancelled:
            done = CompareDone(b"", "The comparison was cancelled before its first run.")
        else:
            from engine.comparing import run_comparison

            self._log.close()  # the core that it tells of is replaced
            done = run_comparison(self, turn.plan)
            blocks = self.core.limits.num_blocks
            self.core = self.loaded.fresh_core(self.scheduler)
            self.begin(self.core)
            if self.core.limits.num_blocks < blocks:
                self._know_the_pool("Memory ran out during the comparison; the pool of KV blocks is smaller since.")
        self._send(done)
        self._turn = None
        self._set_aside.extendleft(reversed(turn.held()))

    @property
    def scheduler(self) -> SchedulerConfig:
        """The knobs of the core that serves, as wanted."""
        return self.core.scheduler_config

    def send(self, reply: Reply) -> None:
        self._send(reply)

    def begin(self, core: EngineCore) -> None:
        self._frames.begin(core.keyframe)
        self._send_frame()

    def stepped(self, result: StepResult) -> None:
        if result.record is not None:
            self._frames.add(result.record)
        self._take_acknowledgements()
        self._send_frame()

    def stop_wanted(self) -> bool:
        assert self._turn is not None
        while not self._turn.cancelled:
            try:
                command = self._next_command(wait=False)
            except queue.Empty:
                return False
            if isinstance(command, Shutdown):
                self._set_aside.appendleft(command)
                return True
            self._obey(command)
        return True

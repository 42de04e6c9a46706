"""Between the pipes and :class:`engine.core.EngineCore`: takes commands between steps, sends what the steps gave."""

from __future__ import annotations

import dataclasses
import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import DEFAULT_CHAT_MAX_TOKENS, ConfigError, SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.failures import describe
from engine.messages import (
    MAX_FRAME_RECORDS,
    Abort,
    AckFrame,
    AddRequest,
    ConfigRefused,
    CountTokens,
    Frame,
    Reconfigure,
    Shutdown,
    TokenCount,
)
from engine.request import RequestError
from engine.wire import BadConfig, BadRequest, Incoming
from engine.workload import ShapeError, synthetic_prompt

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.loader import LoadedEngine

INTAKE_SECONDS = 0.02
"""How long new requests may be taken in between two steps while answers are running."""


# Step records --------------------------------------------------------------------------------------------------------


class FrameStream:
    """Step records on their way to a client that may be slower than the engine.

    At most one frame is unacknowledged. What piles up meanwhile goes into the next; past ``MAX_FRAME_RECORDS`` it is
    dropped, and the next frame carries the state instead. Call :meth:`next_frame` only right after a step or with no
    work left: in between, requests may have arrived of which no record tells yet.
    """

    def __init__(self, keyframe: Callable[[], Keyframe]) -> None:
        self._keyframe = keyframe
        self._records: list[StepRecord] = []
        self._overflowed = False
        self._sent = 0
        self._acknowledged = 0

    def add(self, record: StepRecord) -> None:
        if self._overflowed:
            return
        self._records.append(record)
        if len(self._records) > MAX_FRAME_RECORDS:
            self._records.clear()
            self._overflowed = True

    def acknowledge(self, number: int) -> None:
        self._acknowledged = max(self._acknowledged, min(number, self._sent))

    def next_frame(self) -> Frame | None:
        """The next frame, where one may be sent and there is something to say."""
        if self._acknowledged < self._sent or not (self._records or self._overflowed):
            return None
        self._sent += 1
        records, self._records = self._records, []
        keyframe = self._keyframe() if self._overflowed else None
        self._overflowed = False
        return Frame(self._sent, records, keyframe)


# The loop ------------------------------------------------------------------------------------------------------------


class EngineLoop:
    """Takes commands between steps and sends what the steps gave."""

    def __init__(self, loaded: LoadedEngine, commands: queue.SimpleQueue[Incoming], send: Callable[..., None]) -> None:
        self.core: EngineCore = loaded.core
        self.codec = loaded.codec
        self._info = loaded.info
        self._special_ids = frozenset(loaded.codec.special_ids)
        self._commands = commands
        self._set_aside: deque[Incoming] = deque()
        """Commands that came while a step ran, taken from the queue already."""
        self._send = send
        self._frames = FrameStream(self.core.keyframe)
        self._arriving: dict[int, AddRequest] = {}
        """Requests that have come and are not yet in the core, in order of arrival."""

    def run(self) -> None:
        """Until ``Shutdown``. An exception of a step passes through: the engine's state is then not to be trusted."""
        while self._take_commands():
            if self.core.has_work:
                result = self.core.step()
                if result.record is not None:
                    self._frames.add(result.record)
                self._send(*result.outputs)
                self._take_acknowledgements()
            frame = self._frames.next_frame()
            if frame is not None:
                self._send(frame)

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
        idle = not (self.core.has_work or self._arriving)
        while True:
            try:
                command = self._next_command(wait=idle)
            except queue.Empty:
                break
            if isinstance(command, Shutdown):
                return False
            self._obey(command)
            idle = False
        deadline = time.perf_counter() + INTAKE_SECONDS
        while self._arriving and (time.perf_counter() < deadline or not self.core.has_work):
            self._add(next(iter(self._arriving)))
        return True

    def _obey(self, command: Incoming) -> None:
        match command:
            case AddRequest(request_id=request_id):
                self._add(request_id)
                self._arriving[request_id] = command
            case Abort(request_id=request_id):
                self._add(request_id)
                self.core.abort(request_id)
            case AckFrame(number=number):
                self._frames.acknowledge(number)
            case CountTokens():
                self._send(self._count_tokens(command))
            case Reconfigure(scheduler=scheduler):
                self._reconfigure(scheduler)
            case BadConfig(message=message):
                self._send(ConfigRefused(message))
            case BadRequest(request_id=request_id, message=message):
                self.core.reject(request_id, message)
            case _:
                print(f"{type(command).__name__} is ignored: a model is loaded already", file=sys.stderr, flush=True)

    def _reconfigure(self, scheduler: SchedulerConfig) -> None:
        try:
            self.core.reconfigure(scheduler)
        except ConfigError as error:
            self._send(ConfigRefused(str(error)))

    def _add(self, request_id: int) -> None:
        """Hand an arriving request to the core; nothing where there is none of that id."""
        command = self._arriving.pop(request_id, None)
        if command is None:
            return
        try:
            prompt_token_ids = self._prompt_of(command)
        except RequestError as error:
            self.core.reject(request_id, str(error))
            return
        except Exception as error:  # whatever a tokeniser or a template throws costs this one request
            traceback.print_exc()
            self.core.reject(request_id, f"The prompt could not be turned into tokens: {describe(error)}")
            return
        params = command.params
        if command.messages is not None and params.max_tokens is None:
            limit = max(DEFAULT_CHAT_MAX_TOKENS, params.min_tokens)
            params = dataclasses.replace(params, max_tokens=limit)
        try:
            self.core.add_request(
                request_id,
                prompt_token_ids,
                params,
                priority=command.priority,
                user=command.user,
                arrival_time=command.arrival_time,
                ends_after=command.ends_after,
                stream_text=command.stream_text,
            )
        except ValueError as error:
            # An id that is in use. Whatever is answered under it would end the request that has it.
            print(f"a request is ignored: {error}", file=sys.stderr, flush=True)

    def _prompt_of(self, command: AddRequest) -> list[int]:
        given = [
            name
            for name in ("messages", "prompt", "prompt_token_ids", "prompt_tokens")
            if getattr(command, name) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                f"a request has exactly one of messages, prompt, prompt_token_ids and prompt_tokens; this has "
                f"{' and '.join(given) or 'none of them'}"
            )
        if command.messages is not None:
            if not any(message.content.strip() for message in command.messages):
                raise RequestError("messages hold no text; write something to be answered")
            return self.codec.encode_chat(command.messages)
        if command.prompt is not None:
            if not command.prompt.strip():
                raise RequestError("prompt is empty; write something to be continued")
            return self.codec.encode(command.prompt)
        if command.prompt_token_ids is not None:
            return command.prompt_token_ids
        assert command.prompt_tokens is not None
        return self._synthetic(command.prompt_tokens, command.synthetic_seed)

    def _synthetic(self, length: int, seed: int) -> list[int]:
        if length > self._info.max_model_len:  # before it is made: it may be of any length
            raise RequestError(f"prompt_tokens is {length:,}; the model's context holds {self._info.max_model_len:,}")
        try:
            return synthetic_prompt(length, self._info.vocab_size, seed, self._special_ids)
        except ShapeError as error:
            raise RequestError(str(error)) from error

    def _count_tokens(self, query: CountTokens) -> TokenCount:
        try:
            return TokenCount(query.query_id, len(self.codec.encode_chat(query.messages)))
        except RequestError as error:
            return TokenCount(query.query_id, 0, str(error))
        except Exception as error:
            traceback.print_exc()
            return TokenCount(query.query_id, 0, describe(error))

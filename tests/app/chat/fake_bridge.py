"""A bridge without an engine: the same signals and methods as the real one, answered by the test."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import QObject, QTimer, Signal

from engine.client import EngineDied
from engine.config import EngineConfig
from engine.events import RequestState
from engine.fitting import count_chat, fit_request
from engine.messages import (
    AddRequest,
    ChatMessage,
    ContextCut,
    CountTokens,
    LoadFailed,
    Loading,
    ModelInfo,
    Output,
)
from engine.request import RequestError, RequestStatus, SamplingParams
from engine.run_state import RunState
from tests.app.scripted import chat_ids

INFO = ModelInfo(
    name="starter",
    architecture="LlamaForCausalLM",
    parameters=134_515_008,
    weights_sha256="0" * 64,
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    backend="cpu",
    backend_reason="no GPU",
    threads=2,
    vocab_size=49_152,
    max_model_len=8_192,
    num_blocks=512,
    block_size=16,
    kv_bytes_per_block=737_280,
    weight_bytes=98_000_000,
    max_num_seqs=32,
    token_budget=256,
    has_chat_template=True,
    load_seconds=1.0,
)


class FakeBridge(QObject):
    loading = Signal(object)
    ready = Signal(object)
    load_failed = Signal(object)
    died = Signal(object)
    outputs = Signal(list)
    stepped = Signal()
    state_changed = Signal(str)
    token_counted = Signal(object)
    context_cut = Signal(object)
    paced = Signal(bool)
    config_changed = Signal()
    compare_progress = Signal(object)
    compare_done = Signal(object)

    def __init__(self, state: str = "ready") -> None:
        super().__init__()
        self.run_state = RunState()
        self.state = state
        self.paused = self.comparing = False
        self.info = INFO if state == "ready" else None
        self.config = EngineConfig()
        self.requests: dict[int, tuple[list[ChatMessage], SamplingParams]] = {}
        self.asked: dict[int, AddRequest] = {}
        self.aborted: list[int] = []
        self.priorities: dict[int, int] = {}
        """Those that were changed while a request ran."""
        self.restarts = 0
        self._next = 1
        self._query = 0

    # What the chat calls -----------------------------------------------------------------------------------------

    def add_request(
        self,
        *,
        params: SamplingParams,
        messages: Sequence[ChatMessage],
        user: str = "",
        arrival_time: float | None = None,
        priority: int = 0,
        continues: bool = False,
        drop_oldest: bool = False,
    ) -> int:
        assert self.state == "ready"
        number, self._next = self._next, self._next + 1
        self.requests[number] = (list(messages), params)
        self.asked[number] = AddRequest(
            number,
            params,
            list(messages),
            continues,
            drop_oldest,
            priority=priority,
            user=user,
            arrival_time=arrival_time,
        )
        QTimer.singleShot(0, self, lambda: self._fit(self.asked[number]))
        self.run_state.requests[number] = RequestState(
            number, arrival_time or 0.0, 20, params.max_tokens or 0, 0, user, RequestStatus.WAITING, 0, 0, 0, 0, []
        )
        return number

    def _fit(self, command: AddRequest) -> None:
        try:
            fitted = fit_request(command, chat_ids, (self.info or INFO).max_model_len)
        except RequestError as error:
            self.finish(command.request_id, reason="error", error=str(error))
            return
        if fitted.dropped_messages:
            prompt_tokens = len(fitted.prompt_token_ids)
            self.context_cut.emit(ContextCut(command.request_id, fitted.dropped_messages, prompt_tokens))

    def count_tokens(
        self, messages: Sequence[ChatMessage], continues: bool = False, max_tokens: int | None = None
    ) -> int:
        self._query += 1
        query = CountTokens(self._query, list(messages), continues, max_tokens)
        if self.state == "ready":
            answer = count_chat(query, chat_ids, (self.info or INFO).max_model_len)
            QTimer.singleShot(0, self, lambda: self.token_counted.emit(answer))
        return query.query_id

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def set_priority(self, request_id: int, priority: int) -> None:
        self.priorities[request_id] = priority

    def restart(self) -> None:
        self.restarts += 1
        self.set_state("starting")

    # What a test has the engine do -------------------------------------------------------------------------------

    def set_state(self, state: str) -> None:
        self.state = state
        self.state_changed.emit(state)

    def say_loading(self, stage: str, done: int = 0, total: int = 0) -> None:
        self.set_state("loading")
        self.loading.emit(Loading(stage, done, total))

    def become_ready(self) -> None:
        self.info = INFO
        self.set_state("ready")
        self.ready.emit(INFO)

    def fail_load(self, message: str) -> None:
        self.set_state("failed")
        self.load_failed.emit(LoadFailed(message, "other"))

    def die(self, reason: str = "The engine was ended by SIGKILL.") -> None:
        self.set_state("dead")
        self.died.emit(EngineDied(exit_code=-9, reason=reason, last_lines=[]))

    def say(self, request_id: int, text: str, *, tokens: int = 1, at: float | None = None) -> None:
        state = self.run_state.requests.get(request_id)
        now = time.perf_counter() if at is None else at
        if state is not None:
            state.status = RequestStatus.RUNNING
            state.output_tokens += tokens
            state.first_token_time = state.first_token_time or now
        self.outputs.emit([Output(request_id, now, list(range(tokens)), text)])
        self.stepped.emit()

    def finish(
        self,
        request_id: int,
        text: str = "",
        *,
        reason: str = "stop",
        error: str = "",
        prompt: int = 20,
        cached: int = 0,
    ) -> None:
        self.run_state.requests.pop(request_id, None)
        output = Output(
            request_id,
            time.perf_counter(),
            [0] if text else [],
            text,
            finish_reason=reason,
            error=error,
            prompt_tokens=prompt,
            cached_tokens=cached,
        )
        self.outputs.emit([output])

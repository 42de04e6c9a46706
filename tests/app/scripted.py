"""A scripted engine for window tests: the real core and scheduler in this process, behind the client's interface.

Nothing runs by itself: :meth:`ScriptedClient.step` takes steps, on a clock that only the steps move, so that every
record is genuine and every test is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.client import EngineDied
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.frames import FrameStream
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    AnyReply,
    Command,
    ConfigRefused,
    CountTokens,
    Hello,
    LoadFailed,
    Loading,
    ModelInfo,
    Output,
    Ready,
    Reconfigure,
    TokenCount,
)
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests.oracles import VOCAB_SIZE, KVCheckingRunner

SENTENCE = "Paged attention keeps the keys and values of a request in blocks that need not lie side by side. "
WORDS = SENTENCE.split()


class TimedRunner(KVCheckingRunner):
    """Takes make-believe time: 20 ms a step and 1 ms a token."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.now = 100.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.now += 0.02 + 0.001 * output.total_tokens
        return super().execute(output)


class ScriptedClient:
    """What :class:`engine.client.EngineClient` is to the window, without a process."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        token_budget: int = 64,
        max_model_len: int = 2048,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        self.on_activity: Callable[[], None] | None = None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.scheduler = scheduler or SchedulerConfig()
        self.loaded: list[EngineConfig] = []
        self.closed = 0
        self.sent: list[Command] = []
        self.core: EngineCore | None = None
        self._arrived: list[AnyReply | EngineDied] = []
        self._request_id = 0

    # What the bridge calls ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return 4242 if self.core is not None else None

    def start(self) -> None:
        self._arrived.clear()

    def load(self, config: EngineConfig) -> None:
        self.loaded.append(config)
        self.scheduler = config.scheduler
        self.runner = TimedRunner(self.block_size)
        self.core = EngineCore(
            self.runner,
            scheduler=self.scheduler,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            prefix_cache=True,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            token_budget=self.token_budget,
            clock=lambda: self.runner.now,
        )
        self._frames = FrameStream(self.core.keyframe)
        self.deliver(Hello(1, 4242))

    def next_request_id(self) -> int:
        self._request_id += 1
        return self._request_id

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if self.core is None:
            return
        if isinstance(command, AddRequest):
            self._add(command)
        elif isinstance(command, Abort):
            self.core.abort(command.request_id)
        elif isinstance(command, AckFrame):
            self._frames.acknowledge(command.number)
            self._send_frame()
        elif isinstance(command, Reconfigure):
            try:
                self.core.reconfigure(command.scheduler)
            except ConfigError as error:
                self.deliver(ConfigRefused(str(error)))
        elif isinstance(command, CountTokens):
            self.deliver(TokenCount(command.query_id, sum(len(m.content) // 4 for m in command.messages)))

    def poll(self, timeout: float = 0.0) -> list[AnyReply | EngineDied]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, timeout: float = 0.0) -> int | None:
        self.closed += 1
        self.core = None
        return 0

    def kill(self) -> None:
        self.die("The engine was ended by SIGKILL.")

    # What a test calls -------------------------------------------------------------------------------------------

    def deliver(self, reply: AnyReply | EngineDied) -> None:
        first = not self._arrived
        self._arrived.append(reply)
        if first and self.on_activity is not None:
            self.on_activity()

    def loading(self, stage: str, done: int = 0, total: int = 0) -> None:
        self.deliver(Loading(stage, done, total))

    def fail_to_load(self, message: str, kind: str) -> None:
        self.core = None
        self.deliver(LoadFailed(message, kind))

    def ready(self) -> None:
        assert self.core is not None
        self.deliver(Ready(self.info(), self.core.keyframe()))

    def die(self, reason: str, lines: tuple[str, ...] = ("last line",)) -> None:
        self.core = None
        self.deliver(EngineDied(-9, reason, lines))

    def step(self, steps: int = 1) -> int:
        """Takes up to so many steps; returns how many had something to do."""
        done = 0
        for _ in range(steps):
            if self.core is None or not self.core.has_work:
                break
            result = self.core.step()
            if result.record is not None:
                done += 1
                self._frames.add(result.record)
            for output in result.outputs:
                self.deliver(_with_text(output))
            self._send_frame()
        return done

    def _send_frame(self) -> None:
        frame = self._frames.next_frame()
        if frame is not None:
            self.deliver(frame)

    def info(self) -> ModelInfo:
        return ModelInfo(
            name="SmolLM2-135M-Instruct",
            architecture="LlamaForCausalLM",
            parameters=134_515_008,
            weights_sha256="0" * 64,
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            backend="cpu",
            backend_reason="no GPU here",
            threads=2,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            kv_bytes_per_block=11_520 * 4 * self.block_size,
            weight_bytes=538_060_032,
            max_num_seqs=self.scheduler.max_num_seqs,
            token_budget=self.token_budget,
            has_chat_template=True,
            load_seconds=1.5,
        )

    def _add(self, command: AddRequest) -> None:
        assert self.core is not None
        self.core.add_request(
            command.request_id,
            _prompt(command),
            command.params,
            priority=command.priority,
            user=command.user,
            arrival_time=self.runner.now,
            ends_after=command.ends_after,
        )


def _prompt(command: AddRequest) -> list[int]:
    if command.prompt_token_ids is not None:
        return list(command.prompt_token_ids)
    if command.messages is not None:
        length = 8 + sum(len(message.content) // 4 for message in command.messages)
    else:
        length = command.prompt_tokens or len(command.prompt or "") // 4 or 1
    return [(31 * command.synthetic_seed + 7 * command.request_id + i) % VOCAB_SIZE for i in range(length)]


def _with_text(output: Output) -> Output:
    words = "".join(WORDS[token % len(WORDS)] + " " for token in output.token_ids)
    return msgspec.structs.replace(output, text=words)

"""A scripted engine for window tests: the real core and scheduler in this process, behind the client's interface.

Nothing runs by itself: :meth:`ScriptedClient.step` takes steps, on a clock that only the steps move, so that every
record is genuine and every test is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from engine.client import EngineDied
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.core import EngineCore, StepResult
from engine.fitting import count_chat, fit_request
from engine.floor import Turn
from engine.frames import FrameStream
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    AnyReply,
    ChatMessage,
    Command,
    Compare,
    CompareDone,
    CompareProgress,
    ConfigRefused,
    ContextCut,
    CountTokens,
    Hello,
    LoadFailed,
    Loading,
    ModelInfo,
    Output,
    Paced,
    Ready,
    Reconfigure,
    Record,
    RecordingFailed,
    SetPace,
    SetPriority,
    StepOnce,
)
from engine.recording import RunHeader
from engine.request import RequestError
from engine.run_log import RunLog
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
        self.on_end: Callable[[], None] | None = None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.scheduler = scheduler or SchedulerConfig()
        self.loaded: list[EngineConfig] = []
        self.closed = 0
        self.last_lines: list[str] = []
        self.sent: list[Command] = []
        self.core: EngineCore | None = None
        self.paused = False
        self._arrived: list[AnyReply | EngineDied] = []
        self._request_id = 0
        self._log = RunLog(lambda reason: self.deliver(RecordingFailed(reason)))
        self._turn: Turn | None = None

    # What the bridge calls ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return 4242 if self.core is not None else None

    def start(self) -> None:
        self._arrived.clear()

    def load(self, config: EngineConfig) -> None:
        self.loaded.append(config)
        self.scheduler = config.scheduler
        self.core = self._fresh_core()
        self._frames = FrameStream(self.core.keyframe)
        self.deliver(Hello(1, 4242))

    def _fresh_core(self) -> EngineCore:
        self.runner = TimedRunner(self.block_size)
        return EngineCore(
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

    def next_request_id(self) -> int:
        self._request_id += 1
        return self._request_id

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if self.core is None or (self._turn is not None and self._turn.take(command)):
            return
        self._obey(self.core, command)
        if self.paused and self.core is not None and self.core.has_notes:
            self._tell(self.core.take_in())

    def _obey(self, core: EngineCore, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
                self._log.asked(command)
            case Abort(request_id=request_id):
                core.abort(request_id)
            case SetPriority(request_id=request_id, priority=priority):
                core.set_priority(request_id, priority)
            case AckFrame(number=number):
                self._frames.acknowledge(number)
                self._send_frame()
            case Reconfigure(scheduler=scheduler):
                try:
                    core.reconfigure(scheduler)
                except ConfigError as error:
                    self.deliver(ConfigRefused(str(error)))
            case CountTokens():
                self.deliver(count_chat(command, chat_ids, core.limits.longest))
            case SetPace(paused=paused):
                self._pace(paused and self._turn is None)
            case StepOnce():
                if self.paused and core.has_work:
                    self._tell(core.step())
            case Record():
                self._log.close()
                if command.path:
                    header = RunHeader(config=self.loaded[-1], info=self.info(), texts=command.texts)
                    self._log.open(command.path, header, core.keyframe(), command.limit_bytes)
            case Compare(plan=plan):
                if self.paused:
                    self._pace(False)
                self._turn = Turn(plan, self.deliver)
                self._turn.tell_waiting(core.num_requests)

    def _pace(self, paused: bool) -> None:
        self.paused = paused
        self.deliver(Paced(paused))

    def poll(self, timeout: float = 0.0) -> list[AnyReply | EngineDied]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, timeout: float = 0.0) -> int | None:
        self.closed += 1
        self.core, self._turn, self.paused = None, None, False
        self._log.close()
        return 0

    def kill(self) -> None:
        self.die("The engine was ended by SIGKILL.")

    # What a test calls -------------------------------------------------------------------------------------------

    def deliver(self, reply: AnyReply | EngineDied) -> None:
        first = not self._arrived
        self._arrived.append(reply)
        if first and self.on_activity is not None:
            self.on_activity()
        if self.on_end is not None and isinstance(reply, Output) and reply.finish_reason is not None:
            self.on_end()

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
        self.last_lines = list(lines)
        self.deliver(EngineDied(-9, reason, lines))

    def step(self, steps: int = 1) -> int:
        """Takes up to so many steps; returns how many had something to do."""
        done = 0
        for _ in range(steps):
            if self.core is None or self.paused or not self.core.has_work:
                break
            result = self.core.step()
            done += result.record is not None
            self._tell(result)
        return done

    def run_comparison(self, *progress: CompareProgress) -> None:
        """Lets the answers that run end, then says how far a comparison is."""
        assert self._turn is not None and self.core is not None
        while self.core.has_work:
            self.step()
        for reply in progress:
            self.deliver(reply)

    def end_comparison(self, result: bytes, error: str = "") -> None:
        """Ends the comparison; what came meanwhile goes to a fresh core."""
        turn, self._turn = self._turn, None
        assert turn is not None and self.core is not None
        self._log.close()
        self.scheduler, now = self.core.scheduler_config, self.runner.now
        self.core = self._fresh_core()
        self.runner.now = now
        self._frames.begin(self.core.keyframe)
        self._send_frame()
        self.deliver(CompareDone(result, error))
        for command in turn.held():
            self._obey(self.core, command)

    def _tell(self, result: StepResult) -> None:
        if result.record is not None:
            assert self.core is not None
            self._frames.add(result.record)
            self._log.add(result, self.core.keyframe)
            self._log.flush()
        for output in result.outputs:
            self.deliver(_with_text(output))
        self._send_frame()
        if self._turn is not None and self.core is not None:
            self._turn.tell_waiting(self.core.num_requests)

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
        if command.messages is not None:
            try:
                fitted = fit_request(command, chat_ids, self.core.limits.longest)
            except RequestError as error:
                self.core.reject(command.request_id, str(error))
                return
            if fitted.dropped_messages:
                prompt_tokens = len(fitted.prompt_token_ids)
                self.deliver(ContextCut(command.request_id, fitted.dropped_messages, prompt_tokens))
            length = len(fitted.prompt_token_ids)
        else:
            length = command.prompt_tokens or len(command.prompt or "") // 4 or 1
        self.core.add_request(
            command.request_id,
            _prompt(command, length),
            command.params,
            priority=command.priority,
            user=command.user,
            arrival_time=self.runner.now,
            ends_after=command.ends_after,
        )


def chat_ids(messages: Sequence[ChatMessage], continues: bool = False) -> list[int]:
    """A prompt of a token for every four characters of the messages, and eight for what a template writes."""
    if not messages:
        raise RequestError("messages is empty; a conversation needs at least one message")
    if continues and messages[-1].role != "assistant":
        raise RequestError("only an assistant's message can go on")
    return [0] * (8 + sum(len(message.content) // 4 for message in messages))


def _prompt(command: AddRequest, length: int) -> list[int]:
    if command.prompt_token_ids is not None:
        return list(command.prompt_token_ids)
    return [(31 * command.synthetic_seed + 7 * command.request_id + i) % VOCAB_SIZE for i in range(length)]


def _with_text(output: Output) -> Output:
    words = "".join(WORDS[token % len(WORDS)] + " " for token in output.token_ids)
    return msgspec.structs.replace(output, text=words)

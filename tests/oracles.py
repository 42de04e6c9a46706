"""Helpers that other tests build on: a runner that proves the KV bookkeeping, and the six oracles of the engine.

Nothing here needs torch: :class:`KVCheckingRunner` keeps, per slot of a make-believe KV memory, which token of which
position was written there, gathers each request's whole context through its block table, and asserts that it is exactly
the request's tokens. Scheduling, prefix hits, preemption and copies are thus proven in microseconds a step.

The oracles, each usable with any runner and model:

1. block accounting       ``EngineProbe.step`` (invariants after every step), :func:`assert_pool_whole` when idle
2. cold equivalence       :func:`assert_cold` against a fresh engine, :data:`EDGE_LENGTHS`
3. progress               ``EngineProbe.step``: whoever waits, something moves within a bounded number of steps
4. blast radius           :func:`assert_blast_radius`
5. stream law             :func:`assert_stream_law`
6. abort in every state   :data:`ABORT_STATES` and :func:`abort_in_state`

``EngineProbe.step`` also holds that the fold of the records is the engine's own keyframe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgspec

from engine.config import SchedulerConfig
from engine.core import EngineCore, StepResult
from engine.events import Admitted, AnyEvent, Finished, Keyframe, Preempted, Rejected, RowKind, StepRecord
from engine.messages import Output, TokenLogprob
from engine.request import PENDING, FinishReason, Request, RequestStatus, SamplingParams, branch_id, branch_of
from engine.run_state import RunState
from engine.scheduling.costs import PreemptionCosts
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 1_000
EDGE_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)
"""Prompt lengths on both sides of the edges of blocks of 16."""
PADDING_TOKEN = 0
ABORT_STATES = ("waiting", "prefill", "decode", "preempted", "executing", "finishing", "finished", "twice")


def next_token(context: Sequence[int], vocab_size: int = VOCAB_SIZE) -> int:
    """The make-believe model: a token that depends on every token before it."""
    digest = blake2b(",".join(map(str, context)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def draft_often_right(context: Sequence[int], limit: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Drafts of which, by and large, two in three are what the model gives; sometimes fewer than allowed."""
    tokens = list(context)
    drafts = []
    for _ in range(limit - (len(tokens) % 5 == 0)):
        token = next_token(tokens, vocab_size)
        drafts.append(token if len(tokens) % 3 else (token + 1) % vocab_size)
        tokens.append(drafts[-1])
    return drafts


def cold_answer(prompt: Sequence[int], length: int, vocab_size: int = VOCAB_SIZE, index: int = 0) -> list[int]:
    """What a fresh engine with nothing else to do would answer: the reference of oracle 2. ``index``: which of several
    answers to the same prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(branch_token(tokens, index, vocab_size))
    return tokens[len(prompt) :]


def branch_token(context: Sequence[int], index: int, vocab_size: int = VOCAB_SIZE) -> int:
    """:func:`next_token` of answer ``index``: each goes its own way, so that none can pass for another."""
    return (next_token(context, vocab_size) + index) % vocab_size


class KVCheckingRunner:
    """A :class:`engine.in_flight.Runner` whose KV memory remembers what was written where."""

    def __init__(self, block_size: int, vocab_size: int = VOCAB_SIZE) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.memory: dict[int, tuple[int, int]] = {}
        """Slot → (token id, position)."""
        self.host_memory: dict[int, tuple[int, int]] = {}
        """The same for the blocks of host memory."""
        self.draft: Callable[[list[int], int], list[int]] = draft_often_right
        """(context, limit) → drafted tokens, where the scheduler allows any."""
        self.failures: dict[int, str] = {}
        """Request id → why its next row fails; a test's way to poison one request."""
        self.during: Callable[[SchedulerOutput], None] | None = None
        """Called in the middle of an execution; a test's way to abort just then."""
        self.plan: SchedulerOutput | None = None
        """The last one."""
        self.shortage: tuple[str, Exception] | None = None
        """What the next step raises, ``before`` or ``after`` it has written, or when it is ``awaited``; a test's way to
        let memory run out."""
        self._sampled: dict[Request, int] = {}
        """What the last launched step sampled, as a device keeps it for the next."""

    def launch(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The device is as fast as can be; the engine must not know."""
        result = self.execute(output)
        rows = zip(output.requests, result.token_ids, strict=True)
        self._sampled = {request: tokens[0] for request, tokens in rows if len(tokens) == 1}
        return replace(result, token_ids=[[] if row in result.errors else t for row, t in enumerate(result.token_ids)])

    def collect(self, flight: ModelRunnerOutput) -> ModelRunnerOutput:
        self._run_short("awaited")
        return flight

    def _tokens(self, request: Request) -> list[int]:
        """As the device knows them."""
        tokens = request.token_ids
        return tokens if tokens[-1] != PENDING else [*tokens[:-1], self._sampled[request]]

    def resize(self, num_blocks: int) -> int:
        """A storage made anew: nothing of the old one is there."""
        self.memory.clear()
        self.host_memory.clear()
        return num_blocks

    def _run_short(self, when: str) -> None:
        if self.shortage is not None and self.shortage[0] == when:
            _, error = self.shortage
            self.shortage = None
            raise error

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.plan = output
        self._run_short("before")
        self._move(output.swap_out, self.memory, self.host_memory)
        self._move(output.block_copies, self.memory, self.memory)
        self._move(output.swap_in, self.host_memory, self.memory)
        drafts = [self._drafts(output, row) for row in range(len(output.requests))]
        for row in range(len(output.requests)):
            self._write(output, row, drafts[row])
        token_ids: list[list[int]] = []
        errors: dict[int, str] = {}
        for row, request in enumerate(output.requests):
            context = self._gather(output, row)
            if request.request_id in self.failures:
                errors[row] = self.failures.pop(request.request_id)
            token_ids.append(self._sample(request, context, drafts[row]) if output.samples[row] else [])
        if self.during is not None:
            self.during(output)
        self._run_short("after")
        drafted = [len(tokens) for tokens in drafts] if any(drafts) else []
        return ModelRunnerOutput(token_ids=token_ids, logprobs=[], errors=errors, drafts=drafted)

    def _move(self, pairs: Sequence[tuple[int, int]], source: dict, destination: dict) -> None:
        """Whole blocks, all read before any is written, as the backends do."""
        size = self.block_size
        read = [[source.get(block * size + offset) for offset in range(size)] for block, _ in pairs]
        for (_, block), entries in zip(pairs, read, strict=True):
            for offset, entry in enumerate(entries):
                destination.pop(block * size + offset, None)
                if entry is not None:
                    destination[block * size + offset] = entry

    def _drafts(self, output: SchedulerOutput, row: int) -> list[int]:
        limit = output.draft_limits[row] if output.draft_limits else 0
        if not limit:
            return []
        assert output.samples[row] and output.num_new_tokens[row] == 1, "drafts for a row that does not decode"
        return self.draft(output.requests[row].token_ids, limit)

    def _sample(self, request: Request, context: list[int], drafts: list[int]) -> list[int]:
        """The tokens that the model gives, as long as the drafts before them were right."""
        _, index = branch_of(request.request_id)
        tokens = [branch_token(context, index, self.vocab_size)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(branch_token([*context, *tokens], index, self.vocab_size))
        return tokens

    def _write(self, output: SchedulerOutput, row: int, drafts: list[int]) -> None:
        request, start, count = output.requests[row], output.starts[row], output.num_new_tokens[row]
        padding = output.padding[row] if output.padding else 0
        assert count + padding >= 1, f"{request!r} is scheduled for nothing"
        assert output.samples[row] == (count > 0 and start + count == request.num_tokens)
        tokens = [*self._tokens(request)[start : start + count], *drafts, *[PADDING_TOKEN] * padding]
        for position, token in enumerate(tokens, start=start):
            slot = self._slot(output.block_tables[row], position)
            assert slot >= self.block_size, f"{request!r} writes to the null block"
            self.memory[slot] = (token, position)

    def _gather(self, output: SchedulerOutput, row: int) -> list[int]:
        request = output.requests[row]
        end = output.starts[row] + output.num_new_tokens[row]
        if output.num_new_tokens[row] == 0:  # padding alone: nobody reads what it gives
            end = request.num_computed_tokens
        found = [self.memory.get(self._slot(output.block_tables[row], p)) for p in range(end)]
        tokens = self._tokens(request)
        wanted = [(tokens[p], p) for p in range(end)]
        assert found == wanted, f"{request!r}: its block table does not lead to its own tokens"
        return tokens[:end]

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    prefix_cache: bool = True,
    max_model_len: int = 4_096,
    token_budget: int = 64,
    num_host_blocks: int = 0,
    runner: Any = None,
    clock: Callable[[], float] | None = None,
    codec: Any = None,
    eos_token_ids: frozenset[int] = frozenset(),
    vocab_size: int = VOCAB_SIZE,
    costs: PreemptionCosts | None = None,
    overlap: bool = False,
    **scheduler: Any,
) -> EngineCore:
    """A core on a :class:`KVCheckingRunner`; keyword arguments beyond its own go to :class:`SchedulerConfig`."""
    runner = KVCheckingRunner(block_size, vocab_size) if runner is None else runner
    return EngineCore(
        runner,
        scheduler=SchedulerConfig(**scheduler),
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        token_budget=token_budget,
        num_host_blocks=num_host_blocks,
        costs=costs,
        overlap=overlap,
        resize_pool=getattr(runner, "resize", None),
        eos_token_ids=eos_token_ids,
        codec=codec,
        **({} if clock is None else {"clock": clock}),
    )


def by_id(keyframe: Keyframe) -> Keyframe:
    """The same state with the requests in order of id, as a fold gives it."""
    return msgspec.structs.replace(keyframe, requests=sorted(keyframe.requests, key=lambda r: r.request_id))


@dataclass
class Answer:
    """All that a client got of one request."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Output | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def finish_reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason


class EngineProbe:
    """Drives a core and holds oracles 1 and 3 and the fold at every step."""

    def __init__(self, core: EngineCore, *, max_quiet_steps: int = 1_000) -> None:
        self.core = core
        self.answers: dict[int, Answer] = {}
        self.events: list[AnyEvent] = []
        self.records: list[StepRecord] = []
        self.state = RunState()
        self.state.restore(core.keyframe())
        self._next_id = 1
        self._max_quiet_steps = max_quiet_steps
        self._quiet_steps = 0
        self._stalled = False

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, **options: Any) -> int:
        """Add a request (4 greedy tokens by default) and return its id. Further answers to it are in ``answers`` under
        :func:`engine.request.branch_id`."""
        request_id = self._next_id
        self._next_id += 1
        params = params or SamplingParams(max_tokens=4)
        for index in range(params.n):
            self.answers[branch_id(request_id, index)] = Answer()
        self.core.add_request(request_id, list(prompt), params, **options)
        return request_id

    def step(self) -> StepResult:
        result = self._look_at(self.core.step())
        if result.record is not None:
            self._watch_progress(result.record)
        return result

    def take_in(self) -> StepResult:
        """What an engine that pauses does: nothing may be computed."""
        result = self._look_at(self.core.take_in())
        assert result.record is None or not result.record.request_ids
        assert not self.core.has_notes
        return result

    def _look_at(self, result: StepResult) -> StepResult:
        for output in result.outputs:
            self._take(output)
        self.core.check_invariants()
        if result.record is not None:
            self._fold(result.record)
        return result

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left, and hold oracle 1 at idle."""
        for _ in range(max_steps):
            if not self.core.has_work:
                assert_pool_whole(self.core)
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def of(self, kind: type) -> list[Any]:
        """All events of one type so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def row(self, request_id: int) -> Any:
        """What the last keyframe says of a request."""
        return next(r for r in self.core.keyframe().requests if r.request_id == request_id)

    def _take(self, output: Output) -> None:
        request_id = branch_id(output.request_id, output.index)
        answer = self.answers.setdefault(request_id, Answer())
        assert answer.last is None, f"request {request_id} goes on after its last output"
        answer.token_ids += output.token_ids
        answer.deltas.append(output.text)
        answer.logprobs += output.logprobs
        if output.finish_reason is not None:
            answer.last = output

    def _fold(self, record: StepRecord) -> None:
        self.records.append(record)
        self.events += record.events
        self.state.apply(record)
        keyframe = self.core.keyframe()
        assert by_id(keyframe) == self.state.keyframe(), "the fold of the records is not the engine's state"
        assert record.num_running == self.state.num_running and record.num_waiting == self.state.num_waiting
        referenced = self.state.referenced_blocks
        assert record.free_blocks + record.cached_blocks + referenced == keyframe.num_blocks

    def _watch_progress(self, record: StepRecord) -> None:
        stalled = not record.request_ids and record.num_waiting > 0
        assert not (stalled and self._stalled), "two steps that computed nothing while somebody waited"
        self._stalled = stalled
        moved = any(isinstance(event, Admitted | Finished | Rejected) for event in record.events)
        self._quiet_steps = 0 if moved or not record.num_waiting else self._quiet_steps + 1
        assert self._quiet_steps <= self._max_quiet_steps, f"nobody joined or left for {self._quiet_steps} steps"


def assert_pool_whole(core: EngineCore) -> None:
    """Oracle 1 at idle: every block is free or cached, nobody holds one, on the host neither; nothing is withheld."""
    core.check_invariants()
    keyframe = core.keyframe()
    assert keyframe.requests == [] and keyframe.deferred is None
    assert core._scheduler.memory.host.num_used == 0
    assert not core._roster.withheld._held, "answers that nobody gets"
    assert not core._roster.families and not core._roster.answers.request_ids
    state = RunState()
    state.restore(keyframe)
    assert state.referenced_blocks == 0


def assert_cold(
    make: Callable[[], EngineCore], prompt: Sequence[int], params: SamplingParams, got: Sequence[int]
) -> None:
    """Oracle 2: ``got`` is what a fresh engine answers with nothing else to do. Greedy or seeded parameters only."""
    probe = EngineProbe(make())
    cold = probe.add(prompt, params)
    probe.run()
    assert list(got) == probe.answers[cold].token_ids


def assert_blast_radius(
    make: Callable[[], EngineCore],
    good: Sequence[tuple[Sequence[int], SamplingParams]],
    bad: Callable[[EngineProbe], int],
) -> Answer:
    """Oracle 4: one bad request beside good ones fails alone, and the next is served. ``bad`` adds it: its id."""
    calm = EngineProbe(make())
    expected = [calm.add(prompt, params) for prompt, params in good]
    calm.run()
    probe = EngineProbe(make())
    neighbours = [probe.add(prompt, params) for prompt, params in good]
    probe.step()
    failing = bad(probe)
    probe.run()
    for mine, theirs in zip(neighbours, expected, strict=True):
        assert probe.answers[mine].token_ids == calm.answers[theirs].token_ids
        assert probe.answers[mine].finish_reason == calm.answers[theirs].finish_reason
    prompt, params = good[0]
    later = probe.add(prompt, params)
    probe.run()
    assert probe.answers[later].token_ids == calm.answers[expected[0]].token_ids
    assert probe.answers[failing].finish_reason == FinishReason.ERROR
    assert probe.answers[failing].last is not None and probe.answers[failing].last.error
    return probe.answers[failing]


def assert_stream_law(answer: Answer, final_text: str, num_output_tokens: int, *, logprobs: bool = False) -> None:
    """Oracle 5: the deltas joined are the final text, ids and log-probabilities as many as usage says."""
    assert answer.text == final_text
    assert len(answer.token_ids) == num_output_tokens
    if logprobs:
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids


def abort_in_state(probe: EngineProbe, state: str) -> int:
    """Oracle 6: bring a request of a fresh core to ``state``, abort it there, and run what is left; returns its id.

    The core is one of :func:`make_core` with its defaults and ``max_num_seqs=2, order="priority"``.
    """
    core, long = probe.core, SamplingParams(max_tokens=40)
    runner = core._runner
    assert isinstance(runner, KVCheckingRunner)
    if state in ("waiting", "preempted"):
        others = [probe.add([1, 2, 3 + i], long, priority=5, arrival_time=float(i)) for i in range(2)]
        probe.step()
        victim = others[1] if state == "preempted" else probe.add([4] * 20, long, priority=5)
        if state == "preempted":
            probe.add([5] * 20, long, priority=0)
        probe.step()
        wanted = RequestStatus.PREEMPTED if state == "preempted" else RequestStatus.WAITING
        assert probe.row(victim).status == wanted
    else:
        victim = probe.add(range(200), SamplingParams(max_tokens=2 if state == "finishing" else 40))
        probe.add([9] * 5, long)
        probe.step()
        assert 0 < probe.row(victim).num_computed < 200
        while state != "prefill" and probe.row(victim).output_tokens == 0:
            probe.step()
    if state in ("executing", "finishing"):
        runner.during = lambda plan: core.abort(victim)
        probe.step()
        runner.during = None
    elif state == "finished":
        probe.run()
    core.abort(victim)
    if state == "twice":
        core.abort(victim)
    probe.run()
    core.abort(victim)
    assert not core.has_work
    return victim


def kinds_of(records: Sequence[StepRecord], request_id: int) -> list[tuple[RowKind, int]]:
    """(kind, tokens) of a request's rows over all steps."""
    return [
        (RowKind(record.kinds[row]), record.num_tokens[row])
        for record in records
        for row, other in enumerate(record.request_ids)
        if other == request_id
    ]


def prefilled_tokens(records: Sequence[StepRecord]) -> int:
    """Tokens computed by rows that are no decodes."""
    return sum(
        tokens
        for record in records
        for kind, tokens in zip(record.kinds, record.num_tokens, strict=True)
        if kind != RowKind.DECODE
    )


def preemptions_of(probe: EngineProbe, request_id: int) -> list[Preempted]:
    return [event for event in probe.of(Preempted) if event.request_id == request_id]

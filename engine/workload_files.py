"""The requests of a workload, and the lines of Batchscope's own files. Light: no torch.

Batchscope jsonl, one request a line::

    {"prompt_tokens": 100, "output_tokens": 50}
    {"prompt": "Once upon a time", "output_tokens": 20, "max_tokens": 64, "arrival_s": 1.5, "user": "ann"}

Exactly one of ``prompt``, ``prompt_token_ids`` and ``prompt_tokens`` (a synthetic prompt of that length), and
``output_tokens``, where the answer ends. Optional are ``max_tokens`` (what the client asked, all that a scheduler may
know; default: the same), ``arrival_s`` (0), ``priority`` (0; lower first), ``user`` and ``ignore_eos`` (true: the
answer is as long as the line says; false: the model may end it earlier).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import msgspec

from engine.load_shapes import Arrivals, arrival_times, synthetic_prompt
from engine.request import SamplingParams

MAX_REQUESTS = 1_000_000
MAX_NUMBER = 2**31 - 1
"""Largest length or priority: what every table of a run holds."""
BATCHSCOPE = "Batchscope jsonl"
"""Name of our own format."""


class WorkloadError(ValueError):
    """A workload or scenario that cannot be read; the message names the file, the line and what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload. Exactly one of the three prompts is set."""

    output_tokens: int
    """Where the answer ends; a scheduler must not know it."""
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    """Length of a synthetic prompt, ``prefix`` included."""
    max_tokens: int | None = None
    """What the client asked; None: the same as ``output_tokens``."""
    arrival_s: float = 0.0
    """Seconds after the start of the run."""
    priority: int = 0
    user: str = ""
    ignore_eos: bool = True
    seed: int = 0
    """Of the synthetic prompt."""
    prefix: tuple[tuple[int, int], ...] = ()
    """(tokens, seed) of the pieces that a synthetic prompt begins with: prompts share the pieces that they have in
    common from the first on."""
    clip: bool = False
    """Whether it is shortened where the model's context is too short for it, instead of being refused."""

    def params(self) -> SamplingParams:
        """Greedy, with the limit that the client asked for."""
        return SamplingParams(max_tokens=self.max_tokens or self.output_tokens, ignore_eos=self.ignore_eos)

    def synthetic_ids(self, vocab_size: int, forbidden: Collection[int] = ()) -> list[int]:
        """The ids of a synthetic prompt. Raises :class:`ShapeError`."""
        assert self.prompt_tokens is not None, "not a synthetic prompt"
        return synthetic_prompt(self.prompt_tokens, vocab_size, self.seed, forbidden, prefix=self.prefix)

    def clipped(self, prompt_length: int, context: int) -> WorkloadRequest:
        """What of it goes into a context of so many tokens; itself where all does, or where it is not to be clipped.

        The prompt gives way first, its end, down to half of the context; the answer takes what is left then.
        """
        if not self.clip or prompt_length + self.output_tokens <= context:
            return self
        kept = min(prompt_length, self.longest_prompt(context))
        output = max(1, min(self.output_tokens, context - kept))
        return dataclasses.replace(
            self,
            output_tokens=output,
            max_tokens=None if self.max_tokens is None else max(output, min(self.max_tokens, context - kept)),
            prompt_tokens=None if self.prompt_tokens is None else kept,
            prompt_token_ids=None if self.prompt_token_ids is None else self.prompt_token_ids[:kept],
        )

    def longest_prompt(self, context: int) -> int:
        """Tokens that a clipped prompt may keep in a context of so many."""
        return max(1, context - self.output_tokens, context // 2)


BYTES_PER_TOKEN = 4
"""Of text whose tokens nobody has counted."""


def estimated_tokens(text: str) -> int:
    """About how many tokens a text is, without a tokeniser; at least 1."""
    return max(1, round(len(text.encode()) / BYTES_PER_TOKEN))


def prompt_length(request: WorkloadRequest) -> int:
    """Tokens of its prompt; 0 of a text, whose tokens only a tokeniser knows."""
    return request.prompt_tokens or len(request.prompt_token_ids or ())


@dataclasses.dataclass(frozen=True, slots=True)
class RowCounts:
    """What became of the rows of a workload file."""

    format: str
    read: int
    rejections: dict[str, int]
    """Reason -> rows that were left out for it."""

    @property
    def rejected(self) -> int:
        return sum(self.rejections.values())

    def sentence(self) -> str:
        """For people: ``1,204 rows of BurstGPT csv, 12 rejected (12 × 0 response tokens: the request failed)``."""
        text = f"{self.read:,} {'row' if self.read == 1 else 'rows'} of {self.format}"
        if not self.rejections:
            return text + ", none rejected"
        commonest = sorted(self.rejections.items(), key=lambda item: -item[1])
        reasons = "; ".join(f"{count:,} × {reason}" for reason, count in commonest)
        return f"{text}, {self.rejected:,} rejected ({reasons})"


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[WorkloadRequest, ...]
    arrivals: Arrivals = dataclasses.field(default_factory=Arrivals)
    rows: RowCounts | None = None
    """Of the file that it came from; None where it was drawn."""

    @property
    def open_loop(self) -> bool:
        """Whether requests have times of their own to arrive at, rather than follow the answers."""
        return any(r.arrival_s > 0 for r in self.requests)

    @property
    def request_rate(self) -> float | str | None:
        """Requests per second; ``inf`` where all come at once; None where a file or a ramp gives the times."""
        if self.arrivals.request_rate is not None and math.isfinite(self.arrivals.request_rate):
            return self.arrivals.request_rate
        return None if self.open_loop else "inf"

    def with_arrivals(self, arrivals: Arrivals, seed: int) -> Workload:
        """The same requests, in the same order, under other arrivals; times of the file stay where no rate is given."""
        requests = self.requests
        if arrivals.has_schedule:
            times = arrival_times(len(requests), arrivals, seed)
            requests = tuple(dataclasses.replace(r, arrival_s=t) for r, t in zip(requests, times, strict=True))
        elif arrivals.request_rate is not None:
            requests = tuple(dataclasses.replace(r, arrival_s=0.0) for r in requests)
        return dataclasses.replace(self, requests=requests, arrivals=arrivals)


# Lines of Batchscope's own files --------------------------------------------------------------------------------------


class Row(msgspec.Struct, forbid_unknown_fields=True):
    output_tokens: int
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    arrival_s: float = 0.0
    priority: int = 0
    user: str = ""
    ignore_eos: bool = True


def _text_fault(line: bytes, error: Exception) -> str:
    """What is wrong with a line that is no row, in the format's own words where they say more than ``error``."""
    if b"\0" in line:
        return "this is not a text file"
    try:
        raw = msgspec.json.decode(line.decode())
    except UnicodeDecodeError:
        return "this is not a text file in UTF-8"
    except msgspec.DecodeError as malformed:
        return str(malformed)
    if isinstance(raw, dict):
        fields = Row.__struct_fields__
        unknown = [name for name in raw if name not in fields]
        if unknown:
            return f"there is no field {unknown[0]!r}; allowed are {', '.join(fields)}"
        if "output_tokens" not in raw:
            return "output_tokens is required: the number of tokens after which the answer ends, at least 1"
    return str(error)


def _row_fault(row: Row) -> str:
    """What is wrong with a line that has the right types; empty if nothing is."""
    given = [name for name in ("prompt", "prompt_token_ids", "prompt_tokens") if getattr(row, name) is not None]
    if len(given) != 1:
        has = " and ".join(given) if given else "none of them"
        return f"needs exactly one of prompt, prompt_token_ids and prompt_tokens; it has {has}"
    if row.prompt == "" or row.prompt_token_ids == []:
        return f"{given[0]} is empty; a prompt has at least 1 token"
    if row.prompt_token_ids and min(row.prompt_token_ids) < 0:
        return f"prompt_token_ids has {min(row.prompt_token_ids)}; ids are 0 or more"
    for name in ("prompt_tokens", "output_tokens", "max_tokens"):
        value = getattr(row, name)
        if value is not None and value < 1:
            return f"{name} is {value}; it must be at least 1"
        if value is not None and value > MAX_NUMBER:
            return f"{name} is {value:,}; it must be at most {MAX_NUMBER:,}"
    if row.max_tokens is not None and row.max_tokens < row.output_tokens:
        return (
            f"max_tokens is {row.max_tokens}, below output_tokens {row.output_tokens}: no answer is longer than asked"
        )
    if not -MAX_NUMBER <= row.priority <= MAX_NUMBER:
        return f"priority is {row.priority:,}; it must be {-MAX_NUMBER:,} to {MAX_NUMBER:,}"
    if not math.isfinite(row.arrival_s) or row.arrival_s < 0:
        return f"arrival_s is {row.arrival_s}; it must be 0 or more seconds"
    return ""


_decoder = msgspec.json.Decoder(Row)


def parse_row(line: bytes, where: str, seed: int, index: int) -> WorkloadRequest:
    """A request from its line. Raises :class:`WorkloadError` with ``where`` and the fault."""
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{where}: {_text_fault(line, error)}") from error
    fault = _row_fault(row)
    if fault:
        raise WorkloadError(f"{where}: {fault}")
    return WorkloadRequest(
        output_tokens=row.output_tokens,
        prompt=row.prompt,
        prompt_token_ids=None if row.prompt_token_ids is None else tuple(row.prompt_token_ids),
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.max_tokens,
        arrival_s=row.arrival_s,
        priority=row.priority,
        user=row.user,
        ignore_eos=row.ignore_eos,
        seed=request_seed(seed, index),
    )


def request_seed(seed: int, index: int) -> int:
    return seed * MAX_REQUESTS + index


def with_seed(workload: Workload, seed: int) -> Workload:
    """The same requests with other synthetic prompts: as equal among themselves, equal to none of another seed."""
    requests = tuple(
        dataclasses.replace(
            request,
            seed=request_seed(seed, index),
            prefix=tuple((tokens, _mixed(piece, seed)) for tokens, piece in request.prefix),
        )
        for index, request in enumerate(workload.requests)
    )
    return dataclasses.replace(workload, requests=requests)


def _mixed(piece: int, seed: int) -> int:
    """Within 64 bits; different for different pieces of one seed, and for different seeds of one piece."""
    return (1 << 62) + (piece + (seed + 1) * 1_000_003) % (1 << 62)

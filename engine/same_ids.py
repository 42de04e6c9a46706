"""Whether two runs gave the same answers: equal ids, or a difference where the model itself was of two minds.

Greedy answers do not depend on the batch but for rounding. Where two tokens are all but equally likely, rounding
decides, and everything behind follows from the choice::

    reference   a b c d e f g           at d the two likeliest logits of the reference lie within 1e-4: a near tie
    other       a b c x y z w           else the answers are different
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import SchedulerConfig
from engine.request import SamplingParams

if TYPE_CHECKING:
    from engine.loader import LoadedEngine

NEAR_TIE = 1e-4
"""Between the two highest logits."""

Gaps = Callable[[list[list[int]]], "list[float | None]"]
"""For each prefix, the gap between the two highest logits of the token behind it; None: not to be had."""


@dataclass(frozen=True, slots=True)
class Sameness:
    """How many answers agree with the reference's."""

    same: int = 0
    near_ties: int = 0
    """Differ only from a token on where the reference's two highest logits lie within ``NEAR_TIE``."""
    different: int = 0
    not_compared: int = 0
    """Not completed in both runs."""

    def __add__(self, other: Sameness) -> Sameness:
        return Sameness(
            self.same + other.same,
            self.near_ties + other.near_ties,
            self.different + other.different,
            self.not_compared + other.not_compared,
        )


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, an end included; None where there is none."""
    for index, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def compare_ids(
    prompts: Sequence[list[int]],
    reference: Sequence[list[int] | None],
    other: Sequence[list[int] | None],
    gaps: Gaps,
) -> Sameness:
    """Compare answers in order of the workload; None: not completed."""
    same = not_compared = 0
    prefixes: list[list[int]] = []
    for prompt, expected, got in zip(prompts, reference, other, strict=True):
        if expected is None or got is None:
            not_compared += 1
            continue
        index = first_difference(expected, got)
        if index is None:
            same += 1
        else:
            prefixes.append(prompt + expected[:index])
    measured = gaps(prefixes) if prefixes else []
    near = sum(gap is not None and gap <= NEAR_TIE for gap in measured)
    return Sameness(same, near, len(prefixes) - near, not_compared)


def top_two_gaps(loaded: LoadedEngine, prefixes: list[list[int]]) -> list[float | None]:
    """Run each prefix through the model once, on a core of its own; the cores before it must be done.

    Log-probabilities are the logits less one constant a row, so their differences are those of the logits.
    """
    core = loaded.fresh_core(SchedulerConfig(), prefix_cache=False)
    for number, prefix in enumerate(prefixes):
        core.add_request(
            number, prefix, SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True), ends_after=1, stream_text=False
        )
    found: list[float | None] = [None] * len(prefixes)
    while core.has_work:
        for output in core.step().outputs:
            for report in output.logprobs:
                highest = sorted((value for _, value in report.top), reverse=True)
                found[output.request_id] = highest[0] - highest[1]
    return found

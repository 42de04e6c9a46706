"""Who drafts tokens for a step to check, and why drafts change nothing but the time.

A row that decodes may bring k drafts d1 … dk. The model computes its last token and the drafts in one step, and at each
of these 1 + k positions a token is drawn just as decoding without drafts would draw it were the drafts before it the
answer::

    computed         x    d1   d2   d3        x: the request's last token
    drawn            t0   t1   t2   t3
    t0 = d1, t1 = d2, t2 ≠ d3: the answer goes on with t0 t1 t2; d3 was wrong, so t3 answers a question nobody asked

A draft counts where it *equals* the token that was drawn in its place. That is lossless, for greedy and for sampled
requests: a draw is a function of (logits, seed, position) alone, t0 depends on no draft, and tj is looked at only where
d1 … dj are t0 … t(j-1). So by induction the answer is, token by token, the one without drafts, and its distribution is
the model's own. Nothing is asked of the drafts: they may be drawn by the same randomness.

Accepting and resampling by the ratio of probabilities (Leviathan, Kalman and Matias, "Fast inference from transformers
via speculative decoding", ICML '23) keeps the distribution too and accepts a sampled draft as often as any rule can,
but then the answer depends on who drafts. Where a draft model draws from the same (seed, position), tokens are often
equal all the same, and always where both distributions are (Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.config import SPECULATION_NGRAM
from engine.request import Request
from engine.scheduling.plan import SchedulerOutput

LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2
"""One token alone occurs too often to say what follows."""


class Proposer(Protocol):
    name: str
    """As :attr:`engine.config.SchedulerConfig.speculative` names it."""

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        """Called once a step, before the model computes it and after its own blocks have moved: the drafts of each row,
        at most ``output.draft_limits`` of them, or an empty list where no row has any."""

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        """Called after a step with drafts: what its rows gave. Row i accepted ``len(token_ids[i]) - 1`` of them."""


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the drafts, from the first on, equal the tokens ``drawn`` in their places."""
    for index, draft in enumerate(drafts):
        if drawn[index] != draft:
            return index
    return len(drafts)


class NgramProposer:
    """Prompt lookup (Saxena, "Prompt lookup decoding", 2023): what the last tokens were followed by when they occurred
    before, in the request's own prompt and answer. The longest of 4 to 2 last tokens that occurred decide, and their
    latest occurrence. Costs no computation of a model; pays where answers quote, repeat or edit.

    Keeps an index for each request it was asked about; a step adds its new tokens. An index goes when its request does.
    """

    name = SPECULATION_NGRAM

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        if not output.draft_limits:
            return []
        drafts = [
            self._draft(request, limit) if limit else []
            for request, limit in zip(output.requests, output.draft_limits, strict=True)
        ]
        return drafts if any(drafts) else []

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        """Nothing is kept of drafts: what was accepted is among the request's tokens from now on."""

    def _draft(self, request: Request, limit: int) -> list[int]:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _NgramIndex()
        return index.continuation(request.token_ids, limit)


class _NgramIndex:
    """Of one list of tokens that only grows."""

    __slots__ = ("_follower", "_num_indexed")

    def __init__(self) -> None:
        self._follower: dict[tuple[int, ...], int] = {}
        """n-gram → index of the token behind its latest occurrence."""
        self._num_indexed = 0
        """Tokens known as somebody's follower."""

    def continuation(self, tokens: list[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that might follow ``tokens``."""
        self._extend(tokens)
        length = len(tokens)
        for size in range(min(LONGEST_NGRAM, length - 1), SHORTEST_NGRAM - 1, -1):
            begin = self._follower.get(tuple(tokens[length - size :]))
            if begin is not None:
                # Where the copy reaches the end of the tokens it goes on with itself: a loop is drafted round by round.
                period = length - begin
                return [tokens[begin + i % period] for i in range(limit)]
        return []

    def _extend(self, tokens: list[int]) -> None:
        follower = self._follower
        for index in range(self._num_indexed, len(tokens)):
            for size in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, index) + 1):
                follower[tuple(tokens[index - size : index])] = index
        self._num_indexed = len(tokens)

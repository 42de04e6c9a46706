"""Where a comparison is, in words, and how long the rest of it may take. Qt-free."""

from __future__ import annotations

from dataclasses import dataclass

from app.translation import tr
from app.words import count, seconds_label
from engine.messages import CompareProgress

LEAST_SECONDS, LEAST_SHARE = 3.0, 0.03
"""A guess of the rest is made once so much of it is over."""


def progress_sentence(progress: CompareProgress) -> str:
    """``run 2 of 6: vllm, seed 1 · 14 of 96 requests``"""
    if progress.run < 0:
        left = progress.requests - progress.completed
        return (
            tr("It waits for {answers} to end.", answers=count(left, "answer")) if left else tr("It is about to begin.")
        )
    seed = "" if progress.seed is None else tr(", seed {seed}", seed=progress.seed)
    doing = (
        tr("warming up")
        if progress.warming_up
        else tr("{completed:,} of {requests:,} requests", completed=progress.completed, requests=progress.requests)
    )
    return tr(
        "run {run:,} of {runs:,}: {name}{seed} · {doing}",
        run=progress.run + 1,
        runs=progress.runs,
        name=progress.name,
        seed=seed,
        doing=doing,
    )


def progress_share(progress: CompareProgress) -> float:
    """How much of all runs is over, 0 to 1: runs, and the requests of the one in progress."""
    if progress.run < 0 or not progress.runs:
        return 0.0
    within = 0.0 if progress.warming_up or not progress.requests else progress.completed / progress.requests
    return min(1.0, (progress.run + within) / progress.runs)


@dataclass(slots=True)
class CompareClock:
    """Guesses the rest from what has passed. Instants in seconds of any one clock."""

    begun: float | None = None

    def left(self, progress: CompareProgress, now: float) -> str:
        """``about 40 s left``; empty while nothing can be said."""
        if progress.run < 0:
            return ""
        if self.begun is None:
            self.begun = now
        share, passed = progress_share(progress), now - self.begun
        if share < LEAST_SHARE or passed < LEAST_SECONDS or share >= 1.0:
            return ""
        return tr("about {passed} left", passed=seconds_label(passed * (1 - share) / share))

"""The scheduler's knobs while it runs: their values as text, what is in force, asked, and to be undone. Qt-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from app.knob_words import KNOBS as CHOICES
from app.knob_words import NAMES, value_text
from app.scope.changes import as_it_runs, differing
from app.translation import tr
from engine.config import SPECULATION_OFF, STATIC_DELIVERIES, ConfigError, SchedulerConfig

if TYPE_CHECKING:
    from app.scope.panel import ScopeSource

Kind = Literal["choice", "switch", "whole", "decimal"]
ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class Knob:
    field: str
    """Of :class:`SchedulerConfig`."""
    kind: Kind
    tip: str
    values: tuple[str, ...] = ()
    """Of a choice."""
    optional: bool = False
    """Whether it may be left empty."""
    shown: Callable[[SchedulerConfig], bool] = lambda config: True
    """Whether it does anything beside the other knobs."""

    @property
    def name(self) -> str:
        return NAMES[self.field]


def _choice(field: str) -> Knob:
    tip, values = CHOICES[field]
    return Knob(field, "choice", tip, values)


KNOBS: tuple[Knob, ...] = (
    _choice("discipline"),
    _choice("order"),
    Knob(
        "ageing",
        "decimal",
        tr("Seconds of waiting that outweigh one level of priority; empty: priorities are strict"),
        optional=True,
        shown=lambda config: config.order == "priority",
    ),
    _choice("preemption"),
    Knob("max_num_seqs", "whole", tr("Most requests running at once")),
    Knob("max_num_batched_tokens", "whole", tr("Token budget of a step; empty: as measured at load"), optional=True),
    Knob("chunked_prefill", "switch", tr("Whether a prompt may be computed over several steps, beside decodes")),
    Knob(
        "chunk_size",
        "whole",
        tr("Most tokens of one prompt in one step; empty: as many as the budget leaves"),
        optional=True,
        shown=lambda config: config.chunked_prefill,
    ),
    Knob("watermark", "decimal", tr("Share of the pool that admission leaves free for running requests, 0 to 1")),
    Knob(
        "speculative",
        "choice",
        tr("Whether tokens are drafted, then checked together; who drafts was loaded at the start"),
    ),
    Knob(
        "draft_tokens",
        "whole",
        tr("Most tokens drafted for a request in one step"),
        shown=lambda config: config.speculative != SPECULATION_OFF,
    ),
    Knob(
        "static_delivery",
        "choice",
        tr("Answers are handed out when the batch ends, or each row as it is made"),
        STATIC_DELIVERIES,
        shown=lambda config: config.discipline == "static",
    ),
    Knob(
        "waiting_served_ratio",
        "decimal",
        tr("Waiting requests join once they number at least this share of the running ones"),
        shown=lambda config: config.discipline == "tgi",
    ),
    Knob(
        "max_waiting_tokens",
        "whole",
        tr("Decode steps after which waiting requests join whatever their number"),
        shown=lambda config: config.discipline == "tgi",
    ),
)


def parse(knob: Knob, text: str) -> Any:
    """The value that a text means. ConfigError where it is none."""
    plain = text.strip().replace(",", "").replace("_", "")
    if not plain:
        if knob.optional:
            return None
        raise ConfigError(tr("{name} is empty; it needs a number", name=knob.name))
    try:
        value = int(plain) if knob.kind == "whole" else float(plain)
        finite = math.isfinite(value)
    except (ValueError, OverflowError):
        what = tr("a whole number") if knob.kind == "whole" else tr("a number")
        raise ConfigError(
            tr("{name} is {typed!r}; it must be {what}", name=knob.name, typed=text.strip(), what=what)
        ) from None
    if not finite:
        raise ConfigError(tr("{name} is {typed!r}; it must be a number", name=knob.name, typed=text.strip()))
    return value


def with_value(config: SchedulerConfig, knob: Knob, value: Any) -> SchedulerConfig:
    """``config`` with another value. ConfigError where it cannot have that."""
    return replace(config, **{knob.field: value})


def nudged(knob: Knob, value: float | None, up: bool) -> Any:
    """The next value that the arrow keys choose: of a number of things twice or half, of a share a hundredth more or
    less, of seconds one."""
    if knob.kind == "whole":
        return max(1, (value or 1) * 2 if up else int(value or 1) // 2)
    step = 1.0 if knob.field == "ageing" else 0.05 if knob.field == "waiting_served_ratio" else 0.01
    return round(max(step if knob.optional else 0.0, (value or 0.0) + (step if up else -step)), 6)


def field_text(knob: Knob, value: Any) -> str:
    """What stands in a knob's field; without a value nothing does."""
    return "" if value is None else value_text(knob.field, value)


@dataclass(frozen=True, slots=True)
class Undo:
    """The way back from the last change."""

    text: str
    config: SchedulerConfig


class Knobs:
    """What is in force, what is asked and what it was before, worked out from the source each time."""

    def __init__(self, source: ScopeSource) -> None:
        self._source = source

    @property
    def in_force(self) -> SchedulerConfig:
        """Of the step that is shown; without an engine what the next one starts with."""
        state = self._source.state
        if state.scheduler is None or not (self._source.live or self._source.moment is not None):
            return self._source.scheduler
        return as_it_runs(state.scheduler, state.discipline)

    @property
    def asked(self) -> SchedulerConfig:
        """What is in force, or will be: after the next step or, a discipline, once the batch has drained."""
        return self._source.scheduler if self._source.moment is None else self.in_force

    @property
    def pending(self) -> list[str]:
        """The fields that are asked and not yet in force."""
        return differing(self.in_force, self.asked)

    @property
    def can_change(self) -> bool:
        """Whether there is an engine, and what is shown is its newest step."""
        return self._source.live and self._source.moment is None and self._source.state.num_blocks > 0

    def drafters(self) -> tuple[str, ...]:
        """Values of ``speculative``: off, and who was loaded with the model."""
        loaded = {self._source.history.changes.speculation, self.asked.speculative} - {SPECULATION_OFF}
        return (SPECULATION_OFF, *sorted(loaded))

    def pending_text(self, knob: Knob) -> str:
        """What is in force of a knob that is to change; empty where it is not."""
        if knob.field not in self.pending:
            return ""
        value = value_text(knob.field, getattr(self.in_force, knob.field))
        return (
            tr("{value} until the batch has drained", value=value)
            if knob.field == "discipline"
            else tr("{value} until the next step", value=value)
        )

    def undo(self) -> Undo | None:
        """Takes back what is asked for but not in force, or the last change; None without one."""
        if self.pending:
            return _undo(self.asked, self.in_force)
        changes = self._source.history.changes.between(-math.inf, self._source.now)
        if not changes:
            return None
        last = changes[-1]
        values = {field: getattr(last.before, field) for field in differing(last.before, last.after)}
        return _undo(self.asked, replace(self.asked, **values))


def _undo(now: SchedulerConfig, back: SchedulerConfig) -> Undo | None:
    fields = differing(now, back)
    if not fields:
        return None
    first = fields[0]
    more = tr(" and {fields} more", fields=len(fields) - 1) if len(fields) > 1 else ""
    return Undo(
        tr(
            "Back to {names} {value_text}{more}",
            names=NAMES[first],
            value_text=value_text(first, getattr(back, first)),
            more=more,
        ),
        back,
    )

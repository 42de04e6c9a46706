"""What is left for a core between two steps, in order, for the next step to take up."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Addition:
    request: Request


@dataclass(frozen=True, slots=True)
class Refusal:
    request_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Abortion:
    request_id: int


@dataclass(frozen=True, slots=True)
class Ranking:
    request_id: int
    priority: int


@dataclass(frozen=True, slots=True)
class Change:
    scheduler: SchedulerConfig


Note = Addition | Refusal | Abortion | Ranking | Change

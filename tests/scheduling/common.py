"""Short words that the tests of the disciplines have in common."""

from __future__ import annotations

from engine.events import Admitted, Deferred
from engine.request import SamplingParams
from tests.oracles import EngineProbe, cold_answer


def plan_of(probe: EngineProbe) -> dict[int, int]:
    """Request id → tokens of the last step."""
    record = probe.records[-1]
    return dict(zip(record.request_ids, record.num_tokens, strict=True))


def tokens(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def assert_answer(probe: EngineProbe, request_id: int, prompt: list[int], length: int) -> None:
    assert probe.answers[request_id].token_ids == cold_answer(prompt, length)


def deferred_reasons(probe: EngineProbe) -> list[str]:
    return [event.reason for event in probe.of(Deferred)]


def admitted_order(probe: EngineProbe) -> list[int]:
    return [event.request_id for event in probe.of(Admitted)]

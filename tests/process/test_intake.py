"""What the engine adds to a request before the scheduler sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.intake import Intake
from engine.messages import AddRequest, ChatMessage, ContextCut, CountTokens
from engine.request import SamplingParams

HI = [ChatMessage("user", "hi")]


class LetterCodec:
    special_ids = frozenset[int]()
    chat_stops = ("\nUser:",)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: list[ChatMessage], continues: bool = False) -> list[int]:
        return self.encode("".join(message.content for message in messages))


class Core:
    def __init__(self) -> None:
        self.added: dict[int, tuple[list[int], SamplingParams]] = {}
        self.refused: dict[int, str] = {}

    def add_request(self, request_id: int, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        self.added[request_id] = prompt, params

    def reject(self, request_id: int, message: str) -> None:
        self.refused[request_id] = message


@pytest.fixture
def said() -> list[ContextCut]:
    return []


@pytest.fixture
def intake(said: list[ContextCut]) -> Intake:
    info = SimpleNamespace(vocab_size=500, max_model_len=4000, num_blocks=10, block_size=16)
    return Intake(LetterCodec(), info, said.append)  # type: ignore[arg-type]


def test_stops_of_the_plain_format_go_with_conversations_alone(intake: Intake) -> None:
    core: Any = Core()
    params = SamplingParams(stop=("END",), max_tokens=7)
    intake.add(core, AddRequest(1, params, messages=HI))
    intake.add(core, AddRequest(2, params, prompt="hi"))
    intake.add(core, AddRequest(3, SamplingParams(min_tokens=2000), messages=HI))
    assert core.added[1][1].stop == ("END", "\nUser:")
    assert core.added[2][1].stop == ("END",)
    assert [core.added[number][1].max_tokens for number in (1, 3)] == [7, 2000]


def test_the_context_is_what_model_and_pool_have_room_for(intake: Intake, said: list[ContextCut]) -> None:
    """Here the pool's 160 tokens, and the last token, whose keys are never needed."""
    core: Any = Core()
    told = [ChatMessage("user" if n % 2 == 0 else "assistant", "x" * 50) for n in range(5)]
    intake.add(core, AddRequest(1, SamplingParams(max_tokens=10), told, drop_oldest=True))
    intake.add(core, AddRequest(2, SamplingParams(max_tokens=10), told))
    assert said == [ContextCut(1, 2, 150)]
    assert len(core.added[1][0]) == 150
    assert "The conversation is 250 tokens; the context holds 161" in core.refused[2]
    count = intake.count_tokens(CountTokens(9, told, max_tokens=10))
    assert (count.tokens, count.dropped_messages, count.kept_tokens) == (250, 2, 150)


def test_whatever_a_template_throws_costs_one_answer(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*told: Any) -> list[int]:
        raise ZeroDivisionError("in the template")

    monkeypatch.setattr(LetterCodec, "encode_chat", fail)
    core: Any = Core()
    intake.add(core, AddRequest(1, SamplingParams(), messages=HI))
    assert "in the template" in core.refused[1]
    assert "in the template" in intake.count_tokens(CountTokens(1, HI)).error

"""What is left out of a conversation that is too long for the model, and what is said where that is not allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fitting import answer_room, count_chat, fit_request
from engine.messages import AddRequest, ChatMessage, CountTokens
from engine.request import RequestError, SamplingParams

TURN = 10


class Letters:
    """A token a letter and ten for each message; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[ChatMessage]] = []

    def __call__(self, messages: Sequence[ChatMessage], continues: bool) -> list[int]:
        self.asked.append(list(messages))
        return [ord(letter) for message in messages for letter in message.content + "." * TURN]


def conversation(*lengths: int, system: int = 0) -> list[ChatMessage]:
    told = [ChatMessage("user" if n % 2 == 0 else "assistant", "x" * length) for n, length in enumerate(lengths)]
    return [ChatMessage("system", "s" * system), *told] if system else told


def request(messages: list[ChatMessage], max_tokens: int | None = 20, **options: bool) -> AddRequest:
    return AddRequest(1, SamplingParams(max_tokens=max_tokens), messages, **options)


def length_of(messages: Sequence[ChatMessage]) -> int:
    return sum(len(message.content) + TURN for message in messages)


@pytest.mark.parametrize(("asked", "context", "room"), [(20, 1000, 20), (None, 1000, 250), (None, 8192, 1024)])
def test_room_for_the_answer(asked: int | None, context: int, room: int) -> None:
    assert answer_room(asked, context) == room


def test_what_fits_is_left_whole_and_made_once() -> None:
    encode = Letters()
    fitted = fit_request(request(conversation(30, 30, 30), drop_oldest=True), encode, 140)
    assert (fitted.dropped_messages, fitted.tokens, len(fitted.prompt_token_ids)) == (0, 120, 120)
    assert len(encode.asked) == 1


def test_whole_exchanges_go_and_the_system_prompt_stays() -> None:
    encode = Letters()
    messages = conversation(30, 30, 30, 30, 30, system=5)
    fitted = fit_request(request(messages, drop_oldest=True), encode, 160)
    assert (fitted.dropped_messages, fitted.tokens, len(fitted.prompt_token_ids)) == (2, 215, 135)
    assert [messages[0], *messages[3:]] in encode.asked


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=31),
    system=st.integers(0, 20),
    context=st.integers(40, 600),
    continues=st.booleans(),
)
def test_as_little_as_possible_is_left_out(lengths: list[int], system: int, context: int, continues: bool) -> None:
    if len(lengths) % 2 == continues:
        lengths = [*lengths, 3]
    messages = conversation(*lengths, system=system)
    head, told = (messages[:1], messages[1:]) if system else ([], messages)
    limit = context - answer_room(20, context)
    cuts = range(0, len(told), 2)  # each begins with a user's message; the last is the last such message
    enough = [cut for cut in cuts if length_of([*head, *told[cut:]]) <= limit]
    encode = Letters()
    command = request(messages, drop_oldest=True, continues=continues)
    if not enough:
        alone = length_of([*head, *told[cuts[-1] :]])
        with pytest.raises(RequestError, match=rf"is {alone:,} tokens; the context holds {context:,}"):
            fit_request(command, encode, context)
    else:
        fitted = fit_request(command, encode, context)
        assert fitted.dropped_messages == enough[0]
        assert len(fitted.prompt_token_ids) == length_of([*head, *told[enough[0] :]])
    assert len(encode.asked) <= 2 + len(told).bit_length()
    count = count_chat(CountTokens(7, messages, continues, 20), Letters(), context)
    assert (count.query_id, count.tokens, count.error) == (7, length_of(messages), "")
    assert count.dropped_messages == (enough[0] if enough else cuts[-1])
    assert count.kept_tokens == length_of([*head, *told[count.dropped_messages :]])


def test_an_answer_that_goes_on_keeps_its_question() -> None:
    messages = conversation(30, 30, 30, 30)
    fitted = fit_request(request(messages, drop_oldest=True, continues=True), Letters(), 120)
    assert fitted.dropped_messages == 2


def test_nothing_is_left_out_where_that_is_not_allowed() -> None:
    encode = Letters()
    said = "The conversation is 200 tokens; the context holds 200, answer included."
    with pytest.raises(RequestError, match=re.escape(said)):
        fit_request(request(conversation(*[30] * 5)), encode, 200)
    assert len(encode.asked) == 1
    assert len(fit_request(request(conversation(*[30] * 5)), encode, 201).prompt_token_ids) == 200


def test_counting_says_why_a_conversation_cannot_be_a_prompt() -> None:
    def refuse(messages: Sequence[ChatMessage], continues: bool) -> list[int]:
        raise RequestError("not with me")

    assert count_chat(CountTokens(3, conversation(1)), refuse, 100).error == "not with me"

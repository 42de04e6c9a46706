"""The model of conversations: turns, stops, timings, and what the engine is told."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from app.chat.conversation import (
    AnswerTimings,
    ChatError,
    Conversation,
    Conversations,
    Message,
    MessageStatus,
    Role,
    title_of,
)
from engine.messages import Output


def make() -> tuple[Conversations, Conversation]:
    conversations = Conversations()
    return conversations, conversations.add(Conversation())


def send(conversations: Conversations, conversation: Conversation, text: str, request_id: int) -> Message:
    answer = conversations.send(conversation, text).answer
    conversations.handed_over(conversation, answer, request_id, sent=0.0)
    return answer


def output(request_id: int, text: str, *, at: float = 1.0, tokens: int = 1, finish: str | None = None) -> Output:
    return Output(request_id, at, [0] * tokens, text, finish_reason=finish, prompt_tokens=7, cached_tokens=4)


def test_an_answer_streams_and_completes():
    conversations, conversation = make()
    answer = send(conversations, conversation, "hello", 1)
    conversations.apply(output(1, "Hi"))
    assert answer.text == "Hi" and answer.status is MessageStatus.STREAMING
    conversations.apply(output(1, " there", finish="stop"))
    assert answer.text == "Hi there" and answer.status is MessageStatus.COMPLETE
    assert (answer.timings.prompt_tokens, answer.timings.cached_tokens) == (7, 4)
    assert conversations.apply(output(1, "too late")) is None


def test_several_conversations_answer_at_once_and_keep_apart():
    conversations, first = make()
    second = conversations.add(Conversation())
    one, two = send(conversations, first, "one", 1), send(conversations, second, "two", 2)
    for piece in "abc":
        conversations.apply(output(2, piece.upper()))
        conversations.apply(output(1, piece))
    assert (one.text, two.text) == ("abc", "ABC")


def test_stop_and_send_fifty_times_sends_only_what_was_seen():
    """The stopped request's late outputs must not reach the text, the screen or the next prompt."""
    conversations, conversation = make()
    seen = []
    for number in range(1, 51):
        answer = send(conversations, conversation, f"question {number}", number)
        conversations.apply(output(number, f"part {number}"))
        stopped = conversations.stop(conversation)
        assert stopped == (answer, number)
        conversations.apply(output(number, " zombie"))
        conversations.apply(output(number, " zombie", finish="abort"))
        seen += [("user", f"question {number}"), ("assistant", f"part {number}")]
        assert [(m.role, m.content) for m in conversation.context()] == seen


def test_an_answer_without_text_joins_the_questions_around_it():
    conversations, conversation = make()
    send(conversations, conversation, "first", 1)
    conversations.stop(conversation)
    send(conversations, conversation, "second", 2)
    assert [(m.role, m.content) for m in conversation.context()] == [("user", "first\n\nsecond")]


def test_the_system_prompt_comes_first_and_only_if_it_says_something():
    conversations, conversation = make()
    conversation.system_prompt = "  \n"
    send(conversations, conversation, "hello", 1)
    assert [m.role for m in conversation.context()] == ["user"]
    conversation.system_prompt = "Be brief."
    assert [(m.role, m.content) for m in conversation.context()] == [("system", "Be brief."), ("user", "hello")]


def test_regenerate_replaces_the_last_answer_and_leaves_it_out_of_the_prompt():
    conversations, conversation = make()
    old = send(conversations, conversation, "hello", 1)
    conversations.apply(output(1, "bad", finish="stop"))
    turn, replaced = conversations.regenerate(conversation)
    assert replaced is old and turn.answer is not old and len(conversation.turns) == 1
    assert [(m.role, m.content) for m in conversation.context()] == [("user", "hello")]


def test_what_cannot_be_done_is_refused_and_changes_nothing():
    conversations, conversation = make()
    for attempt in (lambda: conversations.send(conversation, " \n"), lambda: conversations.regenerate(conversation)):
        with pytest.raises(ChatError):
            attempt()
    answer = send(conversations, conversation, "hello", 1)
    for attempt in (
        lambda: conversations.send(conversation, "again"),
        lambda: conversations.regenerate(conversation),
        lambda: conversations.delete_turn(conversation, answer.id),
    ):
        with pytest.raises(ChatError):
            attempt()
    assert conversation.messages[1] is answer and len(conversation.turns) == 1


def test_a_dead_engine_marks_open_answers_and_keeps_their_text():
    conversations, conversation = make()
    answer = send(conversations, conversation, "hello", 1)
    conversations.apply(output(1, "half an ans"))
    waiting = conversations.add(Conversation())
    conversations.send(waiting, "queued")
    assert len(conversations.engine_gone("It died.", queued=False)) == 1
    assert (answer.text, answer.status, answer.error) == ("half an ans", MessageStatus.INCOMPLETE, "It died.")
    assert waiting.open_answer is not None
    conversations.engine_gone("It died.", queued=True)
    assert waiting.open_answer is None
    send(conversations, conversation, "go on", 2)
    assert [m.role for m in conversation.context()] == ["user", "assistant", "user"]


def test_timings_follow_their_definition():
    timings = AnswerTimings(sent=10.0)
    timings.count(1, 10.5)
    assert timings.ttft == 0.5 and timings.tokens_per_second is None
    timings.count(2, 11.0)
    timings.count(0, 99.0)
    timings.count(2, 12.5)
    assert timings.tokens == 5
    assert timings.tokens_per_second == (5 - 1) / (12.5 - 10.5)


def test_titles_are_cut_between_words():
    assert title_of("\n  Short one \n more") == "Short one"
    long = title_of("word " * 30)
    assert len(long) <= 49 and long.endswith("word…")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["send", "text", "finish", "stop", "regenerate", "delete", "restore", "die", "empty"]),
        st.integers(0, 1),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_roles_alternate_whatever_is_done(actions):
    """After every action the prompt begins with a user message, alternates, and holds exactly the shown texts."""
    conversations = Conversations()
    pair = [conversations.add(Conversation()) for _ in range(2)]
    removed: list[list] = [[], []]
    next_request = 1
    for action, which, pick in actions:
        conversation = pair[which]
        try:
            if action in ("send", "regenerate"):
                if action == "send":
                    conversations.send(conversation, f"question {next_request}")
                else:
                    conversations.regenerate(conversation)
                conversations.handed_over(conversation, conversation.open_answer, next_request, sent=0.0)
                next_request += 1
            elif action in ("text", "finish", "empty") and conversation.open_answer is not None:
                text = "" if action == "empty" else f" piece {pick}"
                finish = None if action == "text" else "stop"
                conversations.apply(output(conversation.open_answer.request_id, text, finish=finish))
            elif action == "stop":
                conversations.stop(conversation)
            elif action == "delete" and conversation.messages:
                messages = conversation.messages
                removed[which].append(conversations.delete_turn(conversation, messages[pick % len(messages)].id))
            elif action == "restore" and removed[which]:
                conversations.restore_turn(conversation, removed[which].pop())
            elif action == "die":
                conversations.engine_gone("It died.", queued=True)
        except ChatError:
            pass
        check_prompt(conversation)


def check_prompt(conversation: Conversation) -> None:
    context = conversation.context()
    expected = ["user", "assistant"] * len(context)
    assert [message.role for message in context] == expected[: len(context)]
    shown = [m.text for m in conversation.messages if m.text and not m.status.is_open]
    sent = [part for message in context for part in message.content.split("\n\n")]
    assert sent == shown
    assert [m.role for turn in conversation.turns for m in turn.messages][::2] == [Role.USER] * len(conversation.turns)
    numbers = [turn.number for turn in conversation.turns]
    assert numbers == sorted(set(numbers))

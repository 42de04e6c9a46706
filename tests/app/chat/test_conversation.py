"""The model of conversations: branches, stops, timings, and what the engine is told."""

from __future__ import annotations

import pytest

from app.chat.conversation import AnswerTimings, ChatError, Conversation, Message, MessageStatus, Role, title_of
from app.chat.conversations import Conversations
from app.chat.mending import mended_tree
from app.chat.tree import MessageTree
from engine.messages import ContextCut, Output


def make() -> tuple[Conversations, Conversation]:
    conversations = Conversations()
    return conversations, conversations.add(Conversation())


def send(conversations: Conversations, conversation: Conversation, text: str, request_id: int) -> Message:
    _, answer = conversations.send(conversation, text)
    conversations.handed_over(conversation, answer, request_id, sent=0.0)
    return answer


def output(request_id: int, text: str, *, at: float = 1.0, tokens: int = 1, finish: str | None = None) -> Output:
    return Output(request_id, at, [0] * tokens, text, finish_reason=finish, prompt_tokens=7, cached_tokens=4)


def told(conversations: Conversations, conversation: Conversation, *texts: str) -> None:
    """Questions and answers in turn, each complete."""
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        _, message = conversations.send(conversation, question)
        conversations.handed_over(conversation, message, hash(answer), sent=0.0)
        conversations.apply(output(hash(answer), answer, finish="stop"))


def shown(conversation: Conversation) -> list[str]:
    return [message.text for message in conversation.path]


def context(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.context()]


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
        assert context(conversation) == seen


def test_an_answer_without_text_joins_the_questions_around_it():
    conversations, conversation = make()
    send(conversations, conversation, "first", 1)
    conversations.stop(conversation)
    send(conversations, conversation, "second", 2)
    assert context(conversation) == [("user", "first\n\nsecond")]


def test_the_system_prompt_comes_first_and_only_if_it_says_something():
    conversations, conversation = make()
    conversation.system_prompt = "  \n"
    send(conversations, conversation, "hello", 1)
    assert [m.role for m in conversation.context()] == ["user"]
    conversation.system_prompt = "Be brief."
    assert context(conversation) == [("system", "Be brief."), ("user", "hello")]


def test_what_cannot_be_done_is_refused_and_changes_nothing():
    conversations, conversation = make()
    attempts = (
        lambda: conversations.send(conversation, " \n"),
        lambda: conversations.regenerate(conversation),
        lambda: conversations.continue_answer(conversation),
    )
    for attempt in attempts:
        with pytest.raises(ChatError):
            attempt()
    told(conversations, conversation, "one", "two")
    question, answer = conversation.path
    for attempt in (
        lambda: conversations.continue_answer(conversation),
        lambda: conversations.resend(conversation, answer.id, "not mine"),
        lambda: conversations.resend(conversation, question.id, "  "),
        lambda: conversations.delete_message(conversation, "nobody"),
        lambda: conversations.show_version(conversation, "nobody"),
    ):
        with pytest.raises(ChatError):
            attempt()
    open_answer = send(conversations, conversation, "hello", 1)
    for attempt in (
        lambda: conversations.send(conversation, "again"),
        lambda: conversations.regenerate(conversation),
        lambda: conversations.regenerate(conversation, answer.id),
        lambda: conversations.resend(conversation, question.id, "other"),
        lambda: conversations.continue_answer(conversation),
        lambda: conversations.delete_message(conversation, open_answer.id),
    ):
        with pytest.raises(ChatError):
            attempt()
    assert shown(conversation) == ["one", "two", "hello", ""] and conversation.num_messages == 4


# Branches ------------------------------------------------------------------------------------------------------------


def test_regenerating_keeps_the_first_answer_as_a_version_and_leaves_it_out_of_the_prompt():
    conversations, conversation = make()
    old = send(conversations, conversation, "hello", 1)
    conversations.apply(output(1, "bad", finish="stop"))
    answer = conversations.regenerate(conversation)
    assert conversation.versions(answer.id) == [old, answer] and conversation.path[1] is answer
    assert context(conversation) == [("user", "hello")]


def test_an_answer_in_the_middle_is_regenerated_and_what_followed_stays_with_its_version():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two", "three", "four")
    first = conversation.path[1]
    again = conversations.regenerate(conversation, first.id)
    assert shown(conversation) == ["one", ""] and context(conversation) == [("user", "one")]
    conversations.show_version(conversation, first.id)
    assert shown(conversation) == ["one", "two", "three", "four"]
    conversations.show_version(conversation, again.id)
    assert shown(conversation) == ["one", ""]


def test_an_edited_question_is_a_version_and_each_remembers_what_was_seen_below_it():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two", "three", "four")
    old = conversation.path[2]
    question, answer = conversations.resend(conversation, old.id, "drei\n")
    conversations.handed_over(conversation, answer, 1, sent=0.0)
    conversations.apply(output(1, "vier", finish="stop"))
    assert conversation.versions(old.id) == [old, question] and shown(conversation) == ["one", "two", "drei", "vier"]
    second = conversations.regenerate(conversation)
    conversations.stop(conversation)
    conversations.show_version(conversation, answer.id)
    conversations.show_version(conversation, old.id)
    assert shown(conversation) == ["one", "two", "three", "four"]
    conversations.show_version(conversation, question.id)
    assert conversation.path[-1] is answer is not second


def test_an_answer_runs_in_one_branch_while_another_is_looked_at():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two")
    old = conversation.path[1]
    running = conversations.regenerate(conversation)
    conversations.handed_over(conversation, running, 1, sent=0.0)
    conversations.show_version(conversation, old.id)
    conversations.apply(output(1, "zwei"))
    assert conversation.open_answer is running and running not in conversation.path
    assert context(conversation) == [("user", "one")]  # what was told for it, not what is looked at
    with pytest.raises(ChatError, match="still answering"):
        conversations.send(conversation, "three")
    conversations.apply(output(1, "!", finish="stop"))
    assert running.text == "zwei!" and shown(conversation) == ["one", "two"]
    told(conversations, conversation, "three", "four")
    assert shown(conversation) == ["one", "two", "three", "four"]


def test_a_deleted_question_takes_its_answers_along_and_what_followed_moves_up():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two", "three", "four", "five", "six")
    conversations.regenerate(conversation, conversation.path[3].id)
    conversations.stop(conversation)
    conversations.show_version(conversation, conversation.versions(conversation.path[3].id)[0].id)
    before = (conversation.messages, shown(conversation))
    deleted = conversations.delete_message(conversation, conversation.path[2].id)
    assert shown(conversation) == ["one", "two", "five", "six"] and len(deleted.messages) == 3
    conversations.undelete(conversation, deleted)
    assert (conversation.messages, shown(conversation)) == before


def test_a_deleted_version_of_an_answer_goes_alone_and_the_last_one_with_its_question():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two", "three", "four")
    told_first = conversation.path[1]
    conversations.regenerate(conversation, told_first.id)
    conversations.stop(conversation)
    deleted = conversations.delete_message(conversation, conversation.path[1].id)
    assert shown(conversation) == ["one", "two", "three", "four"] and len(deleted.messages) == 1
    conversations.delete_message(conversation, told_first.id)
    assert shown(conversation) == ["three", "four"]


def test_what_was_deleted_under_something_deleted_comes_back_as_high_as_there_is():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two", "three", "four")
    inner = conversations.delete_message(conversation, conversation.path[2].id)
    conversations.delete_message(conversation, conversation.path[0].id)
    assert conversation.path == []
    conversations.undelete(conversation, inner)
    assert shown(conversation) == ["three", "four"]


def test_a_running_answer_moves_up_with_its_question():
    conversations, conversation = make()
    told(conversations, conversation, "one", "two")
    answer = send(conversations, conversation, "three", 1)
    conversations.delete_message(conversation, conversation.path[0].id)
    conversations.apply(output(1, "four", finish="stop"))
    assert shown(conversation) == ["three", "four"] and conversation.path[1] is answer


# Continue ------------------------------------------------------------------------------------------------------------


def test_a_stopped_answer_goes_on_where_it_ends():
    conversations, conversation = make()
    answer = send(conversations, conversation, "count", 1)
    conversations.apply(output(1, "1 2", at=1.0, tokens=2))
    conversations.apply(output(1, " 3", at=2.0, tokens=2))
    conversations.stop(conversation)
    assert conversations.continue_answer(conversation) is answer
    assert context(conversation) == [("user", "count"), ("assistant", "1 2 3")]
    conversations.handed_over(conversation, answer, 2, sent=100.0)
    conversations.apply(output(1, "zombie"))
    conversations.apply(output(2, " 4", at=101.0, tokens=3))
    assert context(conversation)[-1] == ("assistant", "1 2 3")  # what it was told, while it grows
    conversations.apply(Output(2, 103.0, [0, 0], " 5", finish_reason="stop", prompt_tokens=11, cached_tokens=9))
    assert answer.text == "1 2 3 4 5" and answer.status is MessageStatus.COMPLETE and answer.finish_reason == "stop"
    timings = answer.timings
    assert timings.tokens == 9 and timings.ttft == 1.0
    assert timings.tokens_per_second == ((4 - 1) + (5 - 1)) / (1.0 + 2.0)  # the pause of 99 s does not count
    assert (timings.prompt_tokens, timings.cached_tokens) == (11 - 4, 7)


@pytest.mark.parametrize("end", ["length", "error", "dead"])
def test_whatever_was_cut_can_go_on(end):
    conversations, conversation = make()
    answer = send(conversations, conversation, "count", 1)
    conversations.apply(output(1, "1 2", finish=None if end == "dead" else end))
    if end == "dead":
        conversations.engine_gone("It died.", queued=False)
    assert answer.can_continue
    conversations.continue_answer(conversation)
    assert answer.status is MessageStatus.QUEUED and not answer.error and not answer.finish_reason


def test_an_answer_stopped_before_its_first_word_is_asked_for_anew():
    conversations, conversation = make()
    send(conversations, conversation, "count", 1)
    conversations.stop(conversation)
    answer = conversations.continue_answer(conversation)
    assert answer.continued == 0 and context(conversation) == [("user", "count")]


def test_continued_timings_read_from_disk_add_up_too():
    timings = AnswerTimings(tokens=5, ttft=0.5, tokens_per_second=2.0)
    timings.begin_part()
    timings.sent = 10.0
    timings.count(1, 20.0)
    timings.count(4, 22.0)
    assert (timings.tokens, timings.ttft, timings.tokens_per_second) == (10, 0.5, (4 + 4) / (2.0 + 2.0))
    timings.begin_part()
    timings.count(1, 50.0)
    timings.count(2, 51.0)
    assert timings.tokens_per_second == (4 + 4 + 2) / (2.0 + 2.0 + 1.0)


# The engine ----------------------------------------------------------------------------------------------------------


def test_what_the_model_was_not_told_is_on_the_answer():
    conversations, conversation = make()
    answer = send(conversations, conversation, "long", 1)
    conversations.cut(ContextCut(1, 4, 900))
    assert answer.dropped == 4
    assert conversations.cut(ContextCut(99, 4, 900)) is None


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


# What was lost -------------------------------------------------------------------------------------------------------


def line(*names: str) -> list[Message]:
    """Messages that follow each other, question first."""
    made: list[Message] = []
    for number, name in enumerate(names):
        role = Role.ASSISTANT if number % 2 else Role.USER
        made.append(Message(role, name, id=name, parent=made[-1].id if made else None, number=number))
    return made


def mended(messages: list[Message], choices: dict[str, str] | None = None) -> tuple[MessageTree, list[str]]:
    tree = mended_tree(messages, choices or {})
    for message in tree.messages:
        parent = tree.get(message.parent)
        assert (parent is None) == (message.role is Role.USER and message.parent is None)
        assert parent is None or parent.role is message.role.other
        assert message.role is Role.ASSISTANT or tree.children(message.id)
    return tree, [message.text or "?" for message in tree.path]


@pytest.mark.parametrize("gone", ["a", "b", "c", "d", "e", "f", "bc", "cd", "ab", "abc", "bcd", "ef", "bd", "ace"])
def test_what_hangs_below_a_lost_message_stays_reachable(gone):
    messages = [message for message in line(*"abcdef") if message.id not in gone]
    tree, path = mended(messages)
    assert [text for text in path if text != "?"] == [message.text for message in messages]
    assert len(path) % 2 == 0 and len(tree) == len(path)


def test_both_branches_below_a_lost_message_stay_versions_of_each_other():
    messages = line(*"abcd")
    messages.append(Message(Role.USER, "C", id="C", parent="b", number=4))
    messages.append(Message(Role.ASSISTANT, "D", id="D", parent="C", number=5))
    tree, path = mended([message for message in messages if message.id != "b"], {"b": "c"})
    assert path == ["a", "?", "c", "d"] and [each.id for each in tree.children("b")] == ["c", "C"]


def test_what_is_written_below_a_placeholder_finds_it_again():
    tree, _ = mended(line("a"))
    placeholder = tree.path[-1]
    assert placeholder.damage and placeholder.role is Role.ASSISTANT
    below = line("c", "d")
    below[0].parent, below[0].number, below[1].number = placeholder.id, 2, 3
    _, path = mended([*line("a"), *below])
    assert path == ["a", "?", "c", "d"]


def test_links_that_turn_in_a_circle_are_cut():
    first, second = line("a", "b")
    first.parent = "b"
    _, path = mended([first, second])
    assert path == ["a", "b"]


def test_an_empty_id_is_an_id_like_others():
    """In a damaged file; it must not be taken for the beginning."""
    first, other = Message(Role.USER, id="", number=0), Message(Role.USER, id="other", number=1)
    answer = Message(Role.ASSISTANT, id="answer", parent="", number=2)
    again = Message(Role.ASSISTANT, id="again", parent="", number=3)
    tree = MessageTree([first, other, answer, again], {"": ""})
    tree.choose(answer)
    assert [each.id for each in tree.path] == ["", "answer"]

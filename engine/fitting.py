"""Conversations and the model's context: what is left out of one that is too long, and what is said where that fails.

::

    context  ├──────────── prompt ────────────┤── room for the answer ──┤
    messages  system │ user assistant │ user assistant │ user
                     └ left out first ┘                └ stays
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.messages import AddRequest, ChatMessage, CountTokens, TokenCount
from engine.request import RequestError

Encode = Callable[[Sequence[ChatMessage], bool], list[int]]
"""Messages, and whether the last goes on → token ids of the prompt; raises :class:`RequestError`."""


@dataclass(frozen=True, slots=True)
class FittedChat:
    prompt_token_ids: list[int]
    dropped_messages: int
    """How many of the oldest messages, the system prompt not counted, are not in the prompt."""
    tokens: int
    """Length of the prompt with all messages."""


def answer_room(max_tokens: int | None, context: int) -> int:
    """Tokens of the context that are kept for an answer that asks for ``max_tokens``: at most a quarter of it."""
    return min(max_tokens or DEFAULT_CHAT_MAX_TOKENS, context // 4)


def fit_request(command: AddRequest, encode: Encode, context: int) -> FittedChat:
    """The prompt of a conversation for a model that has room for ``context`` tokens, answer included.

    Raises :class:`RequestError` with the numbers where it does not fit, and where oldest messages may be left out, if
    it does not even fit without all of them.
    """
    messages = command.messages or []
    if not command.drop_oldest:
        prompt = encode(messages, command.continues)
        if len(prompt) >= context:
            raise RequestError(
                f"The conversation is {len(prompt):,} tokens; the context holds {context:,}, answer included. Let the "
                "oldest messages be left out, begin a new chat, or load the model with a longer context."
            )
        return FittedChat(prompt, 0, len(prompt))
    room = answer_room(command.params.max_tokens, context)
    fitted = _fit(messages, command.continues, encode, context - room)
    if len(fitted.prompt_token_ids) > context - room:
        raise RequestError(
            f"Even without the older messages the prompt is {len(fitted.prompt_token_ids):,} tokens; the context holds "
            f"{context:,}, of which {room:,} are kept for the answer. Shorten the last message or the system prompt, "
            "ask for a shorter answer, or load the model with a longer context."
        )
    return fitted


def count_chat(query: CountTokens, encode: Encode, context: int) -> TokenCount:
    """The answer to ``query``; its error where the conversation cannot be a prompt at all."""
    try:
        limit = context - answer_room(query.max_tokens, context)
        fitted = _fit(query.messages, query.continues, encode, limit)
    except RequestError as error:
        return TokenCount(query.query_id, 0, str(error))
    return TokenCount(
        query.query_id,
        fitted.tokens,
        dropped_messages=fitted.dropped_messages,
        kept_tokens=len(fitted.prompt_token_ids),
    )


def _fit(messages: Sequence[ChatMessage], continues: bool, encode: Encode, limit: int) -> FittedChat:
    """With as few of the oldest exchanges left out as make it ``limit`` tokens; with all, where that is not enough."""
    whole = encode(messages, continues)
    system, cuts = _cuts(messages, continues)
    if len(whole) <= limit or not cuts:
        return FittedChat(whole, 0, len(whole))
    low, high = 0, len(cuts) - 1
    prompt = encode([*messages[:system], *messages[cuts[high] :]], continues)
    while low < high and len(prompt) <= limit:  # the prompt of ``high`` fits; is there an earlier one that does
        middle = (low + high) // 2
        attempt = encode([*messages[:system], *messages[cuts[middle] :]], continues)
        if len(attempt) <= limit:
            high, prompt = middle, attempt
        else:
            low = middle + 1
    return FittedChat(prompt, cuts[high] - system, len(whole))


def _cuts(messages: Sequence[ChatMessage], continues: bool) -> tuple[int, list[int]]:
    """Length of the system prompt, in messages, and where the rest may begin instead: with a later user's message."""
    system = 0
    while system < len(messages) and messages[system].role == "system":
        system += 1
    last = len(messages) - 1 if continues else len(messages)
    return system, [index for index in range(system + 1, last) if messages[index].role == "user"]

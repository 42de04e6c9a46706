"""From what a client sends to what a core takes: prompts made into tokens, refused where that cannot be."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import TYPE_CHECKING

from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.failures import describe
from engine.messages import AddRequest, CountTokens, TokenCount
from engine.request import RequestError
from engine.workload import ShapeError, synthetic_prompt

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.messages import ModelInfo
    from engine.text.codec import TextCodec


class Intake:
    def __init__(self, codec: TextCodec, info: ModelInfo) -> None:
        self._codec = codec
        self._info = info
        self._special_ids = frozenset(codec.special_ids)

    def add(self, core: EngineCore, command: AddRequest) -> None:
        """Hand a request to ``core``; one whose prompt cannot be made is refused there."""
        try:
            prompt_token_ids = self._prompt_of(command)[: command.prompt_limit]
        except RequestError as error:
            core.reject(command.request_id, str(error))
            return
        except Exception as error:  # whatever a tokeniser or a template throws costs this one request
            traceback.print_exc()
            core.reject(command.request_id, f"The prompt could not be turned into tokens: {describe(error)}")
            return
        params = command.params
        if command.messages is not None and params.max_tokens is None:
            limit = max(DEFAULT_CHAT_MAX_TOKENS, params.min_tokens)
            params = dataclasses.replace(params, max_tokens=limit)
        try:
            core.add_request(
                command.request_id,
                prompt_token_ids,
                params,
                priority=command.priority,
                user=command.user,
                arrival_time=command.arrival_time,
                ends_after=command.ends_after,
                stream_text=command.stream_text,
            )
        except ValueError as error:
            # An id that is in use. Whatever is answered under it would end the request that has it.
            print(f"a request is ignored: {error}", file=sys.stderr, flush=True)

    def _prompt_of(self, command: AddRequest) -> list[int]:
        given = [
            name
            for name in ("messages", "prompt", "prompt_token_ids", "prompt_tokens")
            if getattr(command, name) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                f"a request has exactly one of messages, prompt, prompt_token_ids and prompt_tokens; this has "
                f"{' and '.join(given) or 'none of them'}"
            )
        if command.messages is not None:
            if not any(message.content.strip() for message in command.messages):
                raise RequestError("messages hold no text; write something to be answered")
            return self._codec.encode_chat(command.messages)
        if command.prompt is not None:
            if not command.prompt.strip():
                raise RequestError("prompt is empty; write something to be continued")
            return self._codec.encode(command.prompt)
        if command.prompt_token_ids is not None:
            return command.prompt_token_ids
        assert command.prompt_tokens is not None
        return self._synthetic(command.prompt_tokens, command.synthetic_seed)

    def _synthetic(self, length: int, seed: int) -> list[int]:
        if length > self._info.max_model_len:  # before it is made: it may be of any length
            raise RequestError(f"prompt_tokens is {length:,}; the model's context holds {self._info.max_model_len:,}")
        try:
            return synthetic_prompt(length, self._info.vocab_size, seed, self._special_ids)
        except ShapeError as error:
            raise RequestError(str(error)) from error

    def count_tokens(self, query: CountTokens) -> TokenCount:
        try:
            return TokenCount(query.query_id, len(self._codec.encode_chat(query.messages)))
        except RequestError as error:
            return TokenCount(query.query_id, 0, str(error))
        except Exception as error:
            traceback.print_exc()
            return TokenCount(query.query_id, 0, describe(error))

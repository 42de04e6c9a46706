"""From what a client sends to what a core takes: prompts made into tokens, refused where that cannot be."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.failures import describe
from engine.fitting import count_chat, fit_request
from engine.messages import AddRequest, ChatMessage, ContextCut, CountTokens, TokenCount
from engine.request import RequestError, SamplingParams
from engine.workload import ShapeError, synthetic_prompt

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.messages import ModelInfo
    from engine.text.codec import TextCodec


class Intake:
    def __init__(self, codec: TextCodec, info: ModelInfo, send: Callable[[ContextCut], None]) -> None:
        self._codec = codec
        self._info = info
        self._send = send
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
        try:
            core.add_request(
                command.request_id,
                prompt_token_ids,
                command.params if command.messages is None else self._chat_params(command.params),
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
            return self._fitted(command, command.messages)
        if command.prompt is not None:
            if not command.prompt.strip():
                raise RequestError("prompt is empty; write something to be continued")
            return self._codec.encode(command.prompt)
        if command.prompt_token_ids is not None:
            return command.prompt_token_ids
        assert command.prompt_tokens is not None
        return self._synthetic(command.prompt_tokens, command.synthetic_seed)

    def _fitted(self, command: AddRequest, messages: Sequence[ChatMessage]) -> list[int]:
        if not any(message.content.strip() for message in messages):
            raise RequestError("messages hold no text; write something to be answered")
        fitted = fit_request(command, self._codec.encode_chat, self._context)
        if fitted.dropped_messages:
            # Outputs come with the next step: this is told before any of them.
            self._send(ContextCut(command.request_id, fitted.dropped_messages, len(fitted.prompt_token_ids)))
        return fitted.prompt_token_ids

    @property
    def _context(self) -> int:
        """Tokens that model and pool have room for, as :attr:`engine.admission.EngineLimits.longest`."""
        return min(self._info.max_model_len, self._info.num_blocks * self._info.block_size + 1)

    def _chat_params(self, params: SamplingParams) -> SamplingParams:
        limit = params.max_tokens
        if limit is None:
            limit = max(DEFAULT_CHAT_MAX_TOKENS, params.min_tokens)
        return dataclasses.replace(params, max_tokens=limit, stop=(*params.stop, *self._codec.chat_stops))

    def _synthetic(self, length: int, seed: int) -> list[int]:
        if length > self._info.max_model_len:  # before it is made: it may be of any length
            raise RequestError(f"prompt_tokens is {length:,}; the model's context holds {self._info.max_model_len:,}")
        try:
            return synthetic_prompt(length, self._info.vocab_size, seed, self._special_ids)
        except ShapeError as error:
            raise RequestError(str(error)) from error

    def count_tokens(self, query: CountTokens) -> TokenCount:
        try:
            return count_chat(query, self._codec.encode_chat, self._context)
        except Exception as error:
            traceback.print_exc()
            return TokenCount(query.query_id, 0, describe(error))

"""Which requests are refused before they wait, with the sentence for the user, and what the others begin as."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.request import Request, SamplingParams, branch_id


@dataclass(frozen=True, slots=True)
class EngineLimits:
    vocab_size: int
    max_model_len: int
    """Longest context, prompt and answer, in tokens."""
    num_blocks: int
    block_size: int

    @property
    def longest(self) -> int:
        """Prompt and answer that model and pool have room for. The keys of a last token are never needed."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """``params.max_tokens``, cut to the room behind the prompt."""
        room = self.longest - num_prompt_tokens
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def refusal(self, prompt_token_ids: list[int], params: SamplingParams, ends_after: int | None) -> str | None:
        """Why this request could never run; None if it can."""
        if not prompt_token_ids:
            return "The prompt is empty; send at least one token."
        if ends_after is not None and ends_after < 1:
            return f"ends_after is {ends_after}; it must be at least 1 output token."
        return self._bad_token(prompt_token_ids, params) or self._bad_length(len(prompt_token_ids))

    def _bad_token(self, prompt_token_ids: list[int], params: SamplingParams) -> str | None:
        named = {
            "the prompt": prompt_token_ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
        }
        for name, ids in named.items():
            if not ids:
                continue
            try:
                fits = int(np.frombuffer(array("I", ids), np.uintc).max()) < self.vocab_size
            except (OverflowError, TypeError):  # negative, beyond 32 bits, or no integer
                fits = False
            if not fits:
                bad = next(i for i in ids if not isinstance(i, int) or not 0 <= i < self.vocab_size)
                return (
                    f"Token id {bad!r} in {name} is not in the model's vocabulary; "
                    f"ids run from 0 to {self.vocab_size - 1:,}."
                )
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            return f"logprobs is {params.logprobs}; the vocabulary has {self.vocab_size:,} tokens."
        return None

    def _bad_length(self, length: int) -> str | None:
        if length >= self.max_model_len:
            return (
                f"The prompt is {length:,} tokens; the context holds {self.max_model_len:,}, answer included. "
                f"Shorten the prompt to {self.max_model_len - 1:,} tokens or load the model with a longer context."
            )
        if length >= self.longest:
            capacity = self.num_blocks * self.block_size
            return (
                f"The prompt is {length:,} tokens and needs {-(-length // self.block_size):,} KV blocks; the pool has "
                f"{self.num_blocks:,} ({capacity:,} tokens). Shorten the prompt or load with more blocks (--kv-blocks)."
            )
        return None


def make_answers(
    request_id: int,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    arrival_time: float,
    priority: int,
    user: str,
    ends_after: int | None,
    eos_token_ids: frozenset[int],
    engine_seed: int,
) -> list[Request]:
    """``params.n`` answers to one prompt; the others begin once the first has computed it. One that brings no seed gets
    one that depends on ``engine_seed`` and its id alone, so that each draws the same in whatever batch it runs."""
    seed = _seed_of(request_id, engine_seed) if params.seed is None else params.seed
    stop_token_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
    answers = [
        Request(
            branch_id(request_id, index),
            prompt_token_ids,
            params,
            max_tokens=max_tokens,
            arrival_time=arrival_time,
            priority=priority,
            user=user,
            ends_after=ends_after,
            seed=seed if index == 0 else _seed_of(request_id, f"{seed}:{index}"),
            stop_token_ids=stop_token_ids.union(params.stop_token_ids) if params.stop_token_ids else stop_token_ids,
        )
        for index in range(params.n)
    ]
    first, *others = answers
    first.branches = others
    for branch in others:
        branch.parent = first
    return answers


def _seed_of(request_id: int, origin: int | str) -> int:
    """A seed in [0, 2^63) that depends on ``origin`` and the request's id alone."""
    digest = blake2b(f"{origin}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

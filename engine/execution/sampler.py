"""From a request's parameters to the row that a backend samples by."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request
from kernels.sampling import SamplingRow

_GREEDY = SamplingRow()


def sampling_row(request: Request, drafts_before: Sequence[int] = ()) -> SamplingRow:
    """How to draw the token behind the last one of ``request``, or behind the drafts that follow it, as if these were
    in its output already.

    Token lists are copied only where a penalty reads them: a decode step of a plain request costs no list.
    """
    params = request.params
    num_output_tokens = request.num_output_tokens + len(drafts_before)
    banned = tuple(request.stop_token_ids) if num_output_tokens < params.min_tokens else ()
    counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    repeats = params.repetition_penalty != 1.0
    if (
        params.temperature == 0.0
        and not (counts_output or repeats or banned or params.logit_bias)
        and params.logprobs is None
    ):
        return _GREEDY
    prompt_length = request.num_prompt_tokens
    return SamplingRow(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=request.seed,
        position=request.num_tokens + len(drafts_before),
        prompt_token_ids=request.token_ids[:prompt_length] if repeats else [],
        output_token_ids=[*request.output_token_ids, *drafts_before] if repeats or counts_output else [],
        logit_bias=params.logit_bias,
        banned_token_ids=banned,
        logprobs=params.logprobs,
    )

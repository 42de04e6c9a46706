"""A model's first steps: over some real text, to see whether its numbers are numbers, and over longer ones, to see how
many tokens a step may have."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.config import EngineConfig
from engine.execution.runner import not_finite_cause
from engine.execution.sizing import (
    SMALLEST_BUDGET,
    StepMeasurement,
    measure_token_budget,
    prefill_seconds,
    prompt_step,
)
from engine.models.errors import NotFiniteError
from engine.models.transformers_spec import ModelSpec
from engine.text.codec import TextCodec
from kernels.spec import HostStep

SAMPLE_TEXT = "At half past seven the first bus leaves the square; whoever is late waits 20 minutes for the next."
"""What a model reads first, to see whether its numbers fit the type they are kept in."""


def measure_step(
    config: EngineConfig,
    codec: TextCodec,
    spec: ModelSpec,
    forward: Callable[[HostStep], torch.Tensor],
    largest: int,
    most: int,
) -> StepMeasurement:
    """The configured budget or a measured one of at most ``most``; either way the model has run and gave finite
    numbers. ``largest``: tokens of one prompt that model and pool hold."""
    block_size = config.cache.block_size
    forward(prompt_step(1, block_size))  # a decode: its kernel is compiled now, not in somebody's answer
    logits = forward(_text_step(codec, spec.vocab_size, largest, block_size))
    if not bool(torch.isfinite(logits).all()):
        raise NotFiniteError(
            f"The first step gave no finite numbers; {not_finite_cause(spec.dtype)}.",
            "unsupported" if spec.dtype == torch.float16 else "damaged",
        )
    budget = config.scheduler.max_num_batched_tokens
    if budget is None:
        return measure_token_budget(forward, largest=largest, block_size=block_size, clock=time.perf_counter, most=most)
    size = min(SMALLEST_BUDGET, largest)
    return StepMeasurement(budget, prefill_seconds(forward, size, block_size, time.perf_counter) / size)


def _text_step(codec: TextCodec, vocab_size: int, largest: int, block_size: int) -> HostStep:
    """A step over some real text, as long as fits, with logits of every token."""
    ids = [token for token in codec.encode(SAMPLE_TEXT) if token < vocab_size][:largest] or [0]
    step = prompt_step(len(ids), block_size)
    return dataclasses.replace(step, token_ids=np.array(ids), logits_rows=np.arange(len(ids)))

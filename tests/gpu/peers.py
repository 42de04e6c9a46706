"""What the Transformers library makes of the same weights and the same load: its two ways to generate for many.

``generate``: one padded batch from the first token to the last; all prompts are of one length here: nothing is padded.
``generate_batch``: its continuous batching, as it chooses by itself and with CUDA graphs where it would not take them.
Its cache is given room for the load, and prompts are not shared; its set-up is not timed, and neither is the end of its
thread: a run lasts from its first request made to its last one done, on its own clock.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tests.gpu.card import Card
from tests.gpu.engines import Load

MAX_BATCH_TOKENS = 2048
"""Its attention multiplies each of these with all keys of the step, those of others masked: more of them cost more."""


def static_seconds(card: Card, model: Any, load: Load) -> float:
    """``generate`` for all prompts of ``load``, which are equally long, as are its answers."""
    (length,) = set(load.output_tokens)
    ids = torch.tensor(load.prompts, device=card.device)
    config = GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    results: list[torch.Tensor] = []
    seconds = card.wall_seconds(
        lambda: results.append(model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).cpu())
    )
    if results[0].shape[1] != ids.shape[1] + length:
        raise RuntimeError(f"generate gave {results[0].shape[1] - ids.shape[1]} tokens of {length}")
    return seconds


class Continuous:
    """``generate_batch`` with its manager kept between two calls; :meth:`close` ends it."""

    def __init__(self, model: Any, load: Load, *, graphs: bool | None) -> None:
        """``graphs`` None: as the library chooses."""
        longest = max(map(len, load.prompts)) + max(load.output_tokens)
        # Named page_size or block_size, by version.
        page = getattr(ContinuousBatchingConfig, "page_size", None) or ContinuousBatchingConfig().block_size
        self._model = model
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1, bos_token_id=None, pad_token_id=0)
        self._batching = ContinuousBatchingConfig(
            # Also for the largest step that it tries beforehand, whose tokens all have a context.
            num_blocks=max(len(load.prompts) * (-(-longest // page) + 1), 2 * MAX_BATCH_TOKENS // page),
            max_batch_tokens=MAX_BATCH_TOKENS,
            allow_block_sharing=False,
            use_cuda_graph=graphs,
        )
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def seconds(self, load: Load) -> float:
        (length,) = set(load.output_tokens)
        results = self._model.generate_batch(
            [list(prompt) for prompt in load.prompts],
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            max_new_tokens=length,
            persistent_manager=True,
        )
        outputs = list(results.values())
        wrong = [each.error or len(each.generated_tokens) for each in outputs if len(each.generated_tokens) != length]
        if wrong or len(outputs) != len(load.prompts):
            raise RuntimeError(f"generate_batch answered {len(outputs)} of {len(load.prompts)}, wrongly: {wrong[:3]}")
        return max(each.lifespan[1] for each in outputs) - min(each.created_time for each in outputs)

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
        # A manager that fails in its set-up leaves an attention behind that works for it alone.
        self._model.set_attn_implementation("sdpa")

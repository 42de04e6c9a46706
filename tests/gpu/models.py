"""The models that are measured: shapes people know, weights from a seed, made on the device, no file anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.architecture import expected_tensors
from kernels.spec import DecoderSpec
from tests.gpu.card import Card

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama: the numbers that both our decoder and the library's are made from."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rope_theta: float = 500_000.0
    max_position: int = 131_072

    def spec(self, dtype: torch.dtype) -> DecoderSpec:
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return DecoderSpec(
            architecture="LlamaForCausalLM",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            max_position=self.max_position,
            dtype=dtype,
            inv_freq=1.0 / self.rope_theta**steps,
            tie_embeddings=self.tied,
        )


LLAMA_1B = Shape("1B", 16, 2048, 8192, 32, 8, 64, 128_256, tied=True)
"""Llama 3.2 1B."""
LLAMA_8B = Shape("8B", 32, 4096, 14_336, 32, 8, 128, 128_256, tied=False)
"""Llama 3.1 8B."""
STARTER = Shape("starter", 30, 576, 1536, 9, 3, 64, 49_152, tied=True, rope_theta=100_000.0, max_position=8192)
"""SmolLM2 135M."""
TINY = Shape("tiny", 1, 48, 64, 3, 1, 64, 61, tied=True, rope_theta=10_000.0, max_position=256)
"""A rehearsal's."""


def random_weights(spec: DecoderSpec, card: Card, seed: int = 1) -> Weights:
    """Matrices that keep the size of what goes through them, roughly, so that each layer matters and none overflows."""
    generator, weights = card.generator(seed), {}
    for name, shape in expected_tensors(spec).items():
        tensor = torch.empty(shape, dtype=torch.float32, device=card.device).normal_(generator=generator)
        scaled = 1 + 0.2 * tensor if name.endswith("norm.weight") else tensor * (1.5 * shape[-1] ** -0.5)
        weights[name] = scaled.to(spec.dtype)
    return weights


def library_model(shape: Shape, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    """Transformers' own model of these weights, which are copied."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if shape.tied else set()):
        raise RuntimeError(f"the library's model misses {missing} and does not know {unexpected}")
    if shape.tied:
        model.tie_weights()
    return model

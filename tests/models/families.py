"""Tiny random models of each family, made by Transformers itself: the reference that the native decoder must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB = 97

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def _config(kind: type, **values: Any) -> Callable[[], Any]:
    return lambda: kind(**{**_SMALL, **values})


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **values}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config(LlamaConfig),
    "llama-tied": _config(LlamaConfig, tie_word_embeddings=True),
    "llama-mha": _config(LlamaConfig, num_key_value_heads=4),
    "llama-group-3": _config(LlamaConfig, hidden_size=96, num_attention_heads=6),
    "llama-group-7": _config(LlamaConfig, hidden_size=112, num_attention_heads=7, num_key_value_heads=1),
    "llama-wide-heads": _config(LlamaConfig, head_dim=32),
    "llama-head-dim-null": _config(LlamaConfig, head_dim=None),
    "llama-biases": _config(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-linear": _config(LlamaConfig, rope_parameters=_rope("linear", factor=4.0)),
    "llama-llama3": _config(
        LlamaConfig,
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "llama-yarn": _config(LlamaConfig, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": _config(MistralConfig, sliding_window=None),
    "mistral-window": _config(MistralConfig, sliding_window=8),
    "qwen2": _config(Qwen2Config),
    "qwen2-window": _config(
        Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen2-tied": _config(Qwen2Config, tie_word_embeddings=True),
    "qwen3": _config(Qwen3Config, head_dim=32),
    "smollm3": _config(SmolLM3Config, num_hidden_layers=4, no_rope_layer_interval=4),
}


@dataclass(frozen=True, slots=True)
class SavedModel:
    folder: Path
    reference: PreTrainedModel

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Transformers' own, float32 [len(token_ids), vocab]."""
        logits = self.reference(torch.tensor([token_ids])).logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits


def save_family(name: str, folder: Path, seed: int = 0) -> SavedModel:
    """A random model of the family with weights large enough that every part of it matters to the logits."""
    config = FAMILIES[name]()
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    large_weights(model)
    model.save_pretrained(folder)
    return SavedModel(folder, model)


def large_weights(model: PreTrainedModel) -> None:
    """Random weights of which every part matters to the logits."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)

"""Tiny random models of the families that the Transformers library computes, made by the library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.families import VOCAB, SavedModel, large_weights

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

LIBRARY_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 8, "layer_types": _MIXED, "logit_scale": 1.0}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": _MIXED}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 8, "layer_types": _MIXED}),
    "glm": ("GlmForCausalLM", {"head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "gpt-neox-serial": (
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
        },
    ),
    "helium": ("HeliumForCausalLM", {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "sliding_window": 8}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 16}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 2.0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 8, "layer_types": _MIXED}),
    "olmoe": ("OlmoeForCausalLM", _EXPERTS),
    "phi": ("PhiForCausalLM", {"qk_layernorm": True}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 8}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 220,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": 220,
            },
        },
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 32}),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 32, "attention_out_bias": True}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm-dynamic": (
        "StableLmForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 8}),
}
"""Short name → architecture, and what its configuration has beside the common sizes."""


def save_library_family(name: str, folder: Path, **changes: Any) -> SavedModel:
    """A random model of the family; ``changes`` to its configuration."""
    architecture, values = LIBRARY_FAMILIES[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**SIZES, **values, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    large_weights(model)
    model.save_pretrained(folder)
    return SavedModel(folder, model)

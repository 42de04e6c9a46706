"""``config.json`` to the decoder's shape, against what Transformers builds from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.architecture import SUPPORTED_ARCHITECTURES, expected_tensors, spec_from_config
from engine.models.errors import ModelLoadError

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **TINY}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **TINY}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **TINY}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": None, **TINY}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, head_dim 32": {**LLAMA, "head_dim": 32},
    "llama, head_dim null": {**LLAMA, "head_dim": None},
    "llama, every head its own": {**LLAMA, "num_key_value_heads": None},
    "llama, a window means nothing": {**LLAMA, "sliding_window": 8},
    "mistral": {**MISTRAL, "sliding_window": 8},
    "mistral, window by default": MISTRAL,
    "mistral, no window": {**MISTRAL, "sliding_window": None},
    "mistral, head_dim 32": {**MISTRAL, "head_dim": 32, "sliding_window": None},
    "qwen2": QWEN2,
    "qwen2, window not in use": {**QWEN2, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2},
    "qwen2, window from layer 2": {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2, window by layer": {
        **QWEN2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3": QWEN3,
    "qwen3, head_dim 24, biases": {**QWEN3, "head_dim": 24, "attention_bias": True},
    "qwen3, window from layer 3": {**QWEN3, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    "smollm3": SMOLLM3,
    "smollm3, untied, biases": {**SMOLLM3, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "smollm3, rope by layer": {**SMOLLM3, "no_rope_layers": [0, 1, 1, 0]},
    "smollm3, interval 2": {**SMOLLM3, "no_rope_layer_interval": 2},
    "smollm3, window where no rope": {**SMOLLM3, "use_sliding_window": True, "sliding_window": 8},
}


def reference_of(config: dict[str, Any], tmp_path: Path) -> tuple[Any, Any]:
    """Transformers' configuration and (weightless) model of the same ``config.json``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        return loaded, AutoModelForCausalLM.from_config(loaded)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_and_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, model = reference_of(CONFIGS[name], tmp_path)
    spec = spec_from_config(CONFIGS[name], torch.float32)
    reference = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert spec.tie_embeddings == config.tie_word_embeddings
    if config.tie_word_embeddings:
        reference.pop("lm_head.weight")
    assert expected_tensors(spec) == reference
    assert spec.rms_norm_eps == config.rms_norm_eps


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_and_rope_layers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    _, model = reference_of(CONFIGS[name], tmp_path)
    spec = spec_from_config(CONFIGS[name], torch.float32)
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", None)
        if model.config.model_type == "mistral":
            window = model.config.sliding_window
        assert spec.layer_window(index) == window
        assert spec.layer_uses_rope(index) == bool(getattr(attention, "use_rope", True))


def test_families_alternating_windows_in_mistral() -> None:
    """Transformers reads a Mistral with ``layer_types`` as Ministral: each layer as it says."""
    config = {**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert spec_from_config(config, torch.float32).sliding_window == (8, None, 8, None)


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize(
    ("name", "parameters", "kv_values"),
    [
        ("Llama-3.2-1B-Instruct", 1_235_814_400, 2 * 16 * 8 * 64),
        ("Qwen2.5-0.5B-Instruct", 494_032_768, 2 * 24 * 2 * 64),
        ("Qwen3-0.6B", 596_049_920, 2 * 28 * 8 * 128),
    ],
)
def test_published_models_have_their_published_size(name: str, parameters: int, kv_values: int) -> None:
    spec = spec_from_config(PUBLISHED[name], torch.bfloat16)
    assert sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values()) == parameters
    assert spec.kv_bytes_per_token() == 2 * kv_values


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_model_type_alone_is_enough(architecture: str) -> None:
    named = {"architectures": [architecture], **TINY}
    by_type = {**TINY, "model_type": architecture.removesuffix("ForCausalLM").lower()}
    assert expected_tensors(spec_from_config(named, torch.float32)) == expected_tensors(
        spec_from_config(by_type, torch.float32)
    )


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "unsupported", "BloomForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "unsupported", "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "mamba"}, "unsupported", "mamba"),
        ({"architectures": None, "model_type": None}, "damaged", "names no architecture"),
        ({"hidden_act": "gelu"}, "unsupported", "gelu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "unsupported", "gptq"),
        ({"hidden_size": None}, "damaged", "hidden_size is None"),
        ({"vocab_size": "96"}, "damaged", "vocab_size is '96'"),
        ({"num_hidden_layers": 0}, "damaged", "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "damaged", "multiple of num_key_value_heads, 3"),
        ({"hidden_size": 66}, "damaged", "hidden_size is 66"),
        ({"head_dim": 15}, "damaged", "15 dimensions"),
        ({"rms_norm_eps": "small"}, "damaged", "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": None}, "damaged", "rms_norm_eps is None"),
        ({"architectures": "BloomForCausalLM"}, "unsupported", "architecture BloomForCausalLM is"),
    ],
)
def test_refusals_name_what_is_wrong(change: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        spec_from_config({**LLAMA, **change}, torch.float32)
    assert refused.value.kind == kind


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({**QWEN2, "layer_types": ["full_attention"] * 3}, "damaged", "3 entries for 4 layers"),
        ({**QWEN3, "layer_types": ["linear_attention"] * 4}, "unsupported", "linear_attention"),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 4}, "damaged", "no sliding_window in use"),
        ({**MISTRAL, "sliding_window": 0}, "damaged", "sliding_window is 0"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, "damaged", "2 entries for 4 layers"),
    ],
)
def test_contradictory_layers_are_refused(config: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        spec_from_config(config, torch.float32)
    assert refused.value.kind == kind

"""Rotary frequencies against Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.models.errors import ModelLoadError
from engine.models.rope import rotary_parameters

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "theta": {"rope_theta": 500_000.0},
    "new form": {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}},
    "new form without type": {"rope_parameters": {"rope_theta": 250_000.0}},
    "null scaling": {"rope_theta": 10_000.0, "rope_scaling": None},
    "linear": {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new form": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_theta": 500_000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 131_072},
    "llama3, new form": {
        "rope_parameters": {**LLAMA3, "factor": 8.0, "rope_theta": 500_000.0},
        "max_position_embeddings": 131_072,
    },
    "yarn": {
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    },
    "yarn without factor": {
        "max_position_embeddings": 65_536,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16_384},
    },
    "yarn, mscale, not truncated": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        "max_position_embeddings": 163_840,
    },
    "yarn, attention factor given": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.25}
    },
}


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    case = {"max_position_embeddings": 8192, **CASES[name]}
    ours = rotary_parameters(case, head_dim, default_theta=10_000.0)
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in case.items()}
    reference = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, hidden_size=4 * head_dim, **copied))
    assert ours.inv_freq.dtype == torch.float32
    torch.testing.assert_close(ours.inv_freq, reference.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_scaling == pytest.approx(reference.attention_scaling, rel=1e-12)


def test_dynamic_is_default_as_far_as_the_checkpoint_goes() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    case = {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    ours = rotary_parameters(case, 64, default_theta=10_000.0)
    reference = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, **case))
    positions = torch.arange(256)[None]
    cos, _ = reference(torch.zeros(1), positions)
    angles = positions[0, :, None] * ours.inv_freq
    torch.testing.assert_close(torch.cat((angles, angles), -1).cos(), cos[0])
    assert ours.max_position == 256


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 131_072, "rope_scaling": LLAMA3}, 131_072),
        # What YaRN was made for is the original length times the factor, even where the other number stayed.
        ({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131_072),
        (
            {
                "max_position_embeddings": 40_960,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
        ),
    ],
)
def test_longest_context(config: dict[str, Any], longest: int) -> None:
    assert rotary_parameters(config, 64, 10_000.0).max_position == longest


@pytest.mark.parametrize(
    ("rope", "kind", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "unsupported", "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "unsupported", "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "unsupported", "by layer type"),
        ({"partial_rotary_factor": 0.5}, "unsupported", "0.5"),
        ({"rope_scaling": "linear"}, "damaged", "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "damaged", "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "damaged", "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "damaged", "factor is '4'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "damaged", "high_freq_factor is 1.0"),
        ({"rope_theta": -1.0}, "damaged", "rope_theta is -1.0"),
    ],
)
def test_refusals_name_the_value(rope: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        rotary_parameters({"max_position_embeddings": 8192, **rope}, 64, 10_000.0)
    assert refused.value.kind == kind

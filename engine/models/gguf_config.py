"""From what a GGUF file says of its model to the ``config.json`` that Transformers would have for it.

What the file says and the native decoder cannot do is refused by the name of its field: half a configuration would give
half a model's answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.models.config_values import shown
from engine.models.errors import ModelLoadError
from engine.models.families import GGUF, NATIVE

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors, by their names in the file, rows first."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llamas 3.1 to 3.3; the file has only what comes of them."""
_UNSUPPORTED = {
    "expert_count": "a mixture of experts",
    "attention.logit_softcapping": "capped attention",
    "final_logit_softcapping": "capped logits",
    "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "attention.scale": "attention with a scale of its own",
    "rope.scaling.yarn_log_multiplier": "a logarithmic YaRN",
    "rope.scaling.yarn_ext_factor": "an extrapolated YaRN",
}
"""Fields that must be absent, zero, or one in the case of a factor."""


def config_of(fields: Mapping[str, Any], shapes: Shapes, frequencies: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    """``fields``: the file's; ``frequencies``: its ``rope_freqs.weight``, float32 [head_dim / 2], where it has that.

    Raises :class:`ModelLoadError`, ``unsupported`` with the field's name, or ``damaged`` with that of a missing one.
    """
    architecture = str(fields.get("general.architecture"))
    if architecture not in GGUF:
        raise ModelLoadError(
            f"The GGUF file holds the architecture {shown(architecture)}; Batchscope imports {', '.join(GGUF)}.",
            "unsupported",
        )
    model = _Fields(fields, architecture)
    model.refuse_unsupported()
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("The GGUF file lacks token_embd.weight, its embedding; download it again.", "damaged")
    family = NATIVE[GGUF[architecture]]
    hidden, heads = model.count("embedding_length"), model.count("attention.head_count")
    head_dim = model.count("attention.key_length", hidden // heads)
    if model.count("attention.value_length", head_dim) != head_dim:
        raise model.unsupported("attention.value_length", "values of another size than its keys")
    if model.count("rope.dimension_count", head_dim) != head_dim:
        raise model.unsupported("rope.dimension_count", "heads that are rotated only in part")
    context = model.count("context_length")
    config: dict[str, Any] = {
        "architectures": [GGUF[architecture]],
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": model.count("feed_forward_length"),
        "num_hidden_layers": model.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _decimal(model.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(model.number("rope.freq_base", 10_000.0)),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    window = fields.get(f"{architecture}.attention.sliding_window")
    if window and int(window) < context:
        raise model.unsupported("attention.sliding_window", "a sliding window")
    scaling = _scaling(model, context)
    if frequencies is not None:
        if scaling is not None:
            raise model.unsupported("rope.scaling.type", "rotary positions that are scaled twice")
        scaling = _llama3(frequencies, head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


class _Fields:
    """The fields of the file's own architecture."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._fields = fields
        self._architecture = architecture

    def get(self, name: str) -> Any:
        return self._fields.get(f"{self._architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list):
            if any(each != value[0] for each in value):
                raise self.unsupported(name, "layers that differ from each other")
            value = value[0] if value else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"The GGUF file's {self._architecture}.{name} is {shown(value)}; it must be a whole number above 0.",
                "damaged",
            )
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelLoadError(
                f"The GGUF file's {self._architecture}.{name} is {shown(value)}; it must be a number above 0.",
                "damaged",
            )
        return float(value)

    def refuse_unsupported(self) -> None:
        for name, what in _UNSUPPORTED.items():
            value = self.get(name)
            if value not in (None, 0, 0.0) and not (value == 1.0 and name.endswith(("_scale", "_factor"))):
                raise self.unsupported(name, what)
        if self.get("attention.causal") is False:
            raise self.unsupported("attention.causal", "attention in both directions")

    def unsupported(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"The GGUF file's model has {what} ({self._architecture}.{name} is {shown(self.get(name))}), which is not "
            "imported. Take the model as safetensors, where there is one.",
            "unsupported",
        )


def _scaling(model: _Fields, context: int) -> dict[str, Any] | None:
    """``rope_scaling``; None: not scaled."""
    kind = model.get("rope.scaling.type")
    if kind is None and model.get("rope.scale_linear") is not None:
        factor = model.number("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind in (None, "none", ""):
        return None
    factor = model.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise model.unsupported("rope.scaling.type", f"rotary positions of the kind {shown(kind)}")
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if model.get(name) not in (None, 1.0):
            raise model.unsupported(name, "a YaRN with a factor of its own for attention")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": model.count("rope.scaling.original_context_length", context),
    }
    for name in ("beta_fast", "beta_slow"):
        if model.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = model.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3(frequencies: npt.NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The scaling that gives these divisors of the rotary frequencies; None where all are 1."""
    factor = round(float(frequencies.max()), 4)
    if factor <= 1.0 and np.allclose(frequencies, 1.0):
        return None
    for original in (8192, 4096, 2048, 16_384, 32_768):
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3, "original_max_position_embeddings": original}
        if frequencies.shape == (head_dim // 2,) and np.allclose(
            frequencies, llama3_divisors(scaling, head_dim, theta), rtol=1e-4
        ):
            return scaling
    raise ModelLoadError(
        "The GGUF file's rope_freqs.weight stretches rotary positions in a way that is not Llama 3's, which is not "
        "imported. Take the model as safetensors, where there is one.",
        "unsupported",
    )


def llama3_divisors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """What Llama 3.1's rule divides each rotary frequency by [head_dim / 2], as llama.cpp's converter stores it."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = (
        scaling["original_max_position_embeddings"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))


def _decimal(value: float) -> float:
    """The file has float32; its shortest decimal is what the number was before (1e-05)."""
    return float(str(np.float32(value)))

"""Rotary frequencies: what a checkpoint's ``rope_parameters`` (or the older ``rope_theta`` and ``rope_scaling``) mean.

The rules and defaults are those of Transformers 5 (``modeling_rope_utils``), which the tests compare with number by
number. Each scaling changes the frequencies once, at load; none depends on the length of a context, because keys
already in the cache could not follow. ``dynamic`` therefore equals ``default``, and is exact up to the length that the
checkpoint was made for, which is where the engine ends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.config_values import (
    damaged,
    longest_context,
    named_context,
    positive_number,
    rotary_section,
    yarn_stretch,
)


@dataclass(frozen=True, slots=True)
class RotaryParameters:
    inv_freq: torch.Tensor
    """float32 [rotary_dim / 2]"""
    attention_scaling: float
    """Factor on cos and sin."""
    max_position: int
    """Longest context for which these frequencies are meant, in tokens."""


def rotary_parameters(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RotaryParameters:
    """The rotary part of a checkpoint's configuration.

    Raises :class:`ModelLoadError`, ``unsupported`` for a scaling this program does not know (named), ``damaged`` where
    a number that the scaling needs is missing or impossible.
    """
    parameters = rotary_section(config, default_theta)
    rope_type = parameters["rope_type"]
    max_position = named_context(config)
    base = positive_number(parameters, "rope_theta")
    frequencies = base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope_type in ("default", "dynamic"):
        return RotaryParameters(1.0 / frequencies, 1.0, max_position)
    if rope_type == "linear":
        return RotaryParameters(1.0 / frequencies / positive_number(parameters, "factor"), 1.0, max_position)
    if rope_type == "llama3":
        return RotaryParameters(_llama3(1.0 / frequencies, parameters), 1.0, max_position)
    return _yarn(frequencies, base, parameters, max_position)


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor = positive_number(parameters, "factor")
    low, high = positive_number(parameters, "low_freq_factor"), positive_number(parameters, "high_freq_factor")
    original = positive_number(parameters, "original_max_position_embeddings")
    if high <= low:
        raise damaged(f"high_freq_factor is {high}; it must be above low_freq_factor, {low}")
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: torch.Tensor, base: float, parameters: Mapping[str, Any], max_position: int) -> RotaryParameters:
    """YaRN (arXiv 2309.00071): a ramp between kept and stretched frequencies, and a factor on cos and sin."""
    original, factor = yarn_stretch(parameters, max_position)
    half = frequencies.shape[0]
    if base == 1:
        raise damaged("rope_theta is 1, which YaRN cannot stretch")
    low, high = (
        2 * half * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (_or(parameters, "beta_fast", 32), _or(parameters, "beta_slow", 1))
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    inv_freq = (1.0 / (factor * frequencies)) * (1 - kept) + (1.0 / frequencies) * kept
    return RotaryParameters(
        inv_freq,
        _yarn_attention(factor, parameters),
        longest_context(max_position, parameters),
    )


def _yarn_attention(factor: float, parameters: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(positive_number(parameters, "attention_factor"))
    numerator, denominator = _or(parameters, "mscale", 0), _or(parameters, "mscale_all_dim", 0)
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def _or(parameters: Mapping[str, Any], name: str, default: float) -> float:
    """A number that may be missing, null or 0."""
    return positive_number(parameters, name) if parameters.get(name) else default

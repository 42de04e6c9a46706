"""The families of models that Batchscope runs, and how: one table for the engine and for who lists models without
loading any. Light: no torch.

A native family is computed by our own decoder. A family of ``TRANSFORMERS`` is computed by the Transformers library,
with our paged attention in place of its own. Whatever is in neither is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.models.config_values import (
    count,
    damaged,
    head_dim,
    longest_context,
    named_context,
    num_kv_heads,
    num_layers,
    rotary_section,
    shown,
)
from engine.models.errors import ModelLoadError

Runner = Literal["native", "transformers"]


@dataclass(frozen=True, slots=True)
class Family:
    """A native family."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that ``config.json`` lacks, where they differ from the common ones."""
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, and then the output projection has one too."""
    mlp_bias: bool = False
    """Whether ``mlp_bias`` means anything here."""
    qk_norm: bool = False


COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "rope_theta_default": 10_000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

NATIVE: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}, mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral", {"max_position_embeddings": 131_072, "num_key_value_heads": 8}, qkv_bias=False
    ),
    "Qwen2ForCausalLM": Family("qwen2", {"num_key_value_heads": 32}, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", {"num_key_value_heads": 32, "head_dim": 128}, qk_norm=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True, "rope_theta_default": 2e6},
        mlp_bias=True,
    ),
}


@dataclass(frozen=True, slots=True)
class LibraryFamily:
    """A family that the Transformers library computes."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that ``config.json`` may lack."""
    model_class: str = ""
    """The library's class, where it has another name than the architecture: its text part alone is run, which
    ``text_config`` describes."""


_GEMMA3_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}

TRANSFORMERS: dict[str, LibraryFamily] = {
    "ArceeForCausalLM": LibraryFamily("arcee"),
    "CohereForCausalLM": LibraryFamily("cohere"),
    "Cohere2ForCausalLM": LibraryFamily("cohere2"),
    "Ernie4_5ForCausalLM": LibraryFamily("ernie4_5"),
    "Exaone4ForCausalLM": LibraryFamily("exaone4"),
    "GPTNeoXForCausalLM": LibraryFamily("gpt_neox"),
    "GemmaForCausalLM": LibraryFamily("gemma", {"head_dim": 256}),
    "Gemma2ForCausalLM": LibraryFamily("gemma2", {"head_dim": 256}),
    "Gemma3ForCausalLM": LibraryFamily("gemma3_text", {"head_dim": 256}),
    "Gemma3ForConditionalGeneration": LibraryFamily("gemma3_text", _GEMMA3_SIZES, "Gemma3ForCausalLM"),
    "GlmForCausalLM": LibraryFamily("glm"),
    "Glm4ForCausalLM": LibraryFamily("glm4"),
    "GraniteForCausalLM": LibraryFamily("granite"),
    "HeliumForCausalLM": LibraryFamily("helium"),
    "MixtralForCausalLM": LibraryFamily("mixtral"),
    "NemotronForCausalLM": LibraryFamily("nemotron"),
    "OlmoForCausalLM": LibraryFamily("olmo"),
    "Olmo2ForCausalLM": LibraryFamily("olmo2"),
    "Olmo3ForCausalLM": LibraryFamily("olmo3"),
    "OlmoeForCausalLM": LibraryFamily("olmoe"),
    "PhiForCausalLM": LibraryFamily("phi"),
    "Phi3ForCausalLM": LibraryFamily("phi3"),
    "Qwen3MoeForCausalLM": LibraryFamily("qwen3_moe"),
    "SeedOssForCausalLM": LibraryFamily("seed_oss", {"head_dim": 128}),
    "StableLmForCausalLM": LibraryFamily("stablelm"),
    "Starcoder2ForCausalLM": LibraryFamily("starcoder2"),
}
"""By architecture: those whose numbers the tests compare with the library's own."""

GGUF: dict[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""``general.architecture`` of a GGUF file that can be imported → the architecture it becomes."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a ``config.json`` says of a model's size."""

    architecture: str
    runner: Runner
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context in tokens."""
    tied: bool
    """Whether the head is the embedding."""

    @property
    def kv_values(self) -> int:
        """Numbers that the keys and values of one token are, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def outline(config: Mapping[str, Any]) -> Outline:
    """Raises :class:`ModelLoadError`: ``unsupported`` names the architecture or the feature, ``damaged`` the missing or
    impossible number."""
    architecture, runner = runner_of(config)
    if runner == "native":
        values = {**COMMON_DEFAULTS, **NATIVE[architecture].defaults, **config}
        refuse_unsupported_features(architecture, values)
        rotary = rotary_section(values, values["rope_theta_default"])
        context = longest_context(named_context(values), rotary)
    else:
        values = {"tie_word_embeddings": True, **library_config(config)}
        context, _ = library_context(values)
    hidden_size, num_heads = count(values, "hidden_size"), count(values, "num_attention_heads")
    return Outline(
        architecture=architecture,
        runner=runner,
        num_layers=num_layers(values),
        hidden_size=hidden_size,
        intermediate_size=count(values, "intermediate_size"),
        num_kv_heads=num_kv_heads(values),
        head_dim=head_dim(values, hidden_size, num_heads),
        max_position=context,
        tied=bool(values["tie_word_embeddings"]),
    )


def runner_of(config: Mapping[str, Any]) -> tuple[str, Runner]:
    """The architecture that ``config.json`` names, and what computes it. Raises :class:`ModelLoadError`."""
    listed = config.get("architectures") or []
    if not isinstance(listed, str | list):
        raise damaged(f"architectures is {shown(listed)}; it must be a list of names")
    named = [listed] if isinstance(listed, str) else [str(name) for name in listed]
    for name in named:
        if name in NATIVE:
            return name, "native"
        if name in TRANSFORMERS:
            return name, "transformers"
    model_type = config.get("model_type")
    if not named:
        for name, family in NATIVE.items():
            if family.model_type == model_type:
                return name, "native"
        for name, borrowed in TRANSFORMERS.items():
            if borrowed.model_type == model_type:
                return name, "transformers"
    if not named and not model_type:
        raise damaged("it names no architecture (neither architectures nor model_type)")
    raise ModelLoadError(
        f"The architecture {_written(named, model_type)} is not supported{_reason(config)}. "
        f"Batchscope runs {', '.join(NATIVE)} and, through the Transformers library, {len(TRANSFORMERS)} more.",
        "unsupported",
    )


def _written(named: list[str], model_type: Any) -> str:
    text = ", ".join(named) or str(model_type)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"


_LONGEST_NAME = 200
_RECURRENT = ("mamba", "rwkv", "linear", "recurrent", "conv", "ssm", "xlstm", "retention", "deltanet")
"""Parts of names of model types, layer types and keys that tell of a state beside keys and values."""
_SENSES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "audio_token_id", "image_token_id")


def _reason(config: Mapping[str, Any]) -> str:
    """Why a model that is in no table is of a kind that Batchscope does not run, as a clause; empty: for no reason but
    that nobody has tried."""
    layer_types = config.get("layer_types") or config.get("layers_block_type") or ()
    words = [str(config.get("model_type")), *config, *(map(str, layer_types) if isinstance(layer_types, list) else ())]
    if config.get("is_encoder_decoder"):
        return ": it is an encoder-decoder model, and Batchscope runs decoders alone"
    if any(key in config for key in _SENSES):
        return ": it takes pictures or sound, and Batchscope runs models of text"
    if any(part in word.lower() for word in words for part in _RECURRENT):
        return ": some of its layers keep a state of another kind than keys and values, which has no blocks to lie in"
    if "kv_lora_rank" in config:
        return ": it compresses its keys and values (multi-head latent attention), which has a cache of its own"
    if config.get("auto_map"):
        return ": it comes with code of its own (auto_map), and Batchscope never runs code of a checkpoint"
    return ""


_NOT_OURS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "auto_map",
    "custom_generate",
    "distributed_config",
    "dtype",
    "fusion_config",
    "torch_dtype",
    "transformers_weights",
)
"""Keys of a ``config.json`` by which it would choose code or files for the library, or the type it computes in."""


def library_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the Transformers library is to build a model of ``TRANSFORMERS`` from: the text part of ``config``, without
    what would make it load code. Raises :class:`ModelLoadError`."""
    architecture, _ = runner_of(config)
    family = TRANSFORMERS[architecture]
    refuse_quantised(config)
    own = config
    if family.model_class:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise damaged(f"text_config is {shown(text)}; it must describe the text part of the model")
        own = text
        if "tie_word_embeddings" in config:
            own = {**own, "tie_word_embeddings": config["tie_word_embeddings"]}
        refuse_quantised(own)
    kept = {name: value for name, value in own.items() if name not in _NOT_OURS}
    return {**family.defaults, **kept, "model_type": family.model_type}


_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


def text_names(config: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """By the name that the library knows each weight by, its name in the files; of a model of which the text part alone
    is run, only those of the text part."""
    architecture, _ = runner_of(config)
    if not TRANSFORMERS[architecture].model_class:
        return {name: name for name in stored}
    names = {}
    for name in stored:
        if _OTHER_PARTS.match(name):
            continue
        own = name
        for begin, becomes in _TEXT_PREFIXES:
            if name.startswith(begin):
                own = becomes + name.removeprefix(begin)
        names[own] = name
    return names


def library_context(values: Mapping[str, Any]) -> tuple[int, str]:
    """The longest context of a model that the library computes, in tokens, and why that is shorter than the
    checkpoint's own (empty where it is not).

    LongRoPE has other rotary positions for long contexts than for short ones, and what is in the cache cannot follow
    when a context grows from the one to the other.
    """
    named = named_context(values)
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise damaged(f"rope_scaling is {shown(scaling)}; it must be an object")
    for section in (scaling, *(part for part in scaling.values() if isinstance(part, Mapping))):
        if (section.get("rope_type") or section.get("type")) in ("longrope", "su"):
            holder = section if "original_max_position_embeddings" in section else values
            if holder.get("original_max_position_embeddings") is None:
                continue
            original = named_context(holder, "original_max_position_embeddings")
            if original < named:
                reason = f"contexts end at {original:,} tokens, where LongRoPE changes to other positions"
                return original, reason
    return named, ""


def refuse_unsupported_features(architecture: str, values: Mapping[str, Any]) -> None:
    """Of a native family. Raises :class:`ModelLoadError`."""
    if values["hidden_act"] not in ("silu", "swish"):
        raise ModelLoadError(
            f"{architecture} with the activation {shown(values['hidden_act'])} is not supported; only silu is.",
            "unsupported",
        )
    refuse_quantised(values)


def refuse_quantised(values: Mapping[str, Any]) -> None:
    quantisation = values.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        method = method if isinstance(method, str) and len(method) <= _LONGEST_NAME else "an unnamed method"
        raise ModelLoadError(
            f"This checkpoint is quantised ({method}), which is not supported; take the float16 or bfloat16 one.",
            "unsupported",
        )

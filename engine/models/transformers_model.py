"""A model of the Transformers library, looked at before any weight is read.

The model is built without memory (torch's ``meta`` device), and one step runs through it with an attention that only
writes down what comes by::

    config.json ─▶ model on meta ─▶ step ─▶ per attention: module, heads, sizes, mask ─▶ TransformersSpec
                                                  │
                                                  └─ anything that paged attention does not do: refused by name

No code comes from a checkpoint: models are classes of the installed library, found by their name in
:data:`engine.models.families.TRANSFORMERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.failures import describe
from engine.models.config_values import damaged, num_layers
from engine.models.errors import ModelLoadError
from engine.models.families import TRANSFORMERS, library_config, library_context, runner_of
from engine.models.transformers_spec import AttentionLayer, TransformersSpec
from engine.quick_import import import_the_rest

PAGED = "batchscope_paged"
"""Name under which the library knows our attention; it makes no masks for it."""
_PROBE = "batchscope_probe"
_PROBE_TOKENS = 4
_UNDERSTOOD = {"dropout", "scaling", "softcap", "sliding_window", "is_causal"}
"""What a model may hand to its attention beside queries, keys, values and mask, and what paged attention does with it:
the window is taken from the mask, and there is no dropout."""
_PASSING_BY = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "logits_to_keep",
}
"""What is handed down to the attention because it is handed to everybody."""


def inspect_model(config: Mapping[str, Any], dtype: torch.dtype) -> TransformersSpec:
    """The model that a checkpoint's ``config.json`` describes, to be computed in ``dtype``.

    Raises :class:`ModelLoadError`: ``unsupported`` where it cannot be run with paged attention, ``damaged`` where the
    library makes nothing of the configuration, ``other`` where it is not installed.
    """
    architecture, _ = runner_of(config)
    library = the_library()
    own = library_config(config)
    if "num_hidden_layers" in own:
        num_layers(own)  # before so many are built
    context, limit_reason = library_context(own)
    seen = _Seen(context)
    library.AttentionInterface.register(_PROBE, seen.attention)
    library.AttentionMaskInterface.register(_PROBE, seen.mask)
    try:
        with torch.device("meta"):
            model = build(architecture, own, _PROBE).to(torch.bfloat16)
    except ModelLoadError:
        raise
    except Exception as error:  # the library looks at few of the values before it computes with them
        raise damaged(f"Transformers makes no {architecture} of it ({describe(error)})") from error
    tokens = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            # With a mask of ones nobody looks for several texts in the row, which needs numbers.
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    except ModelLoadError:
        raise
    except Exception as error:
        raise _refusal(architecture, f"a step of it fails ({describe(error)})") from error
    accepted = inspect.signature(model.forward).parameters
    if not {"position_ids", "logits_to_keep"} <= accepted.keys():
        raise _refusal(architecture, "it cannot be told the positions of its tokens")
    return TransformersSpec(
        architecture=architecture,
        config=own,
        library=f"Transformers {library.__version__}",
        vocab_size=int(logits.shape[-1]),
        max_position=context,
        limit_reason=limit_reason,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype,
        layers=seen.layers(architecture, model),
    )


def the_library() -> Any:
    """Transformers, which takes seconds to import, silent. Raises :class:`ModelLoadError` where it is missing."""
    import_the_rest()
    try:
        import transformers
    except ImportError as error:
        raise ModelLoadError(
            f"This model runs through the Transformers library, which cannot be imported ({describe(error)}); install "
            "it with 'pip install transformers'.",
            "other",
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def build(architecture: str, config: Mapping[str, Any], attention: str) -> Any:
    """The library's model with random weights. ``config`` as :func:`engine.models.families.library_config` gives it."""
    model = model_class(architecture)(build_config(architecture, config, attention)).eval()
    freeze_rotary(model)
    return model


def model_class(architecture: str) -> Any:
    """Raises :class:`ModelLoadError` where the installed library does not have it."""
    library, name = the_library(), TRANSFORMERS[architecture].model_class or architecture
    found = getattr(library, name, None)
    if found is None:
        raise ModelLoadError(
            f"{architecture} runs through the Transformers library, and the installed {library.__version__} does not "
            "have it; install a newer one with 'pip install -U transformers'.",
            "unsupported",
        )
    return found


def build_config(architecture: str, config: Mapping[str, Any], attention: str) -> Any:
    """The library's configuration object. Raises :class:`ModelLoadError` with what it does not like."""
    kind = model_class(architecture).config_class
    try:
        built = kind.from_dict(dict(config))
    except Exception as error:
        raise ModelLoadError(f"config.json: {describe(error)}.", "damaged") from error
    built._attn_implementation = attention
    return built


def freeze_rotary(model: Any) -> None:
    """Rotary frequencies as they were built, whatever the longest context of a step: the answer of one request must not
    depend on another's length. Exact up to the context of the :class:`TransformersSpec`."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            module.rope_type = dict.fromkeys(kinds, "default")


class _Seen:
    """What came by in one step."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._windows: list[tuple[torch.Tensor, int | str | None]] = []
        """Each mask that was handed out, and its window; a string: why it has none."""
        self._calls: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None, set[str]]] = []

    def mask(self, *, kv_length: int, mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
        mask = torch.empty((1, 1, _PROBE_TOKENS, kv_length), dtype=torch.bool, device="meta")
        try:
            with torch.device("cpu"):
                window = window_of(mask_function, self._context)
        except Exception as error:
            window = describe(error)
        self._windows.append((mask, window))
        return mask

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = {
            name
            for name, argument in given.items()
            if name not in _UNDERSTOOD | _PASSING_BY and argument is not None and argument is not False
        }
        self._calls.append((module, key, value, attention_mask, unknown))
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None

    def layers(self, architecture: str, model: Any) -> tuple[AttentionLayer, ...]:
        names = {id(module): name for name, module in model.named_modules()}
        found = []
        for module, key, value, mask, unknown in self._calls:
            if unknown:
                raise _refusal(architecture, f"its attention uses {', '.join(sorted(unknown))}")
            windows = [window for known, window in self._windows if known is mask]
            if not windows:
                raise _refusal(architecture, "it makes a mask of its own")
            if isinstance(windows[0], str):
                raise _refusal(architecture, f"its mask is no window over what came before ({windows[0]})")
            _, heads, _, key_dim = key.shape
            found.append(AttentionLayer(names[id(module)], heads, key_dim, value.shape[3], windows[0]))
        wanted = model.config.num_hidden_layers
        if len({layer.module for layer in found}) != wanted or len(found) != wanted:
            raise _refusal(architecture, f"{len(found)} of its {wanted} layers call the attention that can be replaced")
        return tuple(found)


def window_of(mask_function: Callable[..., torch.Tensor], context: int) -> int | str | None:
    """The window of a mask of the library's, a function of (batch, head, query, key): None where a query sees all keys
    up to its own, a sentence where it sees anything else."""

    def seen(position: int) -> torch.Tensor:
        keys = torch.arange(min(position + 2, context))
        return torch.as_tensor(mask_function(0, 0, torch.tensor(position), keys)).expand(keys.shape)

    last = context - 1
    width = int(seen(last).sum())
    for position in sorted({0, 1, width - 1, width, width + 1, 2 * width + 3, last // 2, last}):
        if 0 <= position <= last:
            keys = torch.arange(min(position + 2, context))
            if not torch.equal(seen(position), (keys <= position) & (keys > position - width)):
                return f"of {position:,} tokens before it a token does not see the last {width:,}"
    return None if width == context else width


def _refusal(architecture: str, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{architecture} cannot run with paged attention in Transformers {the_library().__version__}: {why}.",
        "unsupported",
    )

"""What the Models page computes of an entry: what it needs, what there is, and whether that fits. No Qt."""

from __future__ import annotations

from dataclasses import dataclass

from app.translation import ntr, tr
from app.words import bytes_label
from engine.model_catalog import SMALL_POOL_TOKENS, Machine, ModelEntry, default_dtype

SMALLEST_CONTEXT = 16
"""Tokens of one block: with less nothing is answered."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for: by the preferences, and by the fields of the page."""

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    context: int = 4096
    """Tokens of one chat, prompt and answers."""
    chats: int = 1
    limit_bytes: int | None = None
    """Most that weights and KV may take; None: what is free."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of one model, in bytes."""

    dtype: str
    weights: int
    kv: int
    working: int
    room: int
    """What there is for all of it."""
    tokens: int
    """That the KV is for."""
    fitting_tokens: int
    """That there is room for beside the weights, at most those the model can use; 0: not even the weights fit."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.working

    @property
    def loads(self) -> bool:
        """Whether the weights fit, and some KV."""
        return self.fitting_tokens >= SMALLEST_CONTEXT

    @property
    def fits(self) -> bool:
        """All of it."""
        return self.loads and self.fitting_tokens >= self.tokens


def on_gpu(wanted: Wanted, machine: Machine) -> bool:
    return wanted.device == "cuda" or (wanted.device == "auto" and bool(machine.gpu_name))


def need_of(entry: ModelEntry, wanted: Wanted, machine: Machine | None) -> Need | None:
    """None: the entry, or the machine, does not say enough."""
    if machine is None or not entry.weight_bytes:
        return None
    gpu = on_gpu(wanted, machine)
    dtype = default_dtype("cuda" if gpu else "cpu") if wanted.dtype == "auto" else wanted.dtype
    room = machine.gpu_free_bytes if gpu else machine.free_bytes + machine.engine_bytes
    if dtype not in entry.weight_bytes:  # the Transformers library has no int8: see engine.execution.device
        dtype = "float32" if 2 * entry.weight_bytes["float32"] <= room else "bfloat16"
    weights, working = entry.weight_bytes[dtype], entry.working_bytes
    if wanted.limit_bytes is not None:
        room = min(room, wanted.limit_bytes + working)
    small_pool = min(SMALL_POOL_TOKENS, entry.max_position or SMALL_POOL_TOKENS)
    least = weights + working + entry.kv_bytes(dtype, small_pool, wanted.kv_dtype)
    if gpu and wanted.dtype == "auto" and least > room and "int8" in entry.weight_bytes:
        dtype, weights = "int8", entry.weight_bytes["int8"]
    context = min(wanted.context, entry.max_position) if entry.max_position else wanted.context
    tokens = context * wanted.chats
    per_token = max(1, entry.kv_bytes(dtype, 1, wanted.kv_dtype))
    fitting = max(0, (room - weights - working) // per_token)
    kv = entry.kv_bytes(dtype, tokens, wanted.kv_dtype)
    return Need(dtype, weights, kv, working, room, tokens, fitting)


def verdict(need: Need, wanted: Wanted) -> str:
    """Whether it fits, as a sentence with the numbers and the way out."""
    if not need.loads:
        least = need.weights + need.working
        if wanted.limit_bytes is not None and need.room == wanted.limit_bytes + need.working:
            return tr(
                "Does not fit: it needs {least} in {dtype}, and the memory limit of the preferences leaves {room}.",
                least=bytes_label(least),
                dtype=need.dtype,
                room=bytes_label(need.room),
            )
        return tr(
            "Does not fit: it needs {least} in {dtype}, and {room} are free. Close other programs, choose int8, or a "
            "smaller model.",
            least=bytes_label(least),
            dtype=need.dtype,
            room=bytes_label(need.room),
        )
    if not need.fits:
        return tr(
            "The model fits, with room for {tokens:,} tokens: that many chats of that length wait for each other.",
            tokens=need.fitting_tokens,
        )
    return tr("Fits: {total} of {room} free.", total=bytes_label(need.total), room=bytes_label(need.room))


def parameters_label(count: int) -> str:
    """``135 M``, ``1.7 B``, ``70 B``; empty for 0."""
    if not count:
        return ""
    if count < 999_500:
        return f"{count:,}"
    if count < 999_500_000:
        return f"{count / 1e6:,.0f} M" if count >= 9_950_000 else f"{count / 1e6:.1f} M"
    return f"{count / 1e9:,.0f} B" if count >= 9.95e9 else f"{count / 1e9:.1f} B"


def family_label(architecture: str) -> str:
    """``Llama`` of ``LlamaForCausalLM``."""
    for end in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
        architecture = architecture.removesuffix(end)
    return architecture


def chats_label(chats: int) -> str:
    return ntr("{count:,} chat", "{count:,} chats", chats)

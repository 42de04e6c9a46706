"""The scheduler's knobs in words: what each is called, what its values mean, how they are written. Qt-free."""

from __future__ import annotations

from app.translation import tr
from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS

KNOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "discipline": (tr("Discipline: who joins the batch, and when"), DISCIPLINES),
    "order": (tr("Order of the waiting queue"), ORDERS),
    "preemption": (tr("Preemption: what happens to a request whose memory is taken"), PREEMPTIONS),
}
"""Field of :class:`SchedulerConfig` -> what it is, and its values."""
MEANINGS: dict[str, dict[str, str]] = {
    "discipline": {
        "static": tr("a batch joins and leaves together, padded to its longest; rows that are over run on"),
        "orca": tr("joins at every step, whole prompts; memory is reserved up to max_tokens"),
        "vllm": tr("joins at every step, prompts in chunks; memory block by block, the last in line is preempted"),
        "tgi": tr("the waiting join once they are many enough; their prefill pauses decoding"),
        "trtllm-no-evict": tr("joins once the memory for its whole answer is sure; nobody is preempted"),
        "trtllm-max-util": tr("as many join as fit now; the newest is paused when memory is gone"),
    },
    "order": {
        "fcfs": tr("first come, first served"),
        "priority": tr("the lower number first; waiting counts where ageing is set"),
        "fair": tr("first the user who was served least, by weight"),
    },
    "preemption": {
        "recompute": tr("its blocks are freed, its tokens computed again"),
        "swap": tr("its blocks move to host memory and back"),
        "auto": tr("whichever of the two is estimated to take less time"),
    },
}
"""In a few words, as far as there are any: a discipline is a file, and its name alone will do."""
NAMES: dict[str, str] = {
    "discipline": tr("discipline"),
    "order": tr("order"),
    "preemption": tr("preemption"),
    "max_num_seqs": tr("max sequences"),
    "max_num_batched_tokens": tr("budget"),
    "chunked_prefill": tr("chunked prefill"),
    "chunk_size": tr("chunk size"),
    "watermark": tr("watermark"),
    "ageing": tr("ageing"),
    "user_weights": tr("user weights"),
    "static_delivery": tr("static delivery"),
    "waiting_served_ratio": tr("waiting-served ratio"),
    "max_waiting_tokens": tr("max waiting tokens"),
    "speculative": tr("speculation"),
    "draft_tokens": tr("draft tokens"),
}
"""What each knob is called in the window, by its field of :class:`SchedulerConfig`."""
UNSET: dict[str, str] = {
    "max_num_batched_tokens": tr("auto"),
    "chunk_size": tr("the budget's rest"),
    "ageing": tr("none"),
}
"""What a knob without a value does."""


def meaning(knob: str, value: str) -> str:
    """``name: what it does``, or the name alone."""
    words = MEANINGS[knob].get(value)
    return f"{value}: {words}" if words else value


def value_text(knob: str, value: object) -> str:
    """A knob's value for people: ``1,024``, ``on``, ``auto``."""
    if value is None:
        return UNSET.get(knob, tr("none"))
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{user} {weight:g}" for user, weight in value.items()) or tr("equal")
    return str(value)

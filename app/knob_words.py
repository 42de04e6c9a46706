"""The scheduler's knobs in words: what each is called, what its values mean, how they are written. Qt-free."""

from __future__ import annotations

from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS

KNOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "discipline": ("Discipline: who joins the batch, and when", DISCIPLINES),
    "order": ("Order of the waiting queue", ORDERS),
    "preemption": ("Preemption: what happens to a request whose memory is taken", PREEMPTIONS),
}
"""Field of :class:`SchedulerConfig` -> what it is, and its values."""
MEANINGS: dict[str, dict[str, str]] = {
    "discipline": {
        "static": "a batch joins and leaves together, padded to its longest; rows that are over run on",
        "orca": "joins at every step, whole prompts; memory is reserved up to max_tokens",
        "vllm": "joins at every step, prompts in chunks; memory block by block, the last in line is preempted",
        "tgi": "the waiting join once they are many enough; their prefill pauses decoding",
        "trtllm-no-evict": "joins once the memory for its whole answer is sure; nobody is preempted",
        "trtllm-max-util": "as many join as fit now; the newest is paused when memory is gone",
    },
    "order": {
        "fcfs": "first come, first served",
        "priority": "the lower number first; waiting counts where ageing is set",
        "fair": "first the user who was served least, by weight",
    },
    "preemption": {
        "recompute": "its blocks are freed, its tokens computed again",
        "swap": "its blocks move to host memory and back",
        "auto": "whichever of the two is estimated to take less time",
    },
}
"""In a few words, as far as there are any: a discipline is a file, and its name alone will do."""
NAMES: dict[str, str] = {
    "discipline": "discipline",
    "order": "order",
    "preemption": "preemption",
    "max_num_seqs": "max sequences",
    "max_num_batched_tokens": "budget",
    "chunked_prefill": "chunked prefill",
    "chunk_size": "chunk size",
    "watermark": "watermark",
    "ageing": "ageing",
    "user_weights": "user weights",
    "static_delivery": "static delivery",
    "waiting_served_ratio": "waiting-served ratio",
    "max_waiting_tokens": "max waiting tokens",
    "speculative": "speculation",
    "draft_tokens": "draft tokens",
}
"""What each knob is called in the window, by its field of :class:`SchedulerConfig`."""
UNSET: dict[str, str] = {
    "max_num_batched_tokens": "auto",
    "chunk_size": "the budget's rest",
    "ageing": "none",
}
"""What a knob without a value does."""


def meaning(knob: str, value: str) -> str:
    """``name: what it does``, or the name alone."""
    words = MEANINGS[knob].get(value)
    return f"{value}: {words}" if words else value


def value_text(knob: str, value: object) -> str:
    """A knob's value for people: ``1,024``, ``on``, ``auto``."""
    if value is None:
        return UNSET.get(knob, "none")
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{user} {weight:g}" for user, weight in value.items()) or "equal"
    return str(value)

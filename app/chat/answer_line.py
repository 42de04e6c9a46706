"""The line under an answer, in words: how it was made, how fast, and how it ended."""

from __future__ import annotations

from app.chat.conversation import Message, MessageStatus
from app.words import count
from engine.events import RequestState
from engine.request import FinishReason, RequestStatus, request_name
from engine.run_state import RunState


def describe(answer: Message, run_state: RunState) -> str:
    """E.g. ``request 61 · decode · 41 tok/s · TTFT 0.19 s · 82 tokens · 96 prompt tokens reused``."""
    live = run_state.requests.get(answer.request_id) if answer.request_id is not None else None
    timings = answer.timings
    parts = [] if answer.request_id is None else [f"request {request_name(answer.request_id)}"]
    parts.append(_state(answer, live))
    if timings.tokens_per_second is not None:
        parts.append(f"{_figure(timings.tokens_per_second)} tok/s")
    if timings.ttft is not None:
        parts.append(f"TTFT {_figure(timings.ttft)} s")
    if timings.tokens:
        parts.append(count(timings.tokens, "token"))
    reused = live.cached_tokens if live is not None else timings.cached_tokens
    if reused:
        parts.append(f"{count(reused, 'prompt token')} reused")
    preemptions = live.preemptions if live is not None else timings.preemptions
    if preemptions:
        parts.append(f"preempted {preemptions}×")
    return " · ".join(parts)


def explain(answer: Message) -> str:
    """A sentence where an answer did not come whole; else empty."""
    if answer.damage:
        return f"This answer could not be read from disk and is kept there as it is ({answer.damage})."
    if answer.status is MessageStatus.INCOMPLETE:
        return answer.error or "This answer is incomplete."
    if answer.status is MessageStatus.ERROR:
        return answer.error or "The engine could not answer this."
    if answer.status is MessageStatus.COMPLETE and answer.finish_reason == FinishReason.LENGTH:
        return _cut_sentence(answer)
    if not answer.text.strip() and not answer.status.is_open:
        stopped = answer.status is MessageStatus.STOPPED
        return "Stopped before the first word." if stopped else "The model ended its answer without a word."
    return ""


def _cut_sentence(answer: Message) -> str:
    limit = answer.params.max_tokens if answer.params is not None else None
    if limit is not None and answer.timings.tokens >= limit:
        return f"Cut at max tokens ({limit:,}); raise it under Options for longer answers."
    return "Cut where the model's context ends; start a new chat or delete earlier turns for more room."


def _state(answer: Message, live: RequestState | None) -> str:
    if answer.status is MessageStatus.QUEUED:
        return "waits for the model"
    if answer.status is not MessageStatus.STREAMING:
        if answer.status is MessageStatus.COMPLETE and answer.finish_reason == FinishReason.LENGTH:
            return "cut by length"
        return _STATUS_WORDS[answer.status]
    if live is None:  # the record that admits or finishes it is still on its way
        return "decode" if answer.timings.tokens else "sent"
    if live.status == RequestStatus.RUNNING:
        return "prefill" if live.first_token_time is None else "decode"
    return RequestStatus(live.status).name.lower()


_STATUS_WORDS = {
    MessageStatus.COMPLETE: "finished",
    MessageStatus.STOPPED: "stopped",
    MessageStatus.INCOMPLETE: "incomplete",
    MessageStatus.ERROR: "not answered",
}


def _figure(value: float) -> str:
    """Three figures that matter: 0.19, 4.2, 41, 412."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"

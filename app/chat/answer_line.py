"""The line under an answer, in words: how it was made, how fast, and how it ended."""

from __future__ import annotations

from app.chat.conversation import Message, MessageStatus, context_ended
from app.translation import mark, ntr, tr
from engine.events import RequestState
from engine.request import FinishReason, RequestStatus, request_name
from engine.run_state import RunState


def describe(answer: Message, run_state: RunState) -> str:
    """E.g. ``request 61 · decode · 41 tok/s · TTFT 0.19 s · 82 tokens · 96 prompt tokens reused``."""
    live = run_state.requests.get(answer.request_id) if answer.request_id is not None else None
    timings = answer.timings
    parts = [] if answer.request_id is None else [tr("request {name}", name=request_name(answer.request_id))]
    parts.append(_state(answer, live))
    if timings.tokens_per_second is not None:
        parts.append(tr("{pace} tok/s", pace=_figure(timings.tokens_per_second)))
    if timings.ttft is not None:
        parts.append(tr("TTFT {seconds} s", seconds=_figure(timings.ttft)))
    if timings.tokens:
        parts.append(ntr("{count:,} token", "{count:,} tokens", timings.tokens))
    reused = live.cached_tokens if live is not None else timings.cached_tokens
    if reused:
        parts.append(ntr("{count:,} prompt token reused", "{count:,} prompt tokens reused", reused))
    preemptions = live.preemptions if live is not None else timings.preemptions
    if preemptions:
        parts.append(tr("preempted {count}×", count=preemptions))
    if answer.dropped:
        parts.append(ntr("not told {count:,} message", "not told the {count:,} oldest messages", answer.dropped))
    return " · ".join(parts)


def details(answer: Message) -> str:
    """What there is no room for in the line: the model, how it was sampled, why it ended."""
    lines = []
    if answer.model:
        lines.append(tr("Model: {name}", name=answer.model))
    if answer.finish_reason:
        lines.append(tr("Finish reason: {reason}", reason=answer.finish_reason))
    if answer.timings.prompt_tokens:
        prompt = ntr("Prompt: {count:,} token", "Prompt: {count:,} tokens", answer.timings.prompt_tokens)
        reused = tr("of them {count:,} from the prefix cache", count=answer.timings.cached_tokens)
        lines.append(f"{prompt}, {reused}")
    params = answer.params
    if params is not None:
        sampled = [
            f"temperature {params.temperature:g}",
            f"top_p {params.top_p:g}",
            f"top_k {params.top_k}",
            f"min_p {params.min_p:g}",
        ]
        if params.seed is not None:
            sampled.append(f"seed {params.seed}")
        lines.append(tr("Sampling: {params}", params=", ".join(sampled)))
    return "\n".join(lines)


def is_cut(answer: Message) -> bool:
    """Whether the model had more to say."""
    return answer.status is MessageStatus.COMPLETE and answer.finish_reason == FinishReason.LENGTH


def explain(answer: Message, *, is_thinking: bool = False) -> str:
    """A sentence where an answer did not come whole; else empty. ``is_thinking``: its thought has no end."""
    if answer.damage:
        return tr("This answer could not be read from disk and is kept there as it is ({why}).", why=answer.damage)
    if answer.status is MessageStatus.INCOMPLETE:
        return answer.error or tr("This answer is incomplete.")
    if answer.status is MessageStatus.ERROR:
        return answer.error or tr("The engine could not answer this.")
    if is_cut(answer):
        return _cut_sentence(answer)
    stopped = answer.status is MessageStatus.STOPPED
    if not answer.text.strip() and not answer.status.is_open:
        return tr("Stopped before the first word.") if stopped else tr("The model ended its answer without a word.")
    if is_thinking and not answer.status.is_open:
        return tr("Stopped while it was thinking.") if stopped else tr("The model thought and gave no answer.")
    return ""


def _cut_sentence(answer: Message) -> str:
    if answer.error:
        return answer.error
    limit = answer.params.max_tokens if answer.params is not None else None
    if limit is not None and answer.timings.tokens >= limit:
        return tr("Cut at max tokens ({limit:,}); let it continue, or raise it under Options.", limit=limit)
    return context_ended()


def _state(answer: Message, live: RequestState | None) -> str:
    if answer.status is MessageStatus.QUEUED:
        return tr("waits for the model")
    if answer.status is not MessageStatus.STREAMING:
        return tr("cut by length") if is_cut(answer) else tr(_STATUS_WORDS[answer.status])
    if live is None:  # the record that admits or finishes it is still on its way
        return tr("decode") if answer.timings.tokens else tr("sent")
    if live.status == RequestStatus.RUNNING:
        return tr("prefill") if live.first_token_time is None else tr("decode")
    return tr(_REQUEST_WORDS[RequestStatus(live.status)])


_STATUS_WORDS = {
    MessageStatus.COMPLETE: mark("finished"),
    MessageStatus.STOPPED: mark("stopped"),
    MessageStatus.INCOMPLETE: mark("incomplete"),
    MessageStatus.ERROR: mark("not answered"),
}
_REQUEST_WORDS = {
    RequestStatus.WAITING: mark("waiting"),
    RequestStatus.PREEMPTED: mark("preempted"),
    RequestStatus.SWAPPED: mark("swapped"),
    RequestStatus.FINISHED: mark("finished"),
    RequestStatus.ENDED: mark("ended"),
}


def _figure(value: float) -> str:
    """Three figures that matter: 0.19, 4.2, 41, 412."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"

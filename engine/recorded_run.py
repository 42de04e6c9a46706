"""A recorded run as a benchmark would tell of it, and as a workload that can be run again. Light.

``from_step`` cuts both alike, so that the original can stand beside what is run from there on::

    recorded     ──r1──────────│───▶            r1 is alive at the step: it comes at 0, whole
                        ──r2───│──────▶         so does r2
                               │   ──r3────▶    r3 comes as long after the step as it did
                           from_step
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.events import Keyframe
from engine.lanes import Lanes
from engine.metrics import RequestTimeline, summarise
from engine.recorded_requests import RecordedRequest, RequestLog, by_arrival
from engine.recording import RecordingError, RunReader
from engine.spans import LANES_SAVED, saved_lane
from engine.step_counters import StepCounters, ratio
from engine.variants import knobs_of
from engine.workload import Workload, WorkloadRequest

VARIANT = "recorded"
_PIECE_SEEDS = 1 << 40
"""Seeds of shared pieces lie beyond those of whole prompts."""


# Running it again ----------------------------------------------------------------------------------------------------


def recorded_workload(reader: RunReader, from_step: int | None = None) -> Workload:
    """The requests of a run as they came, with synthetic prompts of their lengths that share what they shared.

    An answer is as long as it was; one that was aborted, or had not ended, as long as it had become. Refused requests
    are left out. Goes through the whole file. Raises :class:`RecordingError`: also where no request is left.
    """
    _, requests, begun = _requests_of(reader, from_step)
    again = [r for r in requests if r.prompt_tokens]
    if not again:
        after = "" if from_step is None else f" alive at step {from_step:,} or after it"
        raise RecordingError(f"{reader.path} tells of no request{after}: there is nothing to run again")
    start = _start(reader, again, from_step)
    pieces = shared_prefixes([request.prefix for request in again], begun.block_size)
    return Workload(
        reader.header.workload or VARIANT,
        tuple(
            WorkloadRequest(
                output_tokens=max(request.output_tokens, 1),
                prompt_tokens=request.prompt_tokens,
                max_tokens=max(request.max_tokens, request.output_tokens, 1),
                arrival_s=max(request.arrival - start, 0.0),
                priority=request.priority,
                user=request.user,
                seed=index,
                prefix=prefix,
            )
            for index, (request, prefix) in enumerate(zip(again, pieces, strict=True))
        ),
    )


def shared_prefixes(digests: Sequence[list[int]], block_size: int) -> list[tuple[tuple[int, int], ...]]:
    """For each prompt, by the chained digests of its full blocks, the (tokens, seed) of the pieces that it has in
    common with others: equal digests at the same place become equal pieces. A piece ends where the prompts part."""
    counts = Counter(place for chain in digests for place in enumerate(chain))
    result = []
    for chain in digests:
        sharers = [counts[place] for place in enumerate(chain)]
        pieces: list[tuple[int, int]] = []
        begin = 0
        for end in range(1, len(chain) + 1):
            if sharers[end - 1] < 2:
                break
            if end == len(chain) or sharers[end] != sharers[end - 1]:
                pieces.append(((end - begin) * block_size, _PIECE_SEEDS + chain[end - 1]))
                begin = end
        result.append(tuple(pieces))
    return result


def _requests_of(reader: RunReader, from_step: int | None) -> tuple[RequestLog, list[RecordedRequest], Keyframe]:
    """The log of the whole run, the requests alive at a step or after it in order of arrival, the state it began in."""
    gone: list[RecordedRequest] = []
    log = RequestLog(gone.append, priorities_until=from_step)
    begun: Keyframe | None = None
    for part in reader.replay():
        if isinstance(part, Keyframe):
            begun = begun or part
            log.restore(part)
        else:
            log.apply(part)
    if begun is None:
        raise RecordingError(f"{reader.path} has no whole step: there is nothing to tell of it")
    known = by_arrival([*gone, *log.open.values()])
    if from_step is not None:
        known = [r for r in known if r.ended_step is None or r.ended_step > from_step]
    # A refused request came to nothing: whoever runs the others again has them at the same places without it.
    known.sort(key=lambda request: request.prompt_tokens == 0)
    return log, known, begun


def _start(reader: RunReader, requests: Sequence[RecordedRequest], from_step: int | None) -> float:
    """The zero of the run's times, engine clock."""
    if from_step is not None:
        return reader.end_of(from_step)
    return min((request.arrival for request in requests), default=0.0)


# Telling of it -------------------------------------------------------------------------------------------------------


def recorded_result(reader: RunReader, from_step: int | None = None) -> dict[str, Any]:
    """What :func:`engine.bench.run_bench` gives of a run, as far as a recording tells it, with ``variant``
    ``recorded`` and a ``timeline`` as a comparison has them.

    With ``from_step`` times count from the end of that step. Latencies are still from a request's real arrival, which
    may have been before; tokens and throughput are of what came after. Goes through the whole file. Raises
    :class:`RecordingError`.
    """
    log, requests, whole = _requests_of(reader, from_step)
    start = _start(reader, requests, from_step)
    begun = whole if from_step is None else reader.state_at(from_step).keyframe()
    counters, lanes = _counters(reader, begun, start), Lanes()
    for part in reader.replay(from_step):
        if isinstance(part, Keyframe):
            lanes.restore(part)
        else:
            counters.add(part)
            lanes.apply(part)
    timelines = [_timeline(request, start) for request in requests]
    elapsed = max(log.end - start, 0.0)
    workload = Workload(
        reader.header.workload or VARIANT,
        tuple(WorkloadRequest(1, prompt_tokens=1, arrival_s=max(t.scheduled, 0.0)) for t in timelines),
    )
    result = {
        "date": reader.header.created,
        "workload": workload.name,
        **_engine_facts(reader, begun),
        **summarise(timelines, workload, elapsed=elapsed),
        **counters.summary(),
        "interrupted": bool(log.open),
        "failure": "",
        "first_token_at": None,
        "peak_memory_mb": None,
        "variant": VARIANT,
        "timeline": _saved_lanes(lanes, requests, start),
    }
    return result if from_step is None else result | _after_the_cut(timelines, elapsed)


def _timeline(request: RecordedRequest, start: float) -> RequestTimeline:
    times = [time - start for time in request.token_times]
    if request.earlier_first_token is not None:
        times = [request.earlier_first_token - start, *times]  # of those before the recording only the first is known
    timeline = RequestTimeline(request.arrival - start, request.priority, request.user, request.prompt_tokens)
    timeline.sent = timeline.scheduled
    timeline.admitted = None if request.admitted is None else request.admitted - start
    timeline.token_times = times
    timeline.token_ids = [0] * request.output_tokens  # only their number is recorded
    timeline.finished = None if request.finished is None else request.finished - start
    timeline.finish_reason = request.finish_reason or None
    timeline.error = request.error
    timeline.cached_tokens, timeline.preemptions = request.cached_tokens, request.preemptions
    return timeline


def _counters(reader: RunReader, begun: Keyframe, start: float) -> StepCounters:
    info = reader.header.info
    counters = StepCounters(
        begun.totals,
        num_blocks=begun.num_blocks,
        block_size=begun.block_size,
        max_num_seqs=begun.max_num_seqs,
        kv_bytes_per_block=0 if info is None else info.kv_bytes_per_block,
        start=start,
    )
    for request in begun.requests:
        counters.hold([block for block in request.blocks if block])
    return counters


def _after_the_cut(timelines: Sequence[RequestTimeline], elapsed: float) -> dict[str, Any]:
    """The totals of what came after the zero of the times."""
    done = [t for t in timelines if t.completed]
    inputs = sum(t.prompt_tokens for t in done if t.scheduled >= 0)
    outputs = sum(time > 0 for t in done for time in t.token_times)
    return {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "output_throughput": ratio(outputs, elapsed),
        "total_token_throughput": ratio(inputs + outputs, elapsed),
    }


def _engine_facts(reader: RunReader, begun: Keyframe) -> dict[str, Any]:
    info, config = reader.header.info, reader.header.config or EngineConfig()
    scheduler = begun.scheduler or config.scheduler
    facts = {
        "backend": info and info.backend,
        "backend_reason": info and info.backend_reason,
        "model_id": info and info.name,
        "weights_sha256": info and info.weights_sha256,
        "dtype": info and info.dtype,
        "kv_dtype": info and info.kv_dtype,
        "device": info and info.device,
        "threads": info and info.threads,
        "max_model_len": info and info.max_model_len,
        "load_seconds": info and info.load_seconds,
    }
    return facts | {
        "discipline": begun.discipline,
        "order": begun.order,
        "preemption": begun.preemption,
        "speculative": scheduler.speculative,
        "chunked_prefill": scheduler.chunked_prefill,
        "max_num_seqs": begun.max_num_seqs,
        "token_budget": begun.token_budget,
        "block_size": begun.block_size,
        "prefix_cache": config.cache.prefix_cache,
        "seed": None,
        "knobs": knobs_of(dataclasses.replace(config, scheduler=scheduler), begun),
    }


def _saved_lanes(lanes: Lanes, requests: Sequence[RecordedRequest], start: float) -> list[dict[str, Any]]:
    found = lanes.lanes
    return [
        saved_lane(
            number,
            found.get(request.request_id),
            start,
            priority=request.priority,
            user=request.user,
            arrival=request.arrival,
            end=request.finished,
            reason=request.finish_reason,
        )
        for number, request in enumerate(requests[:LANES_SAVED], 1)
    ]

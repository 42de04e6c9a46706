"""Output tokens a second of the whole engine, beside Transformers on the same weights, prompts and numbers of tokens.

Llama 3.2 1B's shape with random weights in bfloat16, greedy, no end before the last token, no sharing of prompts. All
requests are there at the start; the rate is all output tokens over the time from the first request handed in to the
last token handed out, the prefills included. The engine's is the best of three runs after one that is not counted,
each peer's one run after one of the same prompts that is not timed; of the peers the best counts. What graphs and
overlap give comes last, with a run less each: the best of two.

``floor of a step``: the bytes that a decode step cannot but read (every matrix once; keys and values of all contexts)
over the measured copy bandwidth; held against the median time from the beginning of a decode step to that of the next.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.events import RowKind
from engine.models.architecture import expected_tensors
from kernels.spec import DecoderSpec
from kernels.triton.backend import TritonBackend
from tests.gpu.card import Card
from tests.gpu.engines import Answered, Load, Sizes, answered, loaded_backend
from tests.gpu.figures import Report, Target
from tests.gpu.models import LLAMA_1B, TINY, Shape, library_model, random_weights
from tests.gpu.peers import Continuous, static_seconds

REQUESTS = (1, 8, 32, 128)
PROMPT = 256
OUTPUT = 128
RUNS = 4
"""Of the engine with everything on."""
SWITCHED_RUNS = 2
AGAINST_PEERS = Target(2.0)
PEER_SECONDS = 90.0
"""From the beginning of the section: no run of a peer begins after that."""
WARM_TOKENS = 8
"""Of each answer before a peer is timed: every size of a step comes up among them."""


def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    shape, requests = (TINY, (2,)) if card.rehearsal else (LLAMA_1B, REQUESTS)
    prompt, output = (3, 3) if card.rehearsal else (PROMPT, OUTPUT)
    sizes = _sizes(max(requests), prompt + output, block_size=16, token_budget=12 if card.rehearsal else 8192)
    began = time.perf_counter()
    spec = shape.spec(torch.bfloat16)
    weights = random_weights(spec, card)
    backend = loaded_backend(card, spec, weights, sizes, graphs=True)
    model = library_model(shape, weights, card.device, torch.bfloat16)
    loads = [_load(shape, count, prompt, [output] * count) for count in requests]
    rates = []
    for load in loads:
        fastest = _engine(card, report, backend, sizes, load, graphs=True, overlap=True, runs=RUNS)
        rates.append(load.total / fastest.seconds)
        _floor(report, facts, spec, fastest, load)
    _disciplines(card, report, shape, backend, sizes)
    for load, rate in zip(loads, rates, strict=True):
        peers = _peers(card, report, model, load, until=began + PEER_SECONDS)
        name = f"{len(load.prompts)} requests"
        if peers:
            report.rate(f"{name}: engine over the better peer", rate / max(peers), "×", AGAINST_PEERS)
        else:
            report.check(f"{name}, a peer", False, "no peer gave a rate")
    del model
    for graphs in (True, False):
        if not graphs:
            del backend
            card.release()
            backend = loaded_backend(card, spec, weights, sizes, graphs=False)
        for load in loads:
            for overlap in (False,) if graphs or card.rehearsal else (True, False):
                _engine(card, report, backend, sizes, load, graphs=graphs, overlap=overlap, runs=SWITCHED_RUNS)


def _sizes(requests: int, length: int, *, block_size: int, token_budget: int) -> Sizes:
    """Room for all, nobody is preempted."""
    blocks = requests * (-(-length // block_size) + 1)
    return Sizes(blocks, block_size, max_num_seqs=requests, token_budget=token_budget, max_model_len=2 * length)


def _load(shape: Shape, count: int, prompt: int, output_tokens: list[int]) -> Load:
    random = np.random.default_rng(count)
    return Load([random.integers(0, shape.vocab, prompt).tolist() for _ in range(count)], output_tokens)


def _engine(
    card: Card,
    report: Report,
    backend: TritonBackend,
    sizes: Sizes,
    load: Load,
    *,
    graphs: bool,
    overlap: bool,
    runs: int,
) -> Answered:
    """The fastest of ``runs``."""
    answers = [answered(backend, sizes, load, overlap=overlap) for _ in range(1 if card.rehearsal else runs)]
    fastest = min(answers, key=lambda each: each.seconds)
    name = f"{len(load.prompts)} requests, graphs {_switch(graphs)}, overlap {_switch(overlap)}: output tokens"
    report.rate(name, load.total / fastest.seconds, "tokens/s")
    return fastest


def _floor(report: Report, facts: dict[str, Any], spec: DecoderSpec, run: Answered, load: Load) -> None:
    steps = [
        (record, following)
        for record, following in zip(run.records, run.records[1:], strict=False)
        if len(record.kinds) == len(load.prompts) == len(following.kinds)
        and all(kind == RowKind.DECODE for kind in [*record.kinds, *following.kinds])
    ]
    if not steps:
        raise RuntimeError("no two decode steps of all requests follow each other")
    seconds = statistics.median(following.time - record.time for record, following in steps)
    contexts = statistics.mean(sum(record.num_computed) for record, _ in steps)
    num_bytes = _matrix_bytes(spec) + contexts * spec.kv_bytes_per_token()
    floor = num_bytes / facts["bandwidth"]
    name = f"{len(load.prompts)} requests"
    report.rate(f"{name}: decode step", seconds * 1e3, "ms", bytes=num_bytes, floor_seconds=floor)
    report.rate(f"{name}: floor of a step over the step", 100 * floor / seconds, "%")


def _matrix_bytes(spec: DecoderSpec) -> int:
    """Of the matrices that a step multiplies with: all but an embedding that is not the head too."""
    shapes = {name: shape for name, shape in expected_tensors(spec).items() if len(shape) == 2}
    if not spec.tie_embeddings:
        del shapes["model.embed_tokens.weight"]
    return spec.dtype.itemsize * sum(rows * columns for rows, columns in shapes.values())


def _peers(card: Card, report: Report, model: Any, load: Load, *, until: float) -> list[float]:
    """Output tokens a second of each peer that ran."""
    rates = []
    runs: dict[str, Callable[[], float]] = {
        "Transformers generate": lambda: _static(card, model, load),
        "Transformers generate_batch": lambda: _continuous(model, load, graphs=None),
        "Transformers generate_batch, CUDA graphs": lambda: _continuous(model, load, graphs=True),
    }
    for name, seconds in runs.items():
        full_name = f"{len(load.prompts)} requests, {name}"
        if time.perf_counter() > until:
            report.fact(full_name, "not run: there was no time left")
            continue
        try:
            rate = load.total / seconds()
        except Exception as error:
            report.fact(full_name, f"failed: {traceback.format_exc(limit=-2)}")
            # Without psutil, Transformers 5.17 finds a processor to have no memory at all.
            if card.rehearsal and not isinstance(error, MemoryError):
                raise
        else:
            rates.append(rate)
            report.rate(f"{full_name}: output tokens", rate, "tokens/s")
        finally:
            card.release()
    return rates


@torch.inference_mode()
def _static(card: Card, model: Any, load: Load) -> float:
    static_seconds(card, model, _warming(load))
    return static_seconds(card, model, load)


def _continuous(model: Any, load: Load, *, graphs: bool | None) -> float:
    peer = Continuous(model, load, graphs=graphs)
    try:
        peer.seconds(_warming(load))
        return peer.seconds(load)
    finally:
        peer.close()


def _warming(load: Load) -> Load:
    return Load(load.prompts, [min(WARM_TOKENS, length) for length in load.output_tokens])


def _disciplines(card: Card, report: Report, shape: Shape, backend: TritonBackend, sizes: Sizes) -> None:
    """Answers of many lengths, twice as many as the batch holds: who waits for the longest, and who does not."""
    slots = min(sizes.max_num_seqs, 32)
    longest = sizes.max_model_len // 2 - (2 if card.rehearsal else 128)
    count, prompt = 2 * slots, sizes.max_model_len // 2 - longest
    random = np.random.default_rng(11)
    load = _load(shape, count, prompt, random.integers(1, longest + 1, count).tolist())
    narrow = Sizes(
        sizes.num_blocks, sizes.block_size, slots, sizes.token_budget, sizes.max_model_len, sizes.num_host_blocks
    )
    rates = {}
    for discipline in ("vllm", "static"):
        runs = [
            answered(backend, narrow, load, overlap=True, discipline=discipline)
            for _ in range(1 if card.rehearsal else 2)
        ]
        rates[discipline] = load.total / min(each.seconds for each in runs)
        report.rate(f"{count} answers of 1 to {longest}, {discipline}: output tokens", rates[discipline], "tokens/s")
    report.rate("continuous over static batching", rates["vllm"] / rates["static"], "×")


def _switch(on: bool) -> str:
    return "on" if on else "off"

"""The engine's ids on the card against those of Transformers on the processor, both in float32.

The starter's architecture with random weights, greedy. "The same" is: equal, or differing only from a token on where
the reference's own first two logits lie within 2e-4 of each other. Both kinds of answers are counted. Every way in
which the engine may compute an answer is gone through: alone, batched, in chunks, computed again after a preemption,
swapped out and in, with recorded steps and overlap on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from engine.events import Preempted, SwappedIn
from tests.gpu.card import Card
from tests.gpu.engines import Answered, Load, Sizes, answered, loaded_backend
from tests.gpu.figures import Report
from tests.gpu.models import STARTER, TINY, Shape, library_model, random_weights

LENGTHS = (1, 15, 16, 17, 33, 47, 70)
"""Of the prompts: on both sides of blocks' edges, and longer than a chunk."""
OUTPUT = 40
GAP = 2e-4
"""In float32 the difference of two of this model's logits is off by up to 6e-5, against float64; here both are."""
REFERENCE_THREADS = 8
"""More gain nothing with so small a model; where a container has fewer cores than it sees, they wait for each other."""
_SIZES = Sizes(num_blocks=60, block_size=16, max_num_seqs=8, token_budget=512, max_model_len=128)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the answers."""

    name: str
    graphs: bool
    overlap: bool
    max_num_seqs: int = 8
    token_budget: int = 512
    num_blocks: int = 60
    preemption: str = "recompute"

    def sizes(self, base: Sizes) -> Sizes:
        return replace(
            base,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            num_host_blocks=base.num_host_blocks if self.preemption == "swap" else 0,
        )


def _ways(num_blocks: int, tight: int, budget: int, chunk: int) -> list[Way]:
    """``tight``: so few blocks that somebody must yield; ``chunk``: a budget that cuts the longest prompt."""
    both = [
        way
        for graphs, overlap in ((True, True), (False, False))
        for way in (
            Way("in chunks", graphs, overlap, token_budget=chunk, num_blocks=num_blocks),
            Way("recomputed", graphs, overlap, token_budget=budget, num_blocks=tight),
            Way("swapped", graphs, overlap, token_budget=budget, num_blocks=tight, preemption="swap"),
        )
    ]
    batched = [
        Way("batched", graphs, overlap, token_budget=budget, num_blocks=num_blocks)
        for graphs in (True, False)
        for overlap in (True, False)
    ]
    alone = Way("one at a time", True, True, max_num_seqs=1, token_budget=budget, num_blocks=num_blocks)
    return [alone, *batched, *both]


WAYS = _ways(60, tight=14, budget=512, chunk=16)
REHEARSED_WAYS = [
    way
    for way in _ways(16, tight=7, budget=24, chunk=4)
    if way.graphs == way.overlap == (way.name != "in chunks") and way.name in ("in chunks", "recomputed", "swapped")
]


@dataclass(frozen=True, slots=True)
class Reference:
    """One answer, and how far apart its first two logits were at each token."""

    token_ids: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    equal: int
    near_ties: int
    """Answers that leave the reference's where its own first two logits lie within ``GAP``."""
    different: list[int]
    """Which answers leave it elsewhere."""


def compare(answers: Sequence[Sequence[int]], references: Sequence[Reference]) -> Verdict:
    equal, near_ties, different = 0, 0, []
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        if list(answer) == reference.token_ids:
            equal += 1
            continue
        pairs = zip(answer, reference.token_ids, strict=False)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is not None and len(answer) == len(reference.token_ids) and reference.gaps[first] <= GAP:
            near_ties += 1
        else:
            different.append(index)
    return Verdict(equal, near_ties, different)


def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    shape = TINY if card.rehearsal else STARTER
    lengths, output = ((3, 4, 6), 3) if card.rehearsal else (LENGTHS, OUTPUT)
    base = Sizes(16, 2, 3, 24, 16, num_host_blocks=8) if card.rehearsal else replace(_SIZES, num_host_blocks=60)
    spec = shape.spec(torch.float32)
    weights = random_weights(spec, card, seed=4)
    random = np.random.default_rng(6)
    prompts = [random.integers(0, shape.vocab, length).tolist() for length in lengths]
    load = Load(prompts, [output] * len(prompts))
    on_cpu = {name: tensor.cpu() for name, tensor in weights.items()}
    references = _references(shape, on_cpu, load)
    distinct = len({token for reference in references for token in reference.token_ids})
    report.check("the reference's answers vary", distinct > len(prompts), f"{distinct} ids", listed=False)

    ways = REHEARSED_WAYS if card.rehearsal else WAYS
    for graphs in (True, False):
        backend = loaded_backend(card, spec, weights, base, graphs=graphs)
        for way in ways:
            if way.graphs != graphs:
                continue
            sizes = way.sizes(base)
            result = answered(backend, sizes, load, overlap=way.overlap, preemption=way.preemption)
            _judge(report, way, result, references)
        del backend
        card.release()


def _judge(report: Report, way: Way, result: Answered, references: list[Reference]) -> None:
    switches = f"graphs {'on' if way.graphs else 'off'}, overlap {'on' if way.overlap else 'off'}"
    verdict = compare(result.token_ids, references)
    words = f"{verdict.equal} equal, {verdict.near_ties} near ties, {len(verdict.different)} different"
    report.check(f"{way.name}, {switches}", not verdict.different, words, answers=verdict.different)
    if way.name == "in chunks":
        longest = max(max(record.num_tokens, default=0) for record in result.records)
        report.check(f"{way.name}, {switches}: chunks", longest <= way.token_budget, f"up to {longest}", listed=False)
    if way.name in ("recomputed", "swapped"):
        kind = Preempted if way.name == "recomputed" else SwappedIn
        count = len(result.events(kind))
        report.check(f"{way.name}, {switches}: preemptions", count > 0, f"{count} times", listed=False)


@torch.inference_mode()
def _references(shape: Shape, weights: dict[str, torch.Tensor], load: Load) -> list[Reference]:
    torch.set_num_threads(min(REFERENCE_THREADS, torch.get_num_threads()))
    model = library_model(shape, weights, torch.device("cpu"), torch.float32)
    references = []
    for prompt, length in zip(load.prompts, load.output_tokens, strict=True):
        config = GenerationConfig(
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = torch.tensor([prompt])
        given = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        top = torch.cat(given.logits).float().topk(2).values
        references.append(Reference(given.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()))
    return references

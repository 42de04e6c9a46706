"""Tiny models, and a few requests that take the whole engine through one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import Preempted
from engine.execution.draft_model import DraftModel
from engine.execution.runner import ModelRunner
from engine.models.architecture import expected_tensors
from engine.request import SamplingParams
from kernels.backend import Backend
from kernels.spec import DecoderSpec, StepLimits
from tests.oracles import EngineProbe

VOCAB = 61
BLOCK_SIZE = 4
NUM_BLOCKS = 6
MAX_REQUESTS = 4
TOKEN_BUDGET = 12
MAX_LENGTH = 128
LIMITS = StepLimits(max_requests=MAX_REQUESTS, max_tokens=TOKEN_BUDGET, max_blocks=MAX_LENGTH // BLOCK_SIZE)
PROMPT_LENGTHS = (1, 7, 8, 17)
"""One token, both sides of a block's edge, longer than the budget; all have a common beginning."""


@dataclass(frozen=True)
class Outcome:
    token_ids: list[list[int]]
    logprobs: list[float]
    preemptions: int
    cached_tokens: int


def tiny_spec(**changes: object) -> DecoderSpec:
    head_dim = int(changes.get("head_dim", 64))  # type: ignore[call-overload]
    rotary_dim = int(changes.pop("rotary_dim", head_dim))  # type: ignore[call-overload]
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_layers": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_position": 256,
        "dtype": torch.float32,
        "inv_freq": 10_000.0 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim),
    }
    return DecoderSpec(**{**values, **changes})


SPECS = {
    "tied, group 3, window 8 in one layer": tiny_spec(tie_embeddings=True, sliding_window=(8, None)),
    "group 5, q/k norm, scaled rotary": tiny_spec(num_heads=5, head_dim=16, qk_norm=True, rope_attention_scaling=1.2),
    "biases, two kv heads, partial rotary, a layer without": tiny_spec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=80,
        rotary_dim=24,
        rope_layers=(True, False),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    ),
}


def tiny_weights(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in expected_tensors(spec).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * values if name.endswith("norm.weight") else values * 1.5 * shape[-1] ** -0.5
    return tensors


DRAFTS = "draft:tiny"


def run_engine(
    backend: Backend,
    spec: DecoderSpec,
    *,
    preemption: str = "recompute",
    num_blocks: int = NUM_BLOCKS,
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
    overlap: bool = False,
    drafting: Backend | None = None,
) -> Outcome:
    """The ids of greedy requests with log-probabilities, and of one that is drawn with a penalty. ``drafting``: where a
    model of the same kind, with fewer layers, drafts."""
    num_host_blocks = 8 if preemption == "swap" else 0
    draft_spec = replace(spec, num_layers=1, sliding_window=())
    for each, its_spec in ((backend, spec), (drafting, draft_spec)):
        if each is not None:
            each.load(its_spec, tiny_weights(its_spec))
            each.allocate_kv(num_blocks + 1, BLOCK_SIZE)
            each.make_ready(LIMITS)
            each.allocate_host_kv(num_host_blocks + 1)
    proposer = None if drafting is None else DraftModel(drafting, draft_spec, BLOCK_SIZE, DRAFTS)
    speculative = "off" if drafting is None else DRAFTS
    core = EngineCore(
        ModelRunner(backend, spec, BLOCK_SIZE, proposer=proposer),
        scheduler=SchedulerConfig(
            max_num_seqs=MAX_REQUESTS, preemption=preemption, speculative=speculative, draft_tokens=2
        ),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=True,
        max_model_len=MAX_LENGTH,
        vocab_size=VOCAB,
        token_budget=TOKEN_BUDGET,
        num_host_blocks=num_host_blocks,
        overlap=overlap,
    )
    probe = EngineProbe(core)
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(0, VOCAB, (20,), generator=generator).tolist()
    greedy = SamplingParams(max_tokens=3, logprobs=2)
    drawn = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=4, presence_penalty=0.5)
    ids = [probe.add(prompt[:length], greedy) for length in prompt_lengths]
    ids.append(probe.add(prompt[3:8], drawn))
    probe.run()
    answers = [probe.answers[request_id] for request_id in ids]
    assert all(answer.last is not None and answer.last.finish_reason == "length" for answer in answers)
    return Outcome(
        token_ids=[answer.token_ids for answer in answers],
        logprobs=[entry.logprob for answer in answers for entry in answer.logprobs],
        preemptions=len(probe.of(Preempted)),
        cached_tokens=sum(answer.last.cached_tokens for answer in answers if answer.last is not None),
    )

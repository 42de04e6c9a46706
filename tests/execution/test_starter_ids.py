"""The starter model in float32: greedy tokens of the paged engine are Transformers' own ids.

"The same" means equal, or different only from a token on where the reference's own top two logits lie within 1e-4: two
orders of adding up the same sum may then choose differently. Such prompts are counted and printed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.request import SamplingParams
from engine.text.codec import TextCodec
from tests.execution.helpers import PagedModel

NEAR_TIE = 1e-4
BLOCK_SIZE = 16
NUM_BLOCKS = 1024
OPENINGS = (
    "The history of the city began when",
    "def fibonacci(n):\n    ",
    "To bake a good loaf of bread, first",
    "1, 2, 3, 4, 5,",
    "Dear Professor,\n\nI am writing to",
    "Le chat noir est assis sur",
    "In physics, the law of conservation of energy states that",
    "Once upon a time there was a",
)
SUBJECTS = ("rivers", "the moon", "trade", "small engines", "bees", "glass", "winter", "an honest king")


@dataclass(frozen=True, slots=True)
class Comparison:
    exact: int
    near_ties: list[str]
    wrong: list[str]


@pytest.fixture(scope="module")
def reference(starter_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(starter_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(starter_folder: Path) -> Iterator[PagedModel]:
    yield PagedModel(starter_folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def make_prompts(folder: Path, count: int) -> list[list[int]]:
    """Prose, code, lists and noise, from one token to about a hundred."""
    codec = TextCodec.from_folder(folder)
    generator = random.Random(0)
    prompts = []
    for i in range(count):
        text = OPENINGS[i % len(OPENINGS)]
        if i >= len(OPENINGS):
            text = f"A note about {SUBJECTS[i // 8 % 8]}. " * (i % 5) + text
        ids = codec.encode(text)
        if i % 16 == 15:
            ids = [generator.randrange(20, 49_000) for _ in range(1 + i)]
        prompts.append(ids[: 1 + i] if i % 16 == 7 else ids)
    return prompts


def engine_ids(model: PagedModel, prompts: list[list[int]], length: int) -> list[list[int]]:
    """All prompts at once through the engine: batched, chunked, with prefix hits."""
    core = EngineCore(
        model.runner,
        scheduler=SchedulerConfig(max_num_seqs=32),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        prefix_cache=True,
        max_model_len=2048,
        vocab_size=model.spec.vocab_size,
        token_budget=96,
    )
    answers: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add_request(i, prompt, params, stream_text=False)
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            answers[output.request_id] += output.token_ids
    return list(answers.values())


@torch.no_grad()
def compare(reference: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> Comparison:
    """Transformers' greedy ids are what its argmax says after every prefix that agrees so far: one pass a prompt."""
    exact = 0
    near_ties, wrong = [], []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logits = reference(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        expected = logits.argmax(dim=-1).tolist()
        differing = [place for place, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b]
        if not differing:
            exact += 1
            continue
        first, second = logits[differing[0]].topk(2).values.tolist()
        line = f"prompt {i}, token {differing[0]}: top two logits {first - second:.2e} apart"
        (near_ties if first - second < NEAR_TIE else wrong).append(line)
    return Comparison(exact, near_ties, wrong)


def check(reference: PreTrainedModel, model: PagedModel, folder: Path, count: int, length: int) -> None:
    prompts = make_prompts(folder, count)
    answers = engine_ids(model, prompts, length)
    assert all(len(answer) == length for answer in answers)
    comparison = compare(reference, prompts, answers)
    print(f"\n{comparison.exact} of {count} prompts equal over {length} tokens, {len(comparison.near_ties)} near ties")
    print("\n".join(comparison.near_ties))
    assert comparison.wrong == []


def test_a_few_prompts(reference: PreTrainedModel, model: PagedModel, starter_folder: Path) -> None:
    check(reference, model, starter_folder, count=4, length=16)


def test_transformers_own_generate(reference: PreTrainedModel, model: PagedModel, starter_folder: Path) -> None:
    """The one-pass comparison above stands for this: ``generate`` itself, token by token with its own cache."""
    prompts = make_prompts(starter_folder, 3)
    for prompt, answer in zip(prompts, engine_ids(model, prompts, 12), strict=True):
        ids = torch.tensor([prompt])
        generated = reference.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=12, max_new_tokens=12
        )
        if generated[0, len(prompt) :].tolist() != answer:
            assert compare(reference, [prompt], [answer]).wrong == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_64_prompts_of_64_tokens(reference: PreTrainedModel, model: PagedModel, starter_folder: Path) -> None:
    check(reference, model, starter_folder, count=64, length=64)

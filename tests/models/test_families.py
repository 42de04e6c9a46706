"""Every family's logits equal Transformers' own: in one prefill, in chunks, token by token over scattered blocks.

The families with a decoder of our own, and those that the library itself computes with our attention in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import FAMILIES, VOCAB, SavedModel, save_family
from tests.models.transformers_families import LIBRARY_FAMILIES, save_library_family

TOLERANCE = 1e-4
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 40)
"""Window edges (the windowed families see 8 tokens) and block edges."""
BLOCK_SIZES = [(name, size) for name in FAMILIES for size in (1, 4, 16)] + [(name, 4) for name in LIBRARY_FAMILIES]
CUTS = [
    (name, cuts)
    for name in [*FAMILIES, *LIBRARY_FAMILIES]
    for cuts in ([7, 9, 1, 16, 7], [8, 8, 8, 16], [1, 15, 17, 7], [16, 1, 1, 22])[: 4 if name in FAMILIES else 1]
]
_saved: dict[str, SavedModel] = {}


@pytest.fixture(params=[*FAMILIES, *LIBRARY_FAMILIES])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    name = request.param
    if name not in _saved:
        save = save_family if name in FAMILIES else save_library_family
        _saved[name] = save(name, tmp_path_factory.mktemp(name))
    return _saved[name]


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    assert ours.shape == reference.shape
    return float((ours - reference).abs().max())


def test_the_references_parts_all_matter(saved: SavedModel) -> None:
    """A comparison of logits that hardly move would prove nothing."""
    logits = saved.logits(random_prompt(40, VOCAB))
    assert float(logits.std()) > 0.5
    assert float((logits[1:] - logits[:-1]).abs().max()) > 1.0


@pytest.mark.parametrize(("saved", "block_size"), BLOCK_SIZES, indirect=["saved"])
def test_one_prefill(saved: SavedModel, block_size: int) -> None:
    model = PagedModel(saved.folder, block_size=block_size, num_blocks=sum(LENGTHS))
    prompts = [random_prompt(length, VOCAB) for length in LENGTHS]
    together = model.logits([(make_request(i, prompt), len(prompt)) for i, prompt in enumerate(prompts)])
    for prompt, logits in zip(prompts, together, strict=True):
        assert difference(logits, saved.logits(prompt)) < TOLERANCE


@pytest.mark.parametrize(("saved", "cuts"), CUTS, indirect=["saved"])
def test_chunks(saved: SavedModel, cuts: list[int]) -> None:
    model = PagedModel(saved.folder, block_size=4, num_blocks=40)
    prompt = random_prompt(40, VOCAB)
    request = make_request(0, prompt)
    parts = [model.logits([(request, cut)])[0] for cut in cuts]
    assert difference(torch.cat(parts), saved.logits(prompt)) < TOLERANCE


@pytest.mark.parametrize(("saved", "block_size"), BLOCK_SIZES, indirect=["saved"])
def test_decodes_of_several_lengths_beside_a_prefill(saved: SavedModel, block_size: int) -> None:
    model = PagedModel(saved.folder, block_size=block_size, num_blocks=400)
    prompts = [random_prompt(length + 6, VOCAB) for length in LENGTHS]
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
    references = [saved.logits(prompt) for prompt in prompts]
    model.logits([(request, length) for request, length in zip(requests, LENGTHS, strict=True)])
    newcomer = make_request(99, random_prompt(33, VOCAB))
    newcomers_reference = saved.logits(newcomer.token_ids)
    for step in range(6):
        work = [(request, 1) for request in requests]
        work.insert(step, (newcomer, 5))
        results = model.logits(work)
        first = newcomer.num_computed_tokens
        assert difference(results.pop(step), newcomers_reference[first - 5 : first]) < TOLERANCE
        for length, logits, reference in zip(LENGTHS, results, references, strict=True):
            assert difference(logits, reference[length + step : length + step + 1]) < TOLERANCE


def test_a_context_far_longer_than_a_window(saved: SavedModel) -> None:
    model = PagedModel(saved.folder, block_size=16, num_blocks=20)
    prompt = random_prompt(200, VOCAB)
    request = make_request(0, prompt)
    parts = [model.logits([(request, count)])[0] for count in (100, 97, 1, 1, 1)]
    assert difference(torch.cat(parts), saved.logits(prompt)) < TOLERANCE


def test_saved_folders_differ_where_they_should(tmp_path: Path) -> None:
    """The families' configurations reach the decoder: none of them is silently the plain one."""
    prompt = random_prompt(40, VOCAB)
    base = save_family("llama", tmp_path / "llama").logits(prompt)
    for name in ("llama-linear", "llama-llama3", "llama-yarn", "mistral-window"):
        assert difference(save_family(name, tmp_path / name).logits(prompt), base) > 0.01, name

"""The model runner: batch tensors, block copies, drawing rows, and rows that fail alone."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.execution.runner import ModelRunner, build_step
from engine.execution.sampler import sampling_row
from engine.request import SamplingParams
from engine.scheduling.plan import SchedulerOutput
from kernels.backend import uploaded
from kernels.cpu.products import place_of
from kernels.spec import StepBatch
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import VOCAB, SavedModel


@pytest.fixture
def model(tiny: SavedModel) -> PagedModel:
    return PagedModel(tiny.folder, block_size=4, num_blocks=64)


def greedy_ids(saved: SavedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(saved.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_batch_tensors_follow_the_diagram() -> None:
    """The example of :mod:`kernels.spec`: three new tokens, one decode at position 7, two tokens from position 3."""
    requests = [make_request(i, list(range(10 * i, 10 * i + length))) for i, length in enumerate((3, 8, 6))]
    output = SchedulerOutput(
        step=0,
        requests=requests,
        epochs=[0, 0, 0],
        starts=[0, 7, 3],
        num_new_tokens=[3, 1, 2],
        block_tables=[[5], [2, 9], [7, 3]],
        samples=[True, True, False],
    )
    batch = uploaded(build_step(output, block_size=4), torch.device("cpu"), None)
    expected = {
        "token_ids": [0, 1, 2, 17, 23, 24],
        "positions": [0, 1, 2, 7, 3, 4],
        "slot_mapping": [20, 21, 22, 39, 31, 12],
        "query_start": [0, 3, 4, 6],
        "seq_lens": [3, 8, 5],
        "block_tables": [[5, 0], [2, 9], [7, 3]],
        "logits_rows": [2, 3],
        "query_lens_list": [3, 1, 2],
        "seq_lens_list": [3, 8, 5],
    }
    for name, values in expected.items():
        actual = getattr(batch, name)
        assert (actual.tolist() if isinstance(actual, torch.Tensor) else actual) == values, name
    types = {field.name: getattr(batch, field.name) for field in dataclasses.fields(StepBatch)}
    assert types["token_ids"].dtype == types["slot_mapping"].dtype == types["logits_rows"].dtype == torch.int64
    assert types["query_start"].dtype == types["seq_lens"].dtype == types["block_tables"].dtype == torch.int32


def test_greedy_tokens_are_the_references(tiny: SavedModel, model: PagedModel) -> None:
    prompts = [random_prompt(length, VOCAB, seed=3) for length in (1, 4, 9)]
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
    model.step([(request, request.num_tokens) for request in requests])
    for _ in range(5):
        model.step([(request, 1) for request in requests])
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == greedy_ids(tiny, prompt, 6)


def test_only_rows_at_their_end_are_sampled(model: PagedModel) -> None:
    unfinished, finished = make_request(0, random_prompt(9, VOCAB)), make_request(1, random_prompt(5, VOCAB))
    result = model.step([(unfinished, 8), (finished, 5)])
    assert result.token_ids[0] == [] and len(result.token_ids[1]) == 1
    assert result.logprobs == [[], []] and result.errors == {}
    only_chunks = model.step([(make_request(2, random_prompt(9, VOCAB)), 4)])
    assert only_chunks.token_ids == [[]]


def test_times_come_from_the_clock(model: PagedModel) -> None:
    ticks = iter(range(100))
    runner = ModelRunner(model.backend, model.spec, model.block_size, clock=lambda: float(next(ticks)))
    result = runner.execute(model.plan([(make_request(0, [5, 6]), 2)]))
    assert (result.prepare_seconds, result.forward_seconds, result.sample_seconds) == (1.0, 2.0, 1.0)


def test_copied_blocks_answer_like_the_original(tiny: SavedModel, model: PagedModel) -> None:
    """Copy-on-write: a copy made before the step holds the source's keys and values in every layer."""
    prompt = random_prompt(6, VOCAB)
    model.step([(make_request(0, prompt), 6)])
    twin = make_request(1, [*prompt, 11])
    twin.num_computed_tokens = 6
    shared = model.plan([(make_request(0, prompt), 6)]).block_tables[0]
    plan = model.plan([(twin, 1)])
    copies = list(zip(shared, plan.block_tables[0], strict=True))
    assert all(source != destination for source, destination in copies)
    result = model.runner.execute(dataclasses.replace(plan, block_copies=copies))
    assert result.token_ids[0] == greedy_ids(tiny, [*prompt, 11], 1)
    assert model.runner.execute(model.plan([(twin, 1)])).token_ids[0] == result.token_ids[0]


def test_seeded_rows_do_not_depend_on_neighbours(model: PagedModel) -> None:
    params = SamplingParams(temperature=1.5, seed=42, top_p=0.95)
    prompt = random_prompt(9, VOCAB)

    def answer(neighbours: int, first: bool, request_id: int) -> list[int]:
        request = make_request(request_id, prompt, params, seed=42)
        others = [
            make_request(
                request_id + 1 + i, random_prompt(7 + i, VOCAB, seed=i), SamplingParams(temperature=1.0), seed=i
            )
            for i in range(neighbours)
        ]
        batch = [request, *others] if first else [*others, request]
        model.step([(each, each.num_tokens) for each in batch])
        for _ in range(7):
            model.step([(each, 1) for each in batch])
        for each in batch:
            model.free(each)
        return request.output_token_ids

    alone = answer(0, True, 100)
    assert len(set(alone)) > 2
    assert answer(1, True, 200) == alone
    assert answer(3, False, 300) == alone
    again = make_request(400, [*prompt, *alone[:5]], params, seed=42)  # recomputed after a preemption
    again.num_prompt_tokens = len(prompt)
    assert model.step([(again, again.num_tokens)]).token_ids[0] == [alone[5]]


def test_min_tokens_bans_the_stop_tokens_until_then(model: PagedModel) -> None:
    prompt = random_prompt(5, VOCAB)
    first = model.step([(make_request(0, prompt), 5)]).token_ids[0][0]
    params = SamplingParams(min_tokens=2, stop_token_ids=(first,))
    request = make_request(1, prompt, params)
    assert model.step([(request, 5)]).token_ids[0] != [first]
    assert sampling_row(request).banned_token_ids == (first,)
    request.token_ids.append(5)
    assert sampling_row(request).banned_token_ids == ()


def test_rows_carry_lists_only_where_a_penalty_reads_them() -> None:
    def row(**knobs: float) -> tuple[list[int], list[int], int]:
        request = make_request(0, [1, 2, 3], SamplingParams(temperature=0.5, **knobs), seed=9)  # type: ignore[arg-type]
        request.token_ids += [4, 5]
        made = sampling_row(request)
        assert made.seed == 9
        return made.prompt_token_ids, made.output_token_ids, made.position

    assert row() == ([], [], 5)
    assert row(frequency_penalty=0.5) == ([], [4, 5], 5)
    assert row(repetition_penalty=1.2) == ([1, 2, 3], [4, 5], 5)


def test_logprobs_are_handed_out_where_asked(tiny: SavedModel, model: PagedModel) -> None:
    prompt = random_prompt(6, VOCAB)
    result = model.step([(make_request(0, prompt), 6), (make_request(1, prompt, SamplingParams(logprobs=3)), 6)])
    assert result.logprobs[0] == []
    [report] = result.logprobs[1]
    reference = tiny.logits(prompt)[-1].log_softmax(-1)
    assert report.token_id == result.token_ids[1][0]
    assert report.logprob == pytest.approx(float(reference.max()), abs=1e-4)
    assert [index for index, _ in report.top] == reference.topk(3).indices.tolist()


# Rows that fail ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned(model: PagedModel, token: int) -> Iterator[None]:
    """Meanwhile whatever sees ``token`` is not a number."""
    before = model.backend.weights
    at, inputs, outputs = (int(number) for number in before.matrices[-1][:3])
    # A copy of its own: tied, the embedding is the head too, and a head with NaN fails every row.
    embedding = before.packed[at : at + inputs * outputs].copy()
    embedding[[place_of.py_func(token, k, inputs, before.depth) for k in range(inputs)]] = math.nan
    matrices = before.matrices.copy()
    matrices[-1, 0] = before.packed.shape[0]
    packed = np.concatenate((before.packed, embedding))
    model.backend._weights = before._replace(packed=packed, matrices=matrices)
    yield
    model.backend._weights = before


def test_a_row_that_is_not_finite_says_so_and_fails_alone(tiny: SavedModel, model: PagedModel) -> None:
    prompt = random_prompt(6, VOCAB)
    requests = [make_request(0, prompt), make_request(1, [*prompt, 2, 7]), make_request(2, prompt)]
    with poisoned(model, 2):
        result = model.step([(request, request.num_tokens) for request in requests])
    assert list(result.errors) == [1]
    assert "finite" in result.errors[1] and "token 8" in result.errors[1] and "float32" in result.errors[1]
    assert "--dtype" not in result.errors[1], "float32 is no way out of float32"
    expected = greedy_ids(tiny, prompt, 1)
    assert result.token_ids == [expected, [], expected]


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_blocks_of_a_failed_request_are_clean_for_the_next(tiny: SavedModel, length: int) -> None:
    """NaN left in blocks that are handed on must not reach the next owner, not even times a weight of zero."""
    model = PagedModel(tiny.folder, block_size=4, num_blocks=8)
    failing = make_request(0, [2] * 31)
    with poisoned(model, 2):
        assert model.step([(failing, 31)]).errors
    model.free(failing)
    prompts = [random_prompt(length, VOCAB), random_prompt(length + 6, VOCAB)]
    requests = [make_request(1 + i, prompt) for i, prompt in enumerate(prompts)]
    model.step([(request, request.num_tokens) for request in requests])
    for _ in range(7):
        assert model.step([(request, 1) for request in requests]).errors == {}
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == greedy_ids(tiny, prompt, 8)


# Memory that moves ---------------------------------------------------------------------------------------------------


def test_a_swapped_request_goes_on_as_if_it_had_stayed(tiny: SavedModel, model: PagedModel) -> None:
    """Out to the host, its blocks overwritten by another request, back into other blocks."""
    model.backend.allocate_host_kv(9)
    prompt = random_prompt(10, VOCAB)
    request = make_request(0, prompt)
    model.step([(request, 10)])
    old_blocks = model.plan([(request, 1)]).block_tables[0]
    out = list(zip(old_blocks, (8, 3, 5), strict=True))
    other = make_request(1, random_prompt(12, VOCAB, seed=1))
    plan = dataclasses.replace(model.plan([(other, 12)]), block_tables=[old_blocks], swap_out=out)
    model.runner.execute(plan)
    returned = make_request(2, request.token_ids)
    returned.num_computed_tokens = 10
    plan = model.plan([(returned, 1)])
    back = [(host, block) for (_, host), block in zip(out, plan.block_tables[0], strict=True)]
    assert not {block for _, block in back} & set(old_blocks)
    result = model.runner.execute(dataclasses.replace(plan, swap_in=back))
    assert [*request.output_token_ids, *result.token_ids[0]] == greedy_ids(tiny, prompt, 2)


def test_blocks_move_out_then_over_then_in(model: PagedModel) -> None:
    """Block 2 is saved, then copied over from 1; 1 is filled from the host. Any other order gives something else."""
    model.backend.allocate_host_kv(4)
    storage = model.backend._kv()
    with torch.inference_mode():
        for block in (1, 2, 9):
            storage[:, block] = float(block)
    model.backend.swap_out([(9, 3)])
    plan = dataclasses.replace(model.plan([(make_request(0, [5, 6]), 2)]), block_tables=[[20]])
    model.runner.execute(dataclasses.replace(plan, swap_out=[(2, 1)], block_copies=[(1, 2)], swap_in=[(3, 1)]))
    assert [storage[-1, block, 0].item() for block in (1, 2)] == [9.0, 1.0]
    model.backend.swap_in([(1, 1)])
    assert storage[-1, 1, 0].item() == 2.0


# Padding -------------------------------------------------------------------------------------------------------------


def padded(plan: SchedulerOutput, padding: list[int]) -> SchedulerOutput:
    return dataclasses.replace(plan, padding=padding)


def test_padding_follows_the_new_tokens_in_the_rows_own_blocks() -> None:
    """A prompt of two padded to five, a decode without padding, an ended row that only pads."""
    output = SchedulerOutput(
        step=0,
        requests=[make_request(i, list(range(10 * i, 10 * i + length))) for i, length in enumerate((2, 8, 6))],
        epochs=[0, 0, 0],
        starts=[0, 7, 9],
        num_new_tokens=[2, 1, 0],
        block_tables=[[5, 1], [2, 9], [7, 3, 4]],
        samples=[True, True, False],
        padding=[3, 0, 1],
    )
    batch = uploaded(build_step(output, block_size=4), torch.device("cpu"), None)
    assert batch.token_ids.tolist() == [0, 1, 0, 0, 0, 17, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 7, 9]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 4, 39, 17]
    assert batch.query_start.tolist() == [0, 5, 6, 7]
    assert batch.logits_rows.tolist() == [1, 5]
    assert batch.query_lens_list == [5, 1, 1] and batch.seq_lens_list == [5, 8, 10]


def test_a_padded_batch_gives_the_ids_of_the_unpadded(tiny: SavedModel, model: PagedModel) -> None:
    """Prompts padded to the longest, then rows that have ended and go on padding beside the others' decodes."""
    prompts = [random_prompt(length, VOCAB, seed=7) for length in (3, 9, 14, 1)]
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
    longest, ends, last = 14, [2, 6, 4, 1], 6
    for request in requests:  # room for the padding too
        model.plan([(request, longest + last)])
    plan = model.plan([(request, request.num_tokens) for request in requests])
    results = [model.runner.execute(padded(plan, [longest - len(prompt) for prompt in prompts]))]
    for step in range(1, last):
        for request, token_ids in zip(requests, results[-1].token_ids, strict=True):
            request.num_computed_tokens = len(request.token_ids)
            request.token_ids.extend(token_ids)
        going = [step < end for end in ends]
        plan = model.plan([(request, int(more)) for request, more in zip(requests, going, strict=True)])
        starts = [
            request.num_tokens - 1 if more else longest + step for request, more in zip(requests, going, strict=True)
        ]
        plan = dataclasses.replace(plan, starts=starts, samples=going)
        results.append(model.runner.execute(padded(plan, [0 if more else 1 for more in going])))
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        drawn = [token for result in results for token in result.token_ids[row]]
        assert drawn == greedy_ids(tiny, prompt, end)

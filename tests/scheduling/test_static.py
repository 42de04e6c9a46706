"""``static``: batches that are padded, run to their last row's end, and are measured against the formulas."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.config import STATIC_DELIVERIES
from engine.events import Admitted, BatchEnded, BatchStarted, Ended, Finished, RowKind
from engine.request import RequestStatus, SamplingParams
from tests.oracles import EngineProbe, KVCheckingRunner, cold_answer, make_core
from tests.scheduling.common import admitted_order, assert_answer, deferred_reasons, plan_of, tokens


def static(**options: object) -> EngineProbe:
    return EngineProbe(make_core(discipline="static", **{"token_budget": 256, **options}))  # type: ignore[arg-type]


def rows_of(probe: EngineProbe, step: int) -> dict[int, tuple[RowKind, int, int]]:
    """Request id → (kind, own tokens, padding) of a step, counted from 0."""
    record = probe.records[step]
    padding = record.padding or [0] * len(record.request_ids)
    kinds = map(RowKind, record.kinds)
    return dict(zip(record.request_ids, zip(kinds, record.num_tokens, padding, strict=True), strict=True))


# The padding ------------------------------------------------------------------------------------------------------


def test_prompts_are_padded_to_the_longest_and_finished_rows_go_on_until_the_last_ends() -> None:
    probe = static()
    long, short, one = probe.add(range(20), tokens(3)), probe.add([7] * 5, tokens(5)), probe.add([9] * 8, tokens(1))
    probe.run()
    prefill, decode, padding = RowKind.PREFILL, RowKind.DECODE, RowKind.PADDING
    assert rows_of(probe, 0) == {long: (prefill, 20, 0), short: (prefill, 5, 15), one: (prefill, 8, 12)}
    assert rows_of(probe, 1) == {long: (decode, 1, 0), short: (decode, 1, 0), one: (padding, 0, 1)}
    assert rows_of(probe, 2) == rows_of(probe, 1)
    assert rows_of(probe, 3) == {long: (padding, 0, 1), short: (decode, 1, 0), one: (padding, 0, 1)}
    assert rows_of(probe, 4) == rows_of(probe, 3)
    assert len(probe.records) == 5
    assert probe.records[-1].totals.padding_tokens == 15 + 12 + 4 + 2 == sum(sum(r.padding) for r in probe.records)
    for request, prompt, length in ((long, list(range(20)), 3), (short, [7] * 5, 5), (one, [9] * 8, 1)):
        assert_answer(probe, request, prompt, length)


def test_padding_is_given_slots_to_write_to_and_no_logits_to_sample() -> None:
    """Planned for the runner as computation: it asserts that each row's slots are within its own blocks."""
    probe = static(block_size=4)
    probe.add(range(13), tokens(9))
    probe.add([5, 6], tokens(1))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    written = []
    while probe.core.has_work:
        probe.step()
        plan = runner.plan
        assert plan is not None
        written.append((plan.starts[1], plan.num_new_tokens[1], plan.padding[1] if plan.padding else 0))
        assert plan.samples[1] == (plan.num_new_tokens[1] > 0)
    # Its 2 tokens, padding to 13, then one padding token for each of the other row's 8 decodes, one behind the other.
    assert written == [(0, 2, 11), *[(13 + i, 0, 1) for i in range(8)]]


def test_a_padded_prefill_is_spread_over_steps_of_the_budget() -> None:
    probe = static(token_budget=16)
    first, second = probe.add(range(30), tokens(2)), probe.add([8] * 3, tokens(2))
    probe.run()
    computed = [sum(r.num_tokens) + sum(r.padding) for r in probe.records]
    assert computed == [16, 16, 16, 12, 2], "60 padded prompt tokens, then one decode of both"
    assert all(step <= 16 for step in computed)
    assert rows_of(probe, 1) == {first: (RowKind.PREFILL, 14, 0), second: (RowKind.PREFILL, 2, 0)}
    assert rows_of(probe, 2) == {second: (RowKind.PREFILL, 1, 15)}
    assert rows_of(probe, 3) == {second: (RowKind.PADDING, 0, 12)}
    assert RowKind.DECODE not in [kind for step in range(4) for kind, *_ in rows_of(probe, step).values()]
    assert_answer(probe, second, [8] * 3, 2)


def test_the_prefix_cache_is_not_looked_into() -> None:
    probe = static()
    for _ in range(2):
        probe.add(range(40), tokens(2))
        probe.run()
    assert [event.cached_tokens for event in probe.of(Admitted)] == [0, 0]
    assert probe.records[-1].totals.prompt_tokens == 80


def test_nothing_is_drafted_in_a_static_batch() -> None:
    probe = static(speculative="ngram")
    request = probe.add([1, 2, 1, 2], tokens(20))
    probe.run()
    assert probe.records[-1].totals.draft_tokens == 0
    assert_answer(probe, request, [1, 2, 1, 2], 20)


# The batch --------------------------------------------------------------------------------------------------------


def test_nobody_joins_until_the_batch_has_ended_and_the_head_is_told_so() -> None:
    probe = static(max_num_seqs=4)
    first = [probe.add([i], tokens(3 + i)) for i in range(2)]
    probe.step()
    later = probe.add([9], tokens(1))
    while probe.row(first[0]).status != RequestStatus.ENDED:
        probe.step()
    assert probe.row(later).status == RequestStatus.WAITING, "a row is free, but the batch runs"
    assert deferred_reasons(probe) == ["batch"]
    probe.run()
    started = [event.request_ids for event in probe.of(BatchStarted)]
    assert started == [first, [later]]
    order = [type(event) for event in probe.events if isinstance(event, BatchStarted | BatchEnded)]
    assert order == [BatchStarted, BatchEnded] * 2


def test_a_batch_has_at_most_the_configured_rows_and_the_rest_wait_for_the_next() -> None:
    probe = static(max_num_seqs=2)
    ids = [probe.add([i], tokens(2)) for i in range(5)]
    probe.run()
    assert [event.request_ids for event in probe.of(BatchStarted)] == [ids[:2], ids[2:4], ids[4:]]
    assert set(deferred_reasons(probe)) == {"slots", "batch"}


def test_a_batch_is_cut_to_what_fits_when_all_rows_are_padded_to_the_longest() -> None:
    # Alone 2, 2 and 5 blocks; padded to 16 prompt and 4 answer tokens each takes 5: of 12 blocks two rows.
    probe = static(num_blocks=12, block_size=4)
    ids = [probe.add(range(length), tokens(5)) for length in (4, 4, 16)]
    probe.run()
    assert [event.request_ids for event in probe.of(BatchStarted)] == [ids[:2], ids[2:]]
    assert deferred_reasons(probe)[0] == "blocks"


@pytest.mark.parametrize(("wide", "long"), [((12, 1), (2, 30)), ((2, 30), (12, 1))])
def test_room_is_kept_for_the_longest_prompt_and_the_longest_answer_together(
    wide: tuple[int, int], long: tuple[int, int]
) -> None:
    # Either row alone needs 3 or 8 blocks of 4; both padded 12 + 29 = 41 tokens: 11 blocks each.
    probe = static(num_blocks=22, block_size=4)
    ids = [probe.add(range(prompt), tokens(answer)) for prompt, answer in (wide, long)]
    probe.step()
    assert [len(probe.row(request).blocks) for request in ids] == [11, 11]
    probe.run()
    tight = static(num_blocks=21, block_size=4)
    ids = [tight.add(range(prompt), tokens(answer)) for prompt, answer in (wide, long)]
    tight.run()
    assert [event.request_ids for event in tight.of(BatchStarted)] == [[ids[0]], [ids[1]]]


def test_the_order_of_the_queue_decides_who_is_in_the_batch() -> None:
    probe = static(order="priority", max_num_seqs=1)
    probe.add([1], tokens(3), priority=5)
    probe.step()
    low, high = probe.add([2], tokens(2), priority=9), probe.add([3], tokens(2), priority=0)
    probe.run()
    assert admitted_order(probe)[1:] == [high, low], "and nobody is preempted for it"


# What the batch is measured by ------------------------------------------------------------------------------------


def batches_against_formulas(probe: EngineProbe, lengths: dict[int, tuple[int, int]]) -> None:
    """Literature's η, the predicted and the measured share, worked out from the lengths asked."""
    for started, ended in zip(probe.of(BatchStarted), probe.of(BatchEnded), strict=True):
        rows = [lengths[request] for request in started.request_ids]
        size, longest, most = len(rows), max(p for p, _ in rows), max(o for _, o in rows)
        assert ended.size == size and started.padded_prompt == longest
        assert ended.eta == pytest.approx(sum(p + o for p, o in rows) / (size * max(p + o for p, o in rows)))
        computed = size * (longest + most - 1)
        assert ended.useful_tokens == sum(p + o - 1 for p, o in rows)
        assert ended.useful_tokens + ended.padding_tokens == computed
        assert ended.predicted_useful == pytest.approx(ended.useful_tokens / computed)
        assert ended.measured_useful == pytest.approx(ended.predicted_useful)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_budget", [7, 64, 1_000])
def test_predicted_and_measured_share_agree_when_nobody_is_aborted(seed: int, token_budget: int) -> None:
    rng = random.Random(seed)
    probe = static(num_blocks=400, block_size=rng.choice([1, 4, 16]), token_budget=token_budget, max_num_seqs=6)
    lengths = {}
    for _ in range(20):
        prompt, answer = rng.randint(1, 60), rng.randint(1, 40)
        request = probe.add(range(prompt), tokens(answer + rng.randrange(20)), ends_after=answer)
        lengths[request] = (prompt, answer)
    probe.run()
    batches_against_formulas(probe, lengths)
    totals = probe.records[-1].totals
    assert totals.computed_tokens == sum(p + o - 1 for p, o in lengths.values())
    assert totals.padding_tokens == sum(event.padding_tokens for event in probe.of(BatchEnded))
    assert totals.steps == sum(event.steps for event in probe.of(BatchEnded))


def test_padding_is_computed_to_its_end_though_all_answers_end_with_their_first_token() -> None:
    probe = static(token_budget=64)
    lengths = {probe.add([7] * length, tokens(1)): (length, 1) for length in (100, 90, 5)}
    probe.run()
    batches_against_formulas(probe, lengths)
    assert probe.records[-1].totals.padding_tokens == 10 + 95


def test_lengths_that_vary_a_hundredfold_waste_most_of_the_work() -> None:
    """As 20 to 2,048 do, at a quarter of the size."""
    lengths = {}
    probe = static(num_blocks=400, token_budget=4_096, max_num_seqs=8)
    for answer in (5, 10, 15, 20, 30, 50, 75, 512):
        lengths[probe.add(range(3), tokens(512), ends_after=answer)] = (3, answer)
    probe.run()
    batches_against_formulas(probe, lengths)
    assert probe.of(BatchEnded)[0].measured_useful < 0.2


def test_a_row_that_is_aborted_leaves_at_once_and_the_measured_share_is_what_was_computed() -> None:
    probe = static(block_size=4)
    stays, goes = probe.add(range(6), tokens(10)), probe.add(range(9), tokens(10))
    for _ in range(4):
        probe.step()
    held = len(probe.row(stays).blocks)
    probe.core.abort(goes)
    probe.step()
    assert list(plan_of(probe)) == [stays]
    assert sum(len(r.blocks) for r in probe.core.keyframe().requests) == held
    probe.run()
    assert_answer(probe, stays, list(range(6)), 10)
    assert probe.answers[goes].token_ids == cold_answer(range(9), 4)
    ended = probe.of(BatchEnded)[0]
    assert ended.size == 1
    assert ended.useful_tokens == (6 + 9) + 9 + 3, "what the aborted row had computed was no padding"
    assert ended.measured_useful == pytest.approx(ended.useful_tokens / (ended.useful_tokens + ended.padding_tokens))


# Delivery ---------------------------------------------------------------------------------------------------------


def test_answers_are_handed_out_when_the_batch_ends() -> None:
    probe = static()
    short, long = probe.add([1], tokens(2)), probe.add([2], tokens(6))
    outputs = {short: [], long: []}  # type: ignore[var-annotated]
    steps = 0
    while probe.core.has_work:
        result = probe.step()
        steps += 1
        for output in result.outputs:
            outputs[output.request_id].append((steps, output))
    assert [len(found) for found in outputs.values()] == [1, 1]
    (step_short, output_short), (step_long, output_long) = outputs[short][0], outputs[long][0]
    assert step_short == step_long == 6
    assert output_short.time == output_long.time, "both were got at the same moment"
    assert (output_short.finish_reason, output_short.token_ids) == ("length", cold_answer([1], 2))
    assert output_long.token_ids == cold_answer([2], 6)


def test_with_delivery_by_row_each_token_is_handed_out_as_it_is_made() -> None:
    probe = static(static_delivery="row")
    short, long = probe.add([1], tokens(2)), probe.add([2], tokens(6))
    for step in range(1, 7):
        result = probe.step()
        got = {output.request_id: len(output.token_ids) for output in result.outputs}
        assert got == ({short: 1, long: 1} if step <= 2 else {long: 1})
        if step == 2:
            last = probe.answers[short].last
            assert last is not None and last.finish_reason == "length"
            assert [event.request_id for event in probe.of(Ended)] == [short]
            assert not probe.of(Finished), "its row goes on"
    assert not probe.core.has_work


@pytest.mark.parametrize("delivery", STATIC_DELIVERIES)
@pytest.mark.parametrize("when", ["between", "during"])
@pytest.mark.parametrize("state", ["prefill", "decode", "ended", "last"])
def test_aborts_in_mid_batch(delivery: str, when: str, state: str) -> None:
    probe = static(static_delivery=delivery, token_budget=4, block_size=2)
    core, runner = probe.core, probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    other, victim = probe.add(range(7), tokens(9)), probe.add(range(11), tokens(3))
    reached = {
        "prefill": lambda row: row.num_computed > 0,
        "decode": lambda row: row.output_tokens > 0,
        "ended": lambda row: row.status == RequestStatus.ENDED,
        "last": lambda row: row.status == RequestStatus.ENDED,
    }
    probe.step()
    while not reached[state](probe.row(victim)):
        probe.step()
    if state == "last":
        core.abort(other)  # nobody is left but one whose answer is complete
    if when == "during":
        runner.during = lambda plan: core.abort(victim)
        probe.step()
        runner.during = None
    else:
        core.abort(victim)
    probe.run()
    answer = probe.answers[victim]
    assert answer.token_ids == cold_answer(range(11), len(answer.token_ids))
    complete = state in ("ended", "last")
    over = state == "last" and when == "during"  # the batch had ended, so that its last abort came too late
    assert answer.finish_reason == ("length" if over or (complete and delivery == "row") else "abort")
    if complete:
        assert len(answer.token_ids) == 3
    if state != "last":
        assert_answer(probe, other, list(range(7)), 9)
    later = probe.add([4], tokens(2))
    probe.run()
    assert_answer(probe, later, [4], 2)


@pytest.mark.parametrize("delivery", STATIC_DELIVERIES)
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_batch_ends_with_the_abort_of_the_last_row_that_goes_on(max_tokens: int, delivery: str) -> None:
    """With one token each it is aborted in its prefill, and a row that went on would leave its blocks."""
    probe = static(static_delivery=delivery, token_budget=64, block_size=4)
    ended, aborted = probe.add([1] * 4, tokens(max_tokens)), probe.add([2] * 100, tokens(max_tokens * 9 - 8))
    probe.step()
    while not (probe.row(ended).status == RequestStatus.ENDED and probe.row(aborted).num_computed > 20):
        probe.step()
    steps, behind = probe.records[-1].totals.steps, probe.add([3], tokens(1))
    probe.core.abort(aborted)
    probe.step()
    assert plan_of(probe) == {behind: 1}
    assert probe.answers[ended].finish_reason == "length" and probe.answers[aborted].finish_reason == "abort"
    assert probe.of(BatchEnded)[0].steps == steps
    probe.run()
    assert_answer(probe, ended, [1] * 4, max_tokens)


@pytest.mark.parametrize("during", [False, True])
def test_a_batch_of_which_all_are_aborted_makes_room_for_the_next(during: bool) -> None:
    probe = static(max_num_seqs=2)
    core, runner = probe.core, probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    ids = [probe.add([i], tokens(9)) for i in range(3)]
    probe.step()

    def abort_both(plan: object = None) -> None:
        for request in ids[:2]:
            core.abort(request)

    if during:
        runner.during = abort_both
        probe.step()
        runner.during = None
    else:
        abort_both()
    probe.run()
    assert [event.request_ids for event in probe.of(BatchStarted)] == [ids[:2], ids[2:]]
    assert_answer(probe, ids[2], [2], 9)


@pytest.mark.parametrize("delivery", STATIC_DELIVERIES)
def test_a_row_in_error_ends_alone_and_gets_its_message_at_once_or_with_the_batch(delivery: str) -> None:
    probe = static(static_delivery=delivery)
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    good, bad = probe.add([1], tokens(5)), probe.add([2], tokens(5))
    probe.step()
    runner.failures[bad] = "its logits were not finite"
    probe.step()
    last = probe.answers[bad].last
    assert last is not None and last.error == "its logits were not finite"
    assert probe.answers[bad].token_ids == cold_answer([2], 1)
    probe.run()
    assert_answer(probe, good, [1], 5)


@pytest.mark.parametrize("delivery", STATIC_DELIVERIES)
def test_further_answers_run_in_the_next_batch_and_end_with_a_prompt_that_fails(delivery: str) -> None:
    probe = static(static_delivery=delivery)
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    fine = probe.add([1] * 5, SamplingParams(max_tokens=3, n=3))
    poor = probe.add([2] * 5, SamplingParams(max_tokens=3, n=3))
    runner.failures[poor] = "poisoned"
    probe.run()
    answers = [answer for request, answer in probe.answers.items() if request % (1 << 32) == fine]
    assert [answer.token_ids for answer in answers] == [cold_answer([1] * 5, 3, index=i) for i in range(3)]
    failed = [answer.last for request, answer in probe.answers.items() if request % (1 << 32) == poor]
    assert len(failed) == 3
    assert all(last is not None and (last.finish_reason, last.error) == ("error", "poisoned") for last in failed)
    assert [event.size for event in probe.of(BatchEnded)] == [1, 2]


def test_delivery_changes_while_a_batch_runs_and_no_token_is_lost_or_given_twice() -> None:
    probe = static()
    core = probe.core
    short, long = probe.add([1], tokens(2)), probe.add([2], tokens(12))
    for step in range(9):
        delivery = STATIC_DELIVERIES[step // 3 % 2]
        core.reconfigure(dataclasses.replace(core._scheduler.config, static_delivery=delivery))
        probe.step()
    probe.run()
    assert_answer(probe, short, [1], 2)
    assert_answer(probe, long, [2], 12)

"""The command that reproduces the claims, on an engine that serves by the clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import bench
from engine.config import SchedulerConfig
from tests import claims
from tests.load.fake_engine import Clock, FakeCore, FakeLoaded


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLoaded:
    """``static`` serves one request in 0.5 s, the others in 0.1; as many at once as there are slots."""
    clock = Clock()
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock, sleep=clock.sleep))

    def make(scheduler: SchedulerConfig) -> FakeCore:
        if scheduler.discipline == "static":
            return FakeCore(clock, 0.5)
        return FakeCore(clock, 0.1, scheduler.max_num_seqs)

    loaded = FakeLoaded(make)
    monkeypatch.setattr(claims, "load", lambda *_: loaded)
    return loaded


def test_the_open_loop_is_run_at_shares_of_what_saturates_static(fake: FakeLoaded, tmp_path: Path, capsys) -> None:
    target = tmp_path / "claims.json"
    assert claims.main(["open-loop", "--json", str(target), "--max-num-seqs", "4"]) == 0
    found = json.loads(target.read_text())["open-loop"]
    assert json.loads(capsys.readouterr().out)["open-loop"] == found
    assert found["static_saturates_at"] == pytest.approx(2.0, rel=0.01) and found["requests"] == 512
    assert [point["share"] for point in found["curve"]] == [0.7, 0.9, 1.0]
    assert [point["request_rate"] for point in found["curve"]] == pytest.approx([1.4, 1.8, 2.0], rel=0.01)
    means = [point["mean_e2el_ms"]["static"] for point in found["curve"]]
    assert means == sorted(means) and means[2] > 2 * means[0], "the queue grows towards saturation"
    assert all(point["mean_e2el_ratio"] < 0.2 for point in found["curve"])
    assert all(found["targets"].values())


def test_the_batch_curve_loads_once_and_varies_the_batch(fake: FakeLoaded, capsys) -> None:
    assert claims.main(["batch-curve"]) == 0
    found = json.loads(capsys.readouterr().out)["batch-curve"]
    assert [scheduler.max_num_seqs for scheduler, _ in fake.asked] == [1, 2, 4, 8, 16, 32]
    assert [point["times_one"] for point in found["curve"]] == pytest.approx([1, 2, 4, 8, 16, 32], rel=0.02)
    assert found["targets"] == {"32 gives at least 16 times one": True}


def test_long_prompts_are_run_whole_and_in_chunks(fake: FakeLoaded, capsys) -> None:
    assert claims.main(["long-prompt"]) == 0
    whole, chunked = (scheduler for scheduler, _ in fake.asked)
    assert not whole.chunked_prefill and whole.max_num_batched_tokens >= 2_000
    assert chunked.chunked_prefill
    found = json.loads(capsys.readouterr().out)["long-prompt"]
    assert found["p99_itl_ms_of_decoding"]["whole"] > 0 and found["mean_ttft_ms_of_long"]["chunked"] > 0


def test_usage(capsys) -> None:
    assert claims.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in claims.CLAIMS)
    for arguments, words in (
        (["weather"], "no claim is called 'weather'"),
        (["spread", "--json", "/nowhere/x"], "--json /nowhere/x"),
        (["spread", "--kv-blocks", "0"], "kv_blocks is 0"),
    ):
        with pytest.raises(SystemExit) as caught:
            claims.main(arguments)
        assert caught.value.code == 2 and words in capsys.readouterr().err

"""A discipline is one file: dropped into ``engine/scheduling/disciplines``, its name is known and it runs."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine.config
import engine.scheduling.disciplines as package
from engine.config import ConfigError, SchedulerConfig
from engine.scheduling.columns import PlanError
from tests.oracles import EngineProbe, make_core
from tests.scheduling.common import assert_answer, tokens

ONE_AT_A_TIME = '''
"""One request at a time, as a program without batching does."""

from engine.scheduling.discipline import Discipline, PlanningDesk


class Planner(Discipline):
    def plan(self, desk: PlanningDesk) -> None:
        for request in desk.plan_decodes():
            desk.plan[request] = desk.prefill_chunk(len(request.token_ids) - request.num_computed_tokens)
        if not desk.running and (head := desk.waiting.head()) is not None:
            desk.admit_reserving(head)
'''
GREEDY = ONE_AT_A_TIME.replace("desk.prefill_chunk(len(request.token_ids) - request.num_computed_tokens)", "1_000")


SERVE = """
from engine.config import DISCIPLINES
from tests.oracles import EngineProbe, cold_answer, make_core

assert "one-at-a-time" in DISCIPLINES
probe = EngineProbe(make_core(discipline="one-at-a-time"))
ids = [probe.add([i] * 20) for i in range(3)]
probe.run()
assert [probe.answers[request].token_ids for request in ids] == [cold_answer([i] * 20, 4) for i in range(3)]
assert max(len(record.request_ids) for record in probe.records) == 1
"""


def test_a_seventh_discipline_is_one_file_and_nothing_else(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shutil.copytree(root / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(root / "tests" / "oracles.py", tmp_path / "tests")
    (tmp_path / "engine" / "scheduling" / "disciplines" / "one_at_a_time.py").write_text(ONE_AT_A_TIME)
    command = [sys.executable, "-c", SERVE]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def add_discipline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a file beside the six as a checkout would have it, without touching the checkout."""

    def add(file_name: str, source: str) -> None:
        (tmp_path / file_name).write_text(source, encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        name = Path(file_name).stem.replace("_", "-")
        monkeypatch.setattr(engine.config, "DISCIPLINES", (*engine.config.DISCIPLINES, name))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{Path(file_name).stem}", raising=False)

    return add


def test_an_unknown_discipline_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one-at-a-time"):
        SchedulerConfig(discipline="one-at-a-time")


def test_a_running_engine_changes_to_it_and_back(add_discipline) -> None:
    add_discipline("one_at_a_time.py", ONE_AT_A_TIME)
    probe = EngineProbe(make_core())
    ids = [probe.add([i] * 20, tokens(5)) for i in range(3)]
    probe.step()
    probe.core.reconfigure(SchedulerConfig(discipline="one-at-a-time"))
    ids += [probe.add([i] * 20, tokens(5)) for i in range(3, 6)]
    while probe.core.keyframe().discipline != "one-at-a-time":
        probe.step()
    assert {row.request_id for row in probe.core.keyframe().requests} == set(ids[3:])
    probe.core.reconfigure(SchedulerConfig())
    probe.run()
    assert probe.core.keyframe().discipline == "vllm"
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 20, 5)


def test_a_faulty_one_is_stopped_by_the_core_with_its_name(add_discipline) -> None:
    add_discipline("greedy.py", GREEDY)
    core = make_core(discipline="greedy", token_budget=8)
    core.add_request(1, [1] * 20, tokens(5))
    core.step()
    with pytest.raises(PlanError, match="greedy planned 1000 tokens"):
        core.step()


def test_the_six_are_known_by_their_files() -> None:
    assert set(engine.config.DISCIPLINES) == {"static", "orca", "vllm", "tgi", "trtllm-no-evict", "trtllm-max-util"}

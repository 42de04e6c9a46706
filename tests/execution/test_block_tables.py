"""Block tables kept as arrays are the plan's, whatever happened between two steps."""

from __future__ import annotations

from typing import Any

import pytest

from engine.events import Preempted, SwappedIn
from engine.execution.block_tables import BlockTables
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests.oracles import KVCheckingRunner
from tests.scheduling.traces import run_trace


class _Comparing(KVCheckingRunner):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._arrays = BlockTables()
        self.longest = 0

    def __repr__(self) -> str:
        return "comparing"  # settings are part of a trace's seed

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rows = self._arrays.rows(output)
        assert [row.tolist() for row in rows] == output.block_tables
        self.longest = max(self.longest, *map(len, rows))
        return super().execute(output)


@pytest.mark.parametrize("settings", [{}, {"preemption": "swap"}, {"discipline": "static"}, {"speculative": "ngram"}])
@pytest.mark.parametrize("overlap", [False, True])
def test_random_traffic(overlap: bool, settings: dict[str, Any]) -> None:
    yielded = 0
    for seed in range(5):
        runner = _Comparing(2)
        trace = run_trace(seed, block_size=2, num_requests=30, overlap=overlap, runner=runner, **settings)
        yielded += len(trace.probe.of(SwappedIn if "preemption" in settings else Preempted))
        assert runner.longest > 8
    assert yielded > 0 or settings.keys() & {"discipline", "speculative"}

"""Block tables as arrays, kept from step to step: while a request runs its table only grows, so that a step converts
new blocks only. Converting 128 tables of 2,048 blocks anew would take longer than a GPU takes for the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.request import Request
from engine.scheduling.plan import SchedulerOutput


@dataclass(slots=True)
class _Kept:
    epoch: int
    """Of the request: with another one the table was begun anew."""
    blocks: np.ndarray
    """int32; longer than the table, so that it can grow."""
    count: int


class BlockTables:
    def __init__(self) -> None:
        self._kept: dict[Request, _Kept] = {}
        """Those of the last step."""

    def rows(self, output: SchedulerOutput) -> list[np.ndarray]:
        """The plan's block tables, int32; to be read only until the next call."""
        before, self._kept = self._kept, {}
        rows = []
        for request, epoch, table in zip(output.requests, output.epochs, output.block_tables, strict=True):
            kept, count = before.get(request), len(table)
            if kept is None or kept.epoch != epoch or kept.count > count:
                kept = _Kept(epoch, np.array(table, dtype=np.int32), count)
            elif kept.count < count:
                if count > kept.blocks.shape[0]:
                    kept.blocks = np.resize(kept.blocks, 2 * count)
                kept.blocks[kept.count : count] = table[kept.count :]
                kept.count = count
            self._kept[request] = kept
            rows.append(kept.blocks[:count])
        return rows

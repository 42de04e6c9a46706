"""Which request took each block last, for a run file: keyframes tell it only of blocks that are in one table. Light.

The engine follows this after every step, so it is lists of Python: most events are about one block.
"""

from __future__ import annotations

import itertools

import numpy as np

from engine.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    Keyframe,
    PoolShrunk,
    StepRecord,
    SwappedIn,
    SwappedOut,
)
from engine.run_file import Owners


class BlockTakers:
    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * (num_blocks + 1)
        self._owners = [0] * (num_blocks + 1)

    @classmethod
    def of(cls, keyframe: Keyframe) -> BlockTakers:
        takers = cls(keyframe.num_blocks)
        takers._owners = _told(keyframe).tolist()
        for request in keyframe.requests:
            for block in request.blocks:
                takers._references[block] += 1
        return takers

    def follow(self, record: StepRecord) -> None:
        """Take the events of a step."""
        references, owners = self._references, self._owners
        for event in record.events:
            if isinstance(event, (BlocksAllocated, SwappedIn)):
                for block in event.blocks:
                    references[block], owners[block] = 1, event.request_id
            elif isinstance(event, (BlocksFreed, SwappedOut)):
                for block in event.blocks:
                    references[block] -= 1
            elif isinstance(event, BlocksShared):
                for block in event.blocks:
                    references[block] += 1
                    if references[block] == 1:
                        owners[block] = event.request_id
            elif isinstance(event, BlockCopied):
                references[event.source] -= 1
                references[event.destination], owners[event.destination] = 1, event.request_id
            elif isinstance(event, PoolShrunk):
                self._references = references = [0] * (event.num_blocks + 1)
                self._owners = owners = [0] * (event.num_blocks + 1)

    def beside(self, keyframe: Keyframe) -> Owners:
        """What the tables of ``keyframe`` do not tell of the blocks that are referenced or cached."""
        owners = np.array(self._owners, dtype=np.int64)
        kept = np.array(self._references, dtype=np.int32) > 0
        kept[keyframe.cached_blocks] = True
        blocks = np.flatnonzero((owners != _told(keyframe)) & kept)
        return Owners(blocks.astype("<i4").tobytes(), owners[blocks].astype("<i8").tobytes())


def _told(keyframe: Keyframe) -> np.ndarray:
    """int64 [num_blocks + 1]: who took each block last as far as the tables tell, as :class:`RunState` reads them."""
    owners = np.zeros(keyframe.num_blocks + 1, dtype=np.int64)
    requests = sorted(keyframe.requests, key=lambda r: (r.arrival_time, r.request_id))
    blocks = np.fromiter(itertools.chain.from_iterable(r.blocks for r in requests), dtype=np.int64)
    owners[blocks] = np.repeat([r.request_id for r in requests], [len(r.blocks) for r in requests])
    owners[0] = 0  # the place of a block in host memory
    return owners

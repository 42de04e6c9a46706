"""The blocks of a run as arrays over block ids, moved on by the events of a step. Light: numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class BlockState:
    """Arrays over block ids 0 … ``num_blocks``; id 0, the null block, is never in use."""

    def __init__(self, num_blocks: int) -> None:
        size = num_blocks + 1
        self.refs = np.zeros(size, dtype=np.int32)
        self.owner = np.zeros(size, dtype=np.int64)
        """The request that took the block last; kept after it is freed while the block stays cached. 0: nobody yet."""
        self.hashed = np.zeros(size, dtype=np.bool_)
        self._parent = np.zeros(size, dtype=np.int32)
        # Registrations count up: a block that was taken and registered again is not what its old children came after.
        self._number = np.zeros(size, dtype=np.int64)
        self._parent_number = np.zeros(size, dtype=np.int64)
        self._registrations = 0

    @property
    def parent(self) -> np.ndarray:
        """int32 [num_blocks + 1]: the block whose content comes before in the chain of the prefix cache; 0: none, it
        begins a prompt or what came before has been taken since. O(num_blocks)."""
        return np.where(self._number[self._parent] == self._parent_number, self._parent, np.int32(0))

    def hold(self, tables: Mapping[int, Sequence[int]]) -> None:
        """All that requests refer to, by request id; a block that several share was taken by the last of them."""
        flat = np.fromiter(itertools.chain.from_iterable(tables.values()), dtype=np.int64)
        self.refs += np.bincount(flat, minlength=len(self.refs)).astype(np.int32)
        lengths = [len(table) for table in tables.values()]
        self.owner[flat] = np.repeat(np.array(list(tables), dtype=np.int64), lengths)
        self.refs[0] = self.owner[0] = 0  # the places of blocks in host memory

    def take(self, request_id: int, blocks: Sequence[int]) -> None:
        place = _place(blocks)
        self.refs[place] = 1
        self.owner[place] = request_id

    def share(self, request_id: int, blocks: Sequence[int]) -> None:
        self.refs[_place(blocks)] += 1
        alone = [block for block in blocks if self.refs[block] == 1]
        if alone:
            self.owner[alone] = request_id

    def release(self, blocks: Sequence[int]) -> None:
        self.refs[_place(blocks)] -= 1

    def cache(self, blocks: Sequence[int], parents: Sequence[int]) -> None:
        """Register ``blocks``, each after its parent; no ``parents``: all begin a prompt."""
        first, self._registrations = self._registrations + 1, self._registrations + len(blocks)
        place = _place(blocks)
        self.hashed[place] = True
        self._number[place] = first if len(blocks) == 1 else np.arange(first, self._registrations + 1)
        before = _place(parents) if parents else 0
        self._parent[place] = before
        self._parent_number[place] = self._number[before] if parents else 0

    def evict(self, blocks: Sequence[int]) -> None:
        place = _place(blocks)
        self.hashed[place] = False
        self._parent[place] = self._number[place] = self._parent_number[place] = 0


def _place(blocks: Sequence[int]) -> Any:
    """The same as an index: most events are about one block, and numpy takes a number in a tenth of the time that it
    takes a list."""
    return blocks[0] if len(blocks) == 1 else np.array(blocks, dtype=np.int64)

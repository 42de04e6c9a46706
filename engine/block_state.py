"""The blocks of a run as arrays over block ids, moved on by the events of a step. Light: numpy only."""

from __future__ import annotations

from collections.abc import Sequence

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

    def take(self, request_id: int, blocks: Sequence[int]) -> None:
        self.refs[blocks] = 1
        self.owner[blocks] = request_id

    def share(self, request_id: int, blocks: Sequence[int]) -> None:
        self.refs[blocks] += 1
        alone = [block for block in blocks if self.refs[block] == 1]
        self.owner[alone] = request_id

    def release(self, blocks: Sequence[int]) -> None:
        self.refs[blocks] -= 1

    def cache(self, blocks: Sequence[int], parents: Sequence[int]) -> None:
        """Register ``blocks``, each after its parent; no ``parents``: all begin a prompt."""
        first, self._registrations = self._registrations + 1, self._registrations + len(blocks)
        self.hashed[blocks] = True
        self._number[blocks] = range(first, self._registrations + 1)
        self._parent[blocks] = parents or 0
        self._parent_number[blocks] = self._number[parents] if parents else 0

    def evict(self, blocks: Sequence[int]) -> None:
        self.hashed[blocks] = False
        self._parent[blocks] = self._number[blocks] = self._parent_number[blocks] = 0

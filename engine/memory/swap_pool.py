"""Host memory for the blocks of swapped requests: which of its blocks are free.

A block that is given back may still have to be read by the step that is being planned (its contents are on their way
to the device), so it is handed out again only in the next step: :meth:`SwapPool.settle`.
"""

from __future__ import annotations

from collections.abc import Sequence


class SwapPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """Ids run from 1 to ``num_blocks``, as on the device."""
        self._free = list(range(num_blocks, 0, -1))
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`take` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._leaving)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, which must be free."""
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        self._leaving += blocks

    def settle(self) -> None:
        """The step that read what was given back has been planned: it is free."""
        if self._leaving:
            self._free += self._leaving
            self._leaving.clear()

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless every block is free, leaving, or in ``held``, and in one of them only."""
        everywhere = [*self._free, *self._leaving, *held]
        assert sorted(everywhere) == list(range(1, self.num_blocks + 1)), (
            f"host blocks: {len(self._free)} free, {len(self._leaving)} leaving, {sorted(held)} held "
            f"of {self.num_blocks}"
        )

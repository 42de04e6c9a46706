"""The prefix cache as a tree: which cached blocks follow which, in runs of blocks that look alike. Qt-free.

A block of the prefix cache is found by the hash of its content and of all that came before it, so it has one parent.
Drawn as an icicle: below a box lie those that follow it, as wide as their share of the blocks::

    ┌ 12 blocks ───────────────────────────┐   prompts that begin alike share their first blocks
    ├ 3 blocks ───────────┬ 2 blocks ──────┤   and part where they differ
    ├ 1 block ┐           └────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from app.scope.block_grid import BlockLook
from app.scope.block_words import referents
from app.translation import tr
from app.words import count
from engine.request import request_name
from engine.run_state import RunState

NARROW = 4
"""Pixels below which neighbouring boxes are drawn as one."""
MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Runs of blocks, as arrays [runs] in order of depth, and of place among those of the same depth.

    A run is a chain in which each block has one child, the next, with the same owner and the same look.
    """

    first: np.ndarray
    """Its first block."""
    length: np.ndarray
    """Blocks in it."""
    parent: np.ndarray
    """The run that it follows; -1: it begins a prompt, or what came before is not cached any more."""
    depth: np.ndarray
    """Runs before it."""
    start: np.ndarray
    """Blocks before it."""
    under: np.ndarray
    """Blocks in it and in all that follow it."""
    looks: np.ndarray
    """:class:`app.scope.block_grid.BlockLook`: cached, referenced or shared."""
    owners: np.ndarray
    """The request that took its blocks last."""
    left: np.ndarray
    right: np.ndarray
    """Where its box lies, 0 to 1; float64."""
    run_of: np.ndarray
    """The run of each block, int64 [num_blocks + 1]; -1: not in the prefix cache."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def levels(self) -> int:
        return int(self.depth[-1]) + 1 if len(self) else 0


def prefix_tree(state: RunState) -> PrefixTree:
    """The tree of all blocks that have a hash, in O(n log n) of the pool."""
    hashed = state.block_hashed
    parent = np.where(hashed, state.block_parent, 0).astype(np.int64)
    parent[~hashed[parent]] = 0
    refs, owner = state.block_refs, state.block_owner
    looks = np.where(refs > 1, BlockLook.SHARED, np.where(refs > 0, BlockLook.REFERENCED, BlockLook.CACHED))
    children = np.bincount(parent[hashed], minlength=len(parent))
    joins = hashed & (parent > 0) & (children[parent] == 1) & (looks == looks[parent]) & (owner == owner[parent])
    blocks = np.arange(len(parent))
    heads, _ = _climb(np.where(joins, parent, blocks), joins)
    _, start = _climb(parent, parent > 0)
    first = np.flatnonzero(hashed & ~joins)
    index = np.full(len(parent), -1, dtype=np.int64)
    index[first] = np.arange(len(first))
    above = np.where(parent[first] > 0, index[heads[parent[first]]], -1)
    rooted = np.append(above, -1) % (len(first) + 1)  # the root is the last place, and its own parent
    _, depth = _climb(rooted, np.arange(len(first) + 1) != len(first))
    depth = depth[:-1] - 1
    length = np.bincount(index[heads[hashed]], minlength=len(first))
    under = _sums(length, above, depth)
    order = np.lexsort((first, above, depth))
    left, right = _places(order, above, depth, under, length)
    order = np.lexsort((left, depth))
    rank = np.full(len(first) + 1, -1, dtype=np.int64)
    rank[order] = np.arange(len(first))
    return PrefixTree(
        first=first[order],
        length=length[order],
        parent=rank[above[order]],
        depth=depth[order],
        start=start[first[order]],
        under=under[order],
        looks=looks[first[order]].astype(np.uint8),
        owners=owner[first[order]],
        left=left[order],
        right=right[order],
        run_of=np.where(hashed, rank[index[heads]], -1),
    )


def _climb(up: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follows ``up`` from every place to where it ends, in strides that double: (the end, places passed)."""
    end, passed = up, steps.astype(np.int64)
    for _ in range(len(up).bit_length()):
        further = end[end]
        if np.array_equal(further, end):
            break
        passed = passed + passed[end]
        end = further
    return end, passed


def _sums(length: np.ndarray, above: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Blocks in each run and below it."""
    sums, parents = length.tolist(), above.tolist()
    for run in np.argsort(-depth, kind="stable").tolist():
        if parents[run] >= 0:
            sums[parents[run]] += sums[run]
    return np.array(sums, dtype=np.int64)


def _places(
    order: np.ndarray, above: np.ndarray, depth: np.ndarray, under: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Left and right edges, 0 to 1: what follows a run divides its whole width by the blocks under each."""
    count = len(order)
    left, right = np.zeros(count + 1), np.ones(count + 1)  # the last one is the root
    below = np.append(under - length, under[above < 0].sum())
    parents, sizes = above[order], under[order]
    before = np.cumsum(sizes) - sizes
    firsts = np.flatnonzero(np.diff(parents, prepend=-2) | np.diff(depth[order], prepend=-1))
    offsets = before - np.repeat(before[firsts], np.diff(firsts, append=count))
    edges = np.searchsorted(depth[order], np.arange(depth.max() + 2)) if count else [0]
    for begin, end in pairwise(edges):
        runs, up, at = order[begin:end], parents[begin:end], offsets[begin:end]
        scale = (right[up] - left[up]) / below[up]
        left[runs] = left[up] + at * scale
        right[runs] = left[up] + (at + sizes[begin:end]) * scale
    return left[:-1], right[:-1]


@dataclass(frozen=True, slots=True)
class Boxes:
    """What is drawn of the tree, row by row: arrays [boxes]."""

    row: np.ndarray
    x: np.ndarray
    """Pixels."""
    width: np.ndarray
    run: np.ndarray
    """The run, or the first of those that are drawn as one."""
    runs: np.ndarray
    """How many are drawn as one."""
    blocks: np.ndarray
    """In these runs; below them too in the last row, where that stands for all that lies deeper."""

    def __len__(self) -> int:
        return len(self.row)

    def at(self, x: int, row: int) -> int | None:
        """The box at a pixel."""
        found = np.flatnonzero((self.row == row) & (self.x <= x) & (x < self.x + self.width))
        return int(found[0]) if len(found) else None


def lay_out(tree: PrefixTree, width: int, rows: int) -> Boxes:
    """Boxes of whole pixels for the first ``rows`` levels; narrow neighbours become one."""
    shown = np.flatnonzero(tree.depth < rows)
    row = tree.depth[shown]
    x, end = np.rint(tree.left[shown] * width), np.rint(tree.right[shown] * width)
    narrow = end - x < NARROW
    joined = np.zeros(len(shown), dtype=np.bool_)
    if len(shown):
        gap = (x[1:] - end[:-1] > 0) | (np.diff(row) > 0)
        # A box of its own takes up no others; a row of narrow ones ends where it has got wide enough to be seen.
        joined[1:] = narrow[1:] & narrow[:-1] & ~gap & (np.floor(x[1:] / NARROW) == np.floor(x[:-1] / NARROW))
    begins = np.flatnonzero(~joined)
    ends = np.append(begins[1:], len(shown)) - 1 if len(shown) else begins
    held = np.where(row == rows - 1, tree.under[shown], tree.length[shown])
    blocks = np.add.reduceat(held, begins) if len(shown) else held
    return Boxes(
        row=row[begins],
        x=x[begins].astype(np.int64),
        width=np.maximum(1, end[ends] - x[begins]).astype(np.int64),
        run=shown[begins],
        runs=ends - begins + 1,
        blocks=blocks,
    )


def run_sentence(state: RunState, tree: PrefixTree, run: int) -> str:
    """All that is known of a run: its blocks and tokens, who refers to it, what follows it."""
    length, start, size = int(tree.length[run]), int(tree.start[run]), state.block_size
    lines = [
        tr(
            "{blocks} of the prefix cache, {tokens}",
            blocks=count(length, "block"),
            tokens=count(length * size, "token"),
        )
    ]
    if tree.parent[run] < 0:
        lines.append(tr("begins a prompt, or what came before is not cached any more"))
    else:
        lines.append(tr("follows {tokens}", tokens=count(start * size, "token")))
    users = referents(state, int(tree.first[run]))
    if users:
        more = tr(" and {users:,} more", users=len(users) - MOST_NAMED) if len(users) > MOST_NAMED else ""
        who = "request " if len(users) == 1 else "requests "
        lines.append(tr("referred to by ") + who + ", ".join(request_name(i) for i in users[:MOST_NAMED]) + more)
    else:
        lines.append(tr("no references: found by its hash until it is taken"))
        lines.append(tr("last used by request {request_name}", request_name=request_name(int(tree.owners[run]))))
    following = int(np.count_nonzero(tree.parent == run))
    below = int(tree.under[run]) - length
    if below:
        lines.append(
            tr(
                "{continuations} with {blocks} below it",
                continuations=count(following, "continuation"),
                blocks=count(below, "block"),
            )
        )
    return "\n".join(lines)

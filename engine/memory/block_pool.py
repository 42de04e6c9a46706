"""The blocks of the KV cache: who may have one, who refers to it, and which can still be found by content.

Every block but the null block 0 is in exactly one of three sets::

    free        no reference, no digest        a stack: the block given back last is taken first
    cached      no reference, a digest         least recently used first; taken when nothing is free
    referenced  one reference or more, with or without a digest

               take                       release, no digest
      free ───────────▶ referenced ───────────────────────────▶ free
        ▲                 ▲      │        release, digest
        │ (digest lost)   │share └────────────────────────────▶ cached
        └──── take ───────┴──────────────────────────────────────┘

All operations are O(1) a block, whatever the size of the pool or of the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than nobody refers to."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """The null block not counted; ids run from 1 to ``num_blocks``."""
        self.ref_counts = [0] * (num_blocks + 1)
        self.digests: list[bytes | None] = [None] * (num_blocks + 1)
        # Registrations are counted, so that a block that is taken and registered again is not mistaken for what it was.
        # Plain numbers in lists: tuples would be looked at by every garbage collection.
        self._numbers = [0] * (num_blocks + 1)
        """The number of each block's registration."""
        self._parent_numbers = [0] * (num_blocks + 1)
        """That of the block whose content comes before."""
        self._registrations = 0
        self._free = list(range(num_blocks, 0, -1))
        # An OrderedDict is a doubly linked list with a hash of its nodes: any cached block leaves in O(1).
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without reference that can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`take` can hand out."""
        return len(self._free) + len(self._cached)

    def take(self, count: int, evicted: list[int]) -> list[int]:
        """Hand out ``count`` blocks for writing, with one reference and no digest; all or :class:`OutOfBlocksError`.

        Those among them that were cached until now are appended to ``evicted``, the longest unused first.
        """
        free, ref_counts = self._free, self.ref_counts
        if count > len(free) + len(self._cached):
            raise OutOfBlocksError(f"{count} blocks were asked for and {self.num_available} are available")
        split = max(len(free) - count, 0)
        blocks = free[split:]
        blocks.reverse()
        del free[split:]
        for _ in range(count - len(blocks)):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            evicted.append(block)
            blocks.append(block)
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One reference more to each of ``blocks``, which are referenced or cached."""
        ref_counts, cached = self.ref_counts, self._cached
        for block in blocks:
            if ref_counts[block] == 0:
                del cached[block]
            ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block of a table, last block first: a sequence's tail is evicted before its
        head, which more requests begin with."""
        ref_counts, digests, free, cached = self.ref_counts, self.digests, self._free, self._cached
        for block in reversed(blocks):
            count = ref_counts[block] = ref_counts[block] - 1
            if count == 0:
                if digests[block] is None:
                    free.append(block)
                else:
                    cached[block] = None

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks with these contents, referenced or cached, up to the first content that none has."""
        found, by_digest = list[int](), self._by_digest
        for digest in digests:
            block = by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def register(
        self, blocks: Sequence[int], digests: Sequence[bytes], before: bytes | None = None
    ) -> tuple[list[int], list[int]]:
        """Make full, referenced blocks findable: those of them whose content no other block has already, and the parent
        of each (:meth:`parents_of`). ``before``: the digest that the first of ``digests`` is chained to; None: nothing
        precedes it."""
        registered, parents, number = list[int](), list[int](), self._registrations
        by_digest, own, numbers, parent_numbers = self._by_digest, self.digests, self._numbers, self._parent_numbers
        parent = by_digest.get(before, 0) if before is not None else 0
        parent_number = numbers[parent]
        for block, digest in zip(blocks, digests, strict=True):
            found = by_digest.setdefault(digest, block)
            if found == block:
                number += 1
                own[block] = digest
                numbers[block] = number
                parent_numbers[block] = parent_number
                registered.append(block)
                parents.append(parent)
                parent_number = number
            else:
                parent_number = numbers[found]
            parent = found
        self._registrations = number
        return registered, parents

    def parents_of(self, blocks: Sequence[int]) -> list[int]:
        """For each of all ``blocks`` with a digest the one whose content comes before its own in the chain; 0: it
        begins a prompt, or what came before has been taken since. O(blocks)."""
        numbers = self._numbers
        by_number = {numbers[block]: block for block in blocks}
        return [by_number.get(self._parent_numbers[block], 0) for block in blocks]

    def registered_blocks(self) -> list[int]:
        """Blocks that have a digest, with or without references, in order of id."""
        return sorted(self._by_digest.values())

    def _forget(self, block: int) -> None:
        digest = self.digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self.digests[block] = None
            self._numbers[block] = 0

    def check(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless the sets are disjoint, complete and as ``references`` (block → table entries)."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert not free & cached, f"blocks {sorted(free & cached)} are free and cached"
        for block in range(1, self.num_blocks + 1):
            count = self.ref_counts[block]
            assert count == references.get(block, 0), (
                f"block {block} counts {count} references; tables hold {references.get(block, 0)}"
            )
            homes = (block in free) + (block in cached) + (count > 0)
            assert homes == 1, f"block {block} is in {homes} of free, cached and referenced"
            digest = self.digests[block]
            assert digest is None or self._by_digest.get(digest) == block, f"block {block} is not what its digest finds"
            assert (digest is None) == (self._numbers[block] == 0), f"block {block} has half a registration"
            assert block not in free or digest is None, f"free block {block} has a digest"
            assert block not in cached or digest is not None, f"cached block {block} has no digest"
        assert len(self._by_digest) == sum(d is not None for d in self.digests), (
            "the index finds a block without digest"
        )
        assert self.ref_counts[0] == 0 and 0 not in references, "the null block is in use"

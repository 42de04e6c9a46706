"""Block tables, prefix hits, copy-on-write and swapping over a :class:`~engine.memory.block_pool.BlockPool`.

A request's table holds the ids of its blocks; token i lives in block ``table[i // block_size]``, at offset
``i % block_size``::

    tokens    |  0 … 15 | 16 … 31 | 32 … 47 | 48 … 51
    table     |    7    |    2    |    9    |   14            block_size 16
              |<- prefix hits ->|<- computed by this request ->|
              |   digests known, shareable  |<- being filled ->|
                                                      ^num_computed_tokens        ^capacity = 64

A full block whose keys and values are there is findable under a 128-bit digest of everything up to its end: of the
digest before it and its own tokens, beginning with a root made of ``cache_key`` (whatever else decides the contents:
the model, its dtype). Equal digests therefore mean equal contents, and hits need no comparison of tokens.

A request that is swapped out keeps its table, with 0 in the places of the blocks that are in host memory. Blocks that
others share stay where they are, and it goes on referring to them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.events import (
    AnyEvent,
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    SwappedIn,
    SwappedOut,
)
from engine.memory.block_pool import BlockPool, OutOfBlocksError
from engine.memory.swap_pool import SwapPool
from engine.request import Request, RequestStatus

DIGEST_BYTES = 16
TOKEN_BYTES = struct.calcsize("I")
_NEVER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Joining:
    """What a waiting request finds when it joins."""

    num_computed: int = 0
    """Tokens it does not have to compute."""
    blocks: list[int] = field(default_factory=list)
    """Full blocks that it shares: of the prefix cache, or of the request whose prompt it has."""
    copied_block: int = 0
    """A block of that request, half full, of which it gets a copy; 0: none."""


@dataclass(frozen=True, slots=True)
class Moves:
    """To be done before a step, in this order: to the host, on the device, from the host."""

    swap_out: list[tuple[int, int]]
    """(block, host block)"""
    copies: list[tuple[int, int]]
    """(source, destination)"""
    swap_in: list[tuple[int, int]]
    """(host block, block)"""


class KVCacheManager:
    """All changes of block tables go through here, and each leaves an event in ``events``."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        cache_key: bytes,
        events: list[AnyEvent],
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = SwapPool(num_host_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._root = blake2b(cache_key, digest_size=DIGEST_BYTES).digest()
        # Copying an empty hash costs a third of making one.
        self._empty_hash = blake2b(digest_size=DIGEST_BYTES)
        self._events = events
        self._swap_out: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._swap_in_pairs: list[tuple[int, int]] = []
        self._arriving: set[int] = set()
        """Blocks that copies and swaps fill at the beginning of the step that is being planned."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def renew(self, num_blocks: int) -> None:
        """The storage was made anew with so many blocks, all empty: nothing can be found, and nothing is to be moved.
        No request may hold a block, on the device or on the host."""
        self.pool = BlockPool(num_blocks)
        self.take_moves()

    # Prefix cache -------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Digest the full blocks of a new request's prompt, once."""
        request.cache_edge = self.block_size if self.prefix_cache else _NEVER
        if self.prefix_cache:
            self._extend_digests(request, len(request.token_ids) // self.block_size)

    def _extend_digests(self, request: Request, num_full_blocks: int) -> None:
        digests, size = request.block_hashes, self.block_size
        tokens = request.token_ids[len(digests) * size : num_full_blocks * size]
        data, stride = struct.pack(f"{len(tokens)}I", *tokens), size * TOKEN_BYTES
        parent = digests[-1] if digests else self._root
        for start in range(0, len(data), stride):
            content = self._empty_hash.copy()
            content.update(parent + data[start : start + stride])
            parent = content.digest()
            digests.append(parent)

    def prefix_of(self, request: Request) -> list[int]:
        """The first 32 bits of the digest of each full block of its prompt; empty without a prefix cache."""
        digests = request.block_hashes[: request.num_prompt_tokens // self.block_size]
        words = DIGEST_BYTES // TOKEN_BYTES
        return memoryview(b"".join(digests)).cast("I")[::words].tolist()

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that a waiting request's tokens begin with. At least one token is left to compute, since a
        step that computes nothing has no logits to sample from."""
        return self.pool.find(request.block_hashes[: (len(request.token_ids) - 1) // self.block_size])

    def register_full_blocks(self, request: Request) -> None:
        """Make the blocks that the last step filled findable; called where it has reached ``cache_edge``."""
        size = self.block_size
        first, full = request.cache_edge // size - 1, request.num_computed_tokens // size
        self._extend_digests(request, full)
        digests = request.block_hashes
        before = digests[first - 1] if first else None
        cached, parents = self.pool.register(request.block_ids[first:full], digests[first:full], before)
        request.cache_edge = (full + 1) * size
        if cached:
            self._events.append(BlocksCached(request.request_id, cached, parents))

    # Joining ------------------------------------------------------------------------------------------------------

    def look_up(self, request: Request) -> Joining:
        """What a waiting request would find when it joins now."""
        if request.status is RequestStatus.SWAPPED:
            return Joining(request.num_computed_tokens)
        hits = self.find_prefix(request)
        cached = len(hits) * self.block_size
        parent = request.parent
        if parent is not None and parent.status is RequestStatus.RUNNING:
            # At least one token is left to compute: its logits are what the answer is drawn from.
            common = min(parent.num_computed_tokens, request.num_prompt_tokens, len(request.token_ids) - 1)
            full, rest = divmod(common, self.block_size)
            if rest and parent.block_ids[full] in self._arriving:  # copies are done before blocks come from the host
                common, rest = full * self.block_size, 0
            if common > cached:
                return Joining(common, parent.block_ids[:full], parent.block_ids[full] if rest else 0)
        return Joining(cached, hits)

    def blocks_to_join(self, request: Request, joining: Joining, num_tokens: int | None = None) -> int:
        """Available blocks that a waiting request takes up once it holds ``num_tokens`` tokens (all that it has): new
        ones, those that come back from the host, and those of its hits to which nobody refers now."""
        total = self.blocks_for(len(request.token_ids) if num_tokens is None else num_tokens)
        if request.status is RequestStatus.SWAPPED:
            return max(total - len(request.block_ids), 0) + len(request.host_blocks)
        ref_counts = self.pool.ref_counts
        idle_hits = [ref_counts[block] for block in joining.blocks].count(0)
        return max(total - len(joining.blocks), 0) + idle_hits

    def join(self, request: Request, joining: Joining, num_tokens: int) -> bool:
        """Begin a table that holds ``num_tokens`` tokens: what ``joining`` found, and new blocks behind it. False, and
        nothing changed, where they are not to be had."""
        if request.status is RequestStatus.SWAPPED:
            return self._swap_in(request, num_tokens)
        size, shared = self.block_size, list(joining.blocks)
        self.pool.share(shared)  # first, so that taking blocks does not evict them
        new = self._take(request, max(self.blocks_for(num_tokens) - len(shared), 0))
        if new is None:
            self.pool.release(shared)
            return False
        request.block_ids = shared + new
        request.num_computed_tokens = joining.num_computed
        request.capacity = len(request.block_ids) * size
        if self.prefix_cache:
            request.cache_edge = (joining.num_computed // size + 1) * size
        source = joining.copied_block
        if shared or source:
            self._events.append(BlocksShared(request.request_id, [*shared, source] if source else shared))
        if source:
            # Both are about to write to the block that is half full: the one that joins gets a copy.
            self._copies.append((source, new[0]))
            self._arriving.add(new[0])
            self._events.append(BlockCopied(request.request_id, source, new[0]))
            new = new[1:]
        if new:
            self._events.append(BlocksAllocated(request.request_id, new))
        return True

    # Tables -------------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_new_tokens: int) -> bool:
        """Extend a running request's table so that the next ``num_new_tokens`` can be written. False, and nothing
        changed, where the blocks are not to be had."""
        size, table = self.block_size, request.block_ids
        missing = -(-(request.num_computed_tokens + num_new_tokens) // size) - len(table)
        if missing > 0:
            new = self._take(request, missing)
            if new is None:
                return False
            self._events.append(BlocksAllocated(request.request_id, new))
            table += new
        request.capacity = len(table) * size
        return True

    def release(self, request: Request) -> None:
        """Give up the whole table, on the device and on the host; what it cached stays findable until it is taken."""
        blocks = request.block_ids
        if request.host_blocks:
            self._forget_host(request)
            blocks = [block for block in blocks if block]
        if blocks:
            self.pool.release(blocks)
            self._events.append(BlocksFreed(request.request_id, blocks))
            if self._arriving and not self._arriving.isdisjoint(blocks):
                self._cancel_arrivals({block for block in blocks if self.pool.ref_counts[block] == 0})
        request.block_ids = []
        request.num_computed_tokens = request.capacity = 0
        request.cache_edge = self.block_size if self.prefix_cache else _NEVER

    def blocks_freed_by(self, requests: Iterable[Request], keep: Sequence[int]) -> int:
        """Blocks that become available if all ``requests`` give up their tables, those in ``keep`` not counted."""
        held = Counter(block for request in requests for block in request.block_ids)
        kept = set(keep)
        return sum(1 for block, count in held.items() if self.pool.ref_counts[block] == count and block not in kept)

    # Host memory --------------------------------------------------------------------------------------------------

    def blocks_to_swap(self, request: Request) -> int:
        """Blocks that leave the device if a running request is swapped: those begun that no other request shares."""
        return len(self._movable(request))

    def swap_refusal(self, request: Request) -> str:
        """Why a running request cannot be swapped; empty if it can."""
        moving = self._movable(request)
        if not moving:
            return "it has computed nothing that it does not share"
        if len(moving) > self.host.num_free:
            return f"it needs {len(moving)} host blocks and {self.host.num_free} are free"
        if not self._arriving.isdisjoint(request.block_ids):
            return "its blocks are only just being copied"
        return ""

    def swap_out(self, request: Request) -> int:
        """Move a running request's blocks to the host and give up the others, but for those it shares: their number.
        :meth:`swap_refusal` must be empty."""
        table = request.block_ids
        begun = self.blocks_for(request.num_computed_tokens)
        if begun < len(table):
            self.pool.release(table[begun:])
            self._events.append(BlocksFreed(request.request_id, table[begun:]))
        places = self._movable(request)
        blocks, hosts = [table[i] for i in places], self.host.take(len(places))
        request.block_ids = table[:begun]
        for place in places:
            request.block_ids[place] = 0
        request.host_blocks = hosts
        request.capacity = 0
        self.pool.release(blocks)
        self._swap_out += zip(blocks, hosts, strict=True)
        self._events.append(SwappedOut(request.request_id, blocks, hosts))
        return len(blocks)

    def _movable(self, request: Request) -> list[int]:
        """Places in the table whose block is begun and referred to by nobody else."""
        ref_counts = self.pool.ref_counts
        begun = request.block_ids[: self.blocks_for(request.num_computed_tokens)]
        return [place for place, block in enumerate(begun) if ref_counts[block] == 1]

    def _swap_in(self, request: Request, num_tokens: int) -> bool:
        table, hosts = request.block_ids, request.host_blocks
        behind = max(self.blocks_for(num_tokens) - len(table), 0)
        new = self._take(request, len(hosts) + behind)
        if new is None:
            return False
        back, new = new[: len(hosts)], new[len(hosts) :]
        coming = iter(back)
        request.block_ids = [block or next(coming) for block in table] + new
        request.capacity = len(request.block_ids) * self.block_size
        self._swap_in_pairs += zip(hosts, back, strict=True)
        self._arriving.update(back)
        self.host.release(hosts)
        request.host_blocks = []
        if self.prefix_cache:
            request.cache_edge = (request.num_computed_tokens // self.block_size + 1) * self.block_size
        self._events.append(SwappedIn(request.request_id, back, hosts))
        if new:
            self._events.append(BlocksAllocated(request.request_id, new))
        return True

    def _forget_host(self, request: Request) -> None:
        own = set(request.host_blocks)
        self._swap_out = [(block, host) for block, host in self._swap_out if host not in own]
        self.host.release(request.host_blocks)
        request.host_blocks = []

    def _cancel_arrivals(self, blocks: set[int]) -> None:
        """Blocks that this step was to fill are given back before it has run: nothing may be written to them."""
        self._copies = [(source, target) for source, target in self._copies if target not in blocks]
        self._swap_in_pairs = [(host, target) for host, target in self._swap_in_pairs if target not in blocks]
        self._arriving -= blocks

    def take_moves(self) -> Moves:
        """What has to be moved before the step that has been planned; each move is handed out once."""
        moves = Moves(self._swap_out, self._copies, self._swap_in_pairs)
        if self._swap_out or self._copies or self._swap_in_pairs:
            self._swap_out, self._copies, self._swap_in_pairs = [], [], []
            self._arriving.clear()
        self.host.settle()
        return moves

    def _take(self, request: Request, count: int) -> list[int] | None:
        """``count`` blocks for ``request``; None where they are not to be had."""
        evicted: list[int] = []
        try:
            blocks = self.pool.take(count, evicted)
        except OutOfBlocksError:
            return None
        if evicted:
            self._events.append(BlocksEvicted(request.request_id, evicted))
        return blocks

"""Block tables, prefix hits and copy-on-write over a :class:`~engine.memory.block_pool.BlockPool`.

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
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.events import (
    AnyEvent,
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
)
from engine.memory.block_pool import BlockPool, OutOfBlocksError
from engine.request import Request

DIGEST_BYTES = 16
_NEVER = 2**63 - 1


class KVCacheManager:
    """All changes of block tables go through here, and each leaves an event in ``events``."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool, cache_key: bytes, events: list[AnyEvent]
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._root = blake2b(cache_key, digest_size=DIGEST_BYTES).digest()
        # Copying an empty hash costs a third of making one.
        self._empty_hash = blake2b(digest_size=DIGEST_BYTES)
        self._events = events
        self._copies: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    # Prefix cache -------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Digest the full blocks of a new request's prompt, once."""
        request.cache_edge = self.block_size if self.prefix_cache else _NEVER
        if self.prefix_cache:
            self._extend_digests(request, len(request.token_ids) // self.block_size)

    def _extend_digests(self, request: Request, num_full_blocks: int) -> None:
        digests, size = request.block_hashes, self.block_size
        first = len(digests)
        tokens = array("I", request.token_ids[first * size : num_full_blocks * size])
        data, stride = tokens.tobytes(), size * tokens.itemsize
        parent = digests[-1] if digests else self._root
        for start in range(0, len(data), stride):
            content = self._empty_hash.copy()
            content.update(parent + data[start : start + stride])
            parent = content.digest()
            digests.append(parent)

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that a waiting request's tokens begin with. At least one token is left to compute, since a
        step that computes nothing has no logits to sample from."""
        hits: list[int] = []
        find = self.pool.find
        for digest in request.block_hashes[: (len(request.token_ids) - 1) // self.block_size]:
            block = find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def register_full_blocks(self, request: Request) -> None:
        """Make the blocks that the last step filled findable; called where it has reached ``cache_edge``."""
        size, table, digests = self.block_size, request.block_ids, request.block_hashes
        full = request.num_computed_tokens // size
        self._extend_digests(request, full)
        first = request.cache_edge // size - 1
        register = self.pool.register
        cached = [table[i] for i in range(first, full) if register(table[i], digests[i])]
        request.cache_edge = (full + 1) * size
        if cached:
            self._events.append(BlocksCached(request.request_id, cached))

    # Tables -------------------------------------------------------------------------------------------------------

    def blocks_to_admit(self, request: Request, hits: Sequence[int]) -> int:
        """Available blocks that a waiting request takes up once all its tokens are computed: new ones, and those of its
        hits to which nobody refers now."""
        idle_hits = sum(1 for block in hits if self.pool.ref_counts[block] == 0)
        return self.blocks_for(len(request.token_ids)) - len(hits) + idle_hits

    def admit(self, request: Request, hits: Sequence[int], num_new_tokens: int) -> bool:
        """Begin a table: the hits, and blocks for ``num_new_tokens`` behind them. False, and nothing changed, where
        they are not to be had."""
        size = self.block_size
        cached_tokens = len(hits) * size
        for block in hits:  # first, so that taking blocks does not evict them
            self.pool.share(block)
        new = self._take(request, self.blocks_for(cached_tokens + num_new_tokens) - len(hits))
        if new is None:
            self.pool.release(hits)
            return False
        request.block_ids = [*hits, *new]
        request.num_computed_tokens = cached_tokens
        request.capacity = len(request.block_ids) * size
        if self.prefix_cache:
            request.cache_edge = cached_tokens + size
        if hits:
            self._events.append(BlocksShared(request.request_id, list(hits)))
        if new:
            self._events.append(BlocksAllocated(request.request_id, new))
        return True

    def reserve(self, request: Request, num_new_tokens: int) -> bool:
        """Extend a running request's table so that the next ``num_new_tokens`` can be written. False, and nothing
        changed, where the blocks are not to be had."""
        size, table, computed = self.block_size, request.block_ids, request.num_computed_tokens
        missing = -(-(computed + num_new_tokens) // size) - len(table)
        # A block that is half full and has other readers must not be written: it is copied first.
        filling, offset = divmod(computed, size)
        copy = offset > 0 and self.pool.ref_counts[table[filling]] > 1
        new = self._take(request, max(missing, 0) + copy)
        if new is None:
            return False
        if copy:
            source, table[filling] = table[filling], new.pop(0)
            self.pool.release([source])
            self._copies.append((source, table[filling]))
            self._events.append(BlockCopied(request.request_id, source, table[filling]))
        if new:
            self._events.append(BlocksAllocated(request.request_id, new))
        table += new
        request.capacity = len(table) * size
        return True

    def release(self, request: Request) -> None:
        """Give up the whole table; what it cached stays findable until it is taken."""
        blocks = request.block_ids
        if blocks:
            self.pool.release(blocks)
            self._events.append(BlocksFreed(request.request_id, blocks))
            if self._copies:
                own = set(blocks)
                self._copies = [(source, target) for source, target in self._copies if target not in own]
        request.block_ids = []
        request.num_computed_tokens = request.capacity = 0
        request.cache_edge = self.block_size if self.prefix_cache else _NEVER

    def fork(self, parent: Request, child: Request) -> None:
        """Give ``child``, whose tokens begin with the parent's computed ones, the parent's blocks. Whoever first writes
        to the block that is half full gets a copy of it; the last one left writes in place."""
        computed = parent.num_computed_tokens
        shared = parent.block_ids[: self.blocks_for(computed)]
        for block in shared:
            self.pool.share(block)
        child.block_ids = shared
        child.num_computed_tokens = child.capacity = computed
        child.block_hashes = parent.block_hashes[: computed // self.block_size]
        child.cache_edge = parent.cache_edge
        if computed % self.block_size:
            parent.capacity = computed  # it has to ask before it writes on
        if shared:
            self._events.append(BlocksShared(child.request_id, list(shared)))

    def blocks_freed_by(self, requests: Iterable[Request], keep: Sequence[int]) -> int:
        """Blocks that become available if all ``requests`` give up their tables, those in ``keep`` not counted."""
        held = Counter(block for request in requests for block in request.block_ids)
        kept = set(keep)
        return sum(1 for block, count in held.items() if self.pool.ref_counts[block] == count and block not in kept)

    def take_copies(self) -> list[tuple[int, int]]:
        """The (source, destination) pairs to be copied before the next step; each is handed out once."""
        copies, self._copies = self._copies, []
        return copies

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

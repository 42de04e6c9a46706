"""Block tables, prefix hits and copy-on-write."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.events import AnyEvent, BlockCopied, BlocksAllocated, BlocksShared
from engine.memory.block_pool import OutOfBlocksError
from engine.memory.kv_cache import KVCacheManager
from engine.request import Request, SamplingParams


class Cache:
    """A manager, and requests that compute without a model."""

    def __init__(self, num_blocks: int = 8, block_size: int = 4, cache_key: bytes = b"") -> None:
        self.events: list[AnyEvent] = []
        self.manager = KVCacheManager(
            num_blocks, block_size, prefix_cache=True, cache_key=cache_key, events=self.events
        )
        self._next_id = 1

    def request(self, tokens: list[int]) -> Request:
        request = Request(self._next_id, tokens, SamplingParams(), max_tokens=100)
        self._next_id += 1
        self.manager.prepare(request)
        return request

    def admit(self, tokens: list[int]) -> tuple[Request, int]:
        """A request whose whole prompt is computed, and how many of its tokens were hits."""
        request = self.request(tokens)
        hits = self.manager.find_prefix(request)
        cached = len(hits) * self.manager.block_size
        assert self.manager.admit(request, hits, len(tokens) - cached)
        self.compute(request, len(tokens) - cached)
        return request, cached

    def compute(self, request: Request, count: int) -> None:
        assert request.num_computed_tokens + count <= request.capacity
        request.num_computed_tokens += count
        if request.num_computed_tokens >= request.cache_edge:
            self.manager.register_full_blocks(request)

    def decode(self, request: Request, token: int) -> None:
        request.token_ids.append(token)
        if request.num_computed_tokens >= request.capacity:
            assert self.manager.reserve(request, 1)
        self.compute(request, 1)

    def check(self, *live: Request) -> None:
        self.manager.pool.check(Counter(block for request in live for block in request.block_ids))


def test_a_full_hit_leaves_a_token_to_compute_and_never_shrinks() -> None:
    cache = Cache(num_blocks=16)
    prompt = list(range(12))  # three full blocks
    hits = []
    for _ in range(3):
        request, cached = cache.admit(prompt)
        hits.append(cached)
        cache.manager.release(request)
    assert hits == [0, 8, 8]
    _, longer = cache.admit([*prompt, 1, 2, 3, 4])
    assert longer == 12, "the whole registered prefix is found"


@pytest.mark.parametrize("length, expected", [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (13, 12)])
def test_hits_at_the_edges_of_blocks(length: int, expected: int) -> None:
    cache = Cache(num_blocks=16)
    cache.admit(list(range(20)))
    _, cached = cache.admit(list(range(length)))
    assert cached == expected


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    cache = Cache()
    cache.admit([1, 2, 3, 4, 5, 6, 7, 8])
    other = cache.request([0, 0, 0, 0, 5, 6, 7, 8, 9])
    assert cache.manager.find_prefix(other) == []


def test_digests_depend_on_the_cache_key_and_are_128_bits() -> None:
    digests = [Cache(cache_key=key).request([1, 2, 3, 4, 5]).block_hashes for key in (b"", b"model-a", b"model-b")]
    assert all(len(one) == 1 and len(one[0]) == 16 for one in digests)
    assert len({one[0] for one in digests}) == 3


def test_digests_of_a_growing_answer_are_those_of_a_prompt() -> None:
    cache = Cache(num_blocks=16)
    request, _ = cache.admit([1, 2, 3])
    for token in range(4, 14):
        cache.decode(request, token)
    assert request.block_hashes == cache.request(list(range(1, 14))).block_hashes


def test_shared_blocks_count_once() -> None:
    cache = Cache(num_blocks=8)
    owner, _ = cache.admit(list(range(8)))
    others = [cache.admit([*range(8), 50 + i])[0] for i in range(3)]
    assert {tuple(other.block_ids[:2]) for other in others} == {tuple(owner.block_ids)}
    assert cache.manager.pool.num_available == 8 - 2 - 3
    everyone = [owner, *others]
    assert cache.manager.blocks_freed_by(others, []) == 3
    assert cache.manager.blocks_freed_by(everyone, []) == 5
    assert cache.manager.blocks_freed_by(everyone, owner.block_ids) == 3
    cache.check(*everyone)
    for request in everyone:
        cache.manager.release(request)
    cache.check()
    assert cache.manager.pool.num_available == 8


def test_idle_hits_need_room_too() -> None:
    cache = Cache(num_blocks=3)
    first, _ = cache.admit(list(range(8)))
    cache.manager.release(first)
    again = cache.request([*range(8), 9])
    hits = cache.manager.find_prefix(again)
    assert len(hits) == 2 and cache.manager.blocks_to_admit(again, hits) == 3
    holder, _ = cache.admit([7])
    assert holder.block_ids[0] not in hits, "the free block goes before the cached ones"
    assert cache.manager.blocks_to_admit(again, hits) > cache.manager.pool.num_available
    assert not cache.manager.admit(again, hits, 1)
    assert again.block_ids == [] and again.num_computed_tokens == 0
    cache.check(holder)


def test_a_refusal_of_the_pool_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    cached, _ = cache.admit(list(range(4)))
    cache.manager.release(cached)
    request, events = cache.request(list(range(10))), len(cache.events)

    def refuse(count: int, evicted: list[int]) -> list[int]:
        raise OutOfBlocksError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(cache.manager.pool, "take", refuse)
        assert not cache.manager.admit(request, cache.manager.find_prefix(request), 6)
        cache.check()
        assert len(cache.events) == events
    assert cache.manager.admit(request, cache.manager.find_prefix(request), 6)
    assert [type(event) for event in cache.events[events:]] == [BlocksShared, BlocksAllocated]
    cache.check(request)


def test_without_the_cache_nothing_is_found_or_kept() -> None:
    events: list[AnyEvent] = []
    manager = KVCacheManager(4, 4, prefix_cache=False, cache_key=b"", events=events)
    request = Request(1, list(range(8)), SamplingParams(), max_tokens=10)
    manager.prepare(request)
    assert manager.admit(request, manager.find_prefix(request), 8)
    request.num_computed_tokens = 8
    assert request.num_computed_tokens < request.cache_edge
    manager.release(request)
    assert (manager.pool.num_free, manager.pool.num_cached) == (4, 0)


def test_copy_on_write_in_the_middle_of_a_block() -> None:
    """Two children write on behind a half-full block; each gets its own, and the last one left writes in place."""
    cache = Cache(num_blocks=16)
    manager = cache.manager
    parent, _ = cache.admit([1, 2, 3, 4, 5, 6])
    children = [cache.request([1, 2, 3, 4, 5, 6]) for _ in range(2)]
    for child in children:
        manager.fork(parent, child)
    everyone = [parent, *children]
    cache.check(*everyone)
    full, half = parent.block_ids
    assert manager.pool.ref_counts[half] == 3

    cache.decode(children[0], 10)
    copies = manager.take_copies()
    assert copies == [(half, children[0].block_ids[1])] and manager.take_copies() == []
    assert parent.block_ids == [full, half] and manager.pool.ref_counts[half] == 2
    cache.check(*everyone)

    cache.decode(children[1], 11)
    assert manager.take_copies() == [(half, children[1].block_ids[1])]
    assert len({r.block_ids[1] for r in everyone}) == 3 and len({r.block_ids[0] for r in everyone}) == 1

    cache.decode(parent, 12)
    assert manager.take_copies() == [] and parent.block_ids == [full, half], "the last owner writes in place"
    cache.check(*everyone)
    copied = [event for event in cache.events if isinstance(event, BlockCopied)]
    assert [(event.request_id, event.source) for event in copied] == [(2, half), (3, half)]

    for child in children:
        manager.release(child)
    cache.check(parent)
    cache.decode(parent, 13)
    assert manager.pool.find(parent.block_hashes[1]) == half, "the full block is known by its own contents"


def test_the_parent_copies_too_where_it_writes_first() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2])
    half = parent.block_ids[0]
    child = cache.request([1, 2])
    cache.manager.fork(parent, child)
    cache.decode(parent, 3)
    assert cache.manager.take_copies() == [(half, parent.block_ids[0])] and parent.block_ids[0] != half
    cache.decode(child, 4)
    assert cache.manager.take_copies() == [] and child.block_ids == [half]
    cache.check(parent, child)


def test_a_fork_at_the_edge_of_a_block_copies_nothing() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2, 3, 4])
    child = cache.request([1, 2, 3, 4])
    cache.manager.fork(parent, child)
    cache.decode(child, 5)
    cache.decode(parent, 6)
    assert cache.manager.take_copies() == []
    assert child.block_ids[0] == parent.block_ids[0] and child.block_ids[1] != parent.block_ids[1]
    cache.check(parent, child)


def test_a_copy_is_forgotten_with_the_request_it_was_for() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2])
    child = cache.request([1, 2])
    cache.manager.fork(parent, child)
    cache.decode(child, 3)
    cache.manager.release(child)
    assert cache.manager.take_copies() == []
    cache.decode(parent, 4)
    assert cache.manager.take_copies() == []
    cache.check(parent)

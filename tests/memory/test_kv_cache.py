"""Block tables, prefix hits, copy-on-write and host memory."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.events import AnyEvent, BlockCopied, BlocksAllocated, BlocksCached, BlocksShared
from engine.memory.block_pool import OutOfBlocksError
from engine.memory.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus, SamplingParams


class Cache:
    """A manager, and requests that compute without a model."""

    def __init__(
        self, num_blocks: int = 8, block_size: int = 4, cache_key: bytes = b"", num_host_blocks: int = 0
    ) -> None:
        self.events: list[AnyEvent] = []
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            prefix_cache=True,
            cache_key=cache_key,
            events=self.events,
            num_host_blocks=num_host_blocks,
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
        joining = self.manager.look_up(request)
        assert self.manager.join(request, joining, len(tokens))
        request.status = RequestStatus.RUNNING
        self.compute(request, len(tokens) - joining.num_computed)
        return request, joining.num_computed

    def branch(self, parent: Request) -> Request:
        """Another answer to the parent's prompt, which joins, and computes the prompt's last token itself."""
        child = self.request(parent.token_ids[: parent.num_prompt_tokens])
        child.parent = parent
        assert self.manager.join(child, self.manager.look_up(child), child.num_tokens)
        child.status = RequestStatus.RUNNING
        self.compute(child, child.num_tokens - child.num_computed_tokens)
        return child

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
        self.manager.pool.check(Counter(block for request in live for block in request.block_ids if block))
        self.manager.host.check([block for request in live for block in request.host_blocks])


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


def test_the_tree_of_the_cache_is_that_of_the_prompts_though_two_compute_a_beginning_at_once() -> None:
    cache = Cache(num_blocks=16)
    begin = list(range(8))
    first, second = cache.request([*begin, 20, 21, 22, 23]), cache.request([*begin, 30, 31, 32, 33])
    for request in (first, second):
        assert cache.manager.join(request, cache.manager.look_up(request), 12)
        request.status = RequestStatus.RUNNING
    for _ in range(3):
        cache.compute(first, 4)
        cache.compute(second, 4)
    told = {
        block: parent
        for event in cache.events
        if isinstance(event, BlocksCached)
        for block, parent in zip(event.blocks, event.parents, strict=True)
    }
    root, middle, leaf = first.block_ids
    assert told == {root: 0, middle: root, leaf: middle, second.block_ids[2]: middle}


def test_prompts_that_begin_alike_have_prefixes_that_do() -> None:
    cache = Cache()
    digests = [cache.manager.prefix_of(cache.request([*range(8), *rest])) for rest in ([], [9, 9], [9] * 4, [8] * 5)]
    assert [len(digest) for digest in digests] == [2, 2, 3, 3]
    assert digests[0] == digests[1] == digests[2][:2] == digests[3][:2] and digests[2] != digests[3]
    assert all(0 <= word < 2**32 for digest in digests for word in digest)
    plain = KVCacheManager(8, 4, prefix_cache=False, cache_key=b"", events=[])
    request = cache.request(list(range(8)))
    request.block_hashes = []
    plain.prepare(request)
    assert plain.prefix_of(request) == []


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
    joining = cache.manager.look_up(again)
    assert joining.num_computed == 8 and cache.manager.blocks_to_join(again, joining) == 3
    holder, _ = cache.admit([7])
    assert holder.block_ids[0] not in joining.blocks, "the free block goes before the cached ones"
    assert cache.manager.blocks_to_join(again, joining) > cache.manager.pool.num_available
    assert not cache.manager.join(again, joining, 9)
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
        assert not cache.manager.join(request, cache.manager.look_up(request), 10)
        cache.check()
        assert len(cache.events) == events
    assert cache.manager.join(request, cache.manager.look_up(request), 10)
    assert [type(event) for event in cache.events[events:]] == [BlocksShared, BlocksAllocated]
    cache.check(request)


def test_without_the_cache_nothing_is_found_or_kept() -> None:
    events: list[AnyEvent] = []
    manager = KVCacheManager(4, 4, prefix_cache=False, cache_key=b"", events=events)
    request = Request(1, list(range(8)), SamplingParams(), max_tokens=10)
    manager.prepare(request)
    assert manager.join(request, manager.look_up(request), 8)
    request.num_computed_tokens = 8
    assert request.num_computed_tokens < request.cache_edge
    manager.release(request)
    assert (manager.pool.num_free, manager.pool.num_cached) == (4, 0)


def test_copy_on_write_in_the_middle_of_a_block() -> None:
    """Two further answers behind a half-full block: each gets a copy to write to, the first one writes in place."""
    cache = Cache(num_blocks=16)
    manager = cache.manager
    parent, _ = cache.admit([1, 2, 3, 4, 5, 6])
    full, half = parent.block_ids
    children = [cache.branch(parent) for _ in range(2)]
    everyone = [parent, *children]
    assert manager.take_moves().copies == [(half, child.block_ids[1]) for child in children]
    assert manager.take_moves().copies == [], "each is handed out once"
    assert parent.block_ids == [full, half]
    assert len({r.block_ids[1] for r in everyone}) == 3 and {r.block_ids[0] for r in everyone} == {full}
    assert (manager.pool.ref_counts[full], manager.pool.ref_counts[half]) == (3, 1)
    cache.check(*everyone)
    copied = [event for event in cache.events if isinstance(event, BlockCopied)]
    assert [(event.request_id, event.source) for event in copied] == [(2, half), (3, half)]
    for number, request in enumerate(everyone):
        cache.decode(request, 10 + number)
    assert parent.block_ids == [full, half], "nobody else reads what it writes to"
    cache.check(*everyone)
    for child in children:
        manager.release(child)
    cache.check(parent)
    cache.decode(parent, 13)
    assert manager.pool.find([parent.block_hashes[1]]) == [half], "the full block is known by its own contents"


def test_a_branch_at_the_edge_of_a_block_copies_nothing() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2, 3, 4, 5])
    child = cache.branch(parent)
    assert cache.manager.take_moves().copies == []
    assert child.block_ids[0] == parent.block_ids[0] and child.block_ids[1] != parent.block_ids[1]
    cache.check(parent, child)


def test_a_branch_whose_parent_has_left_finds_what_the_cache_has() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2, 3, 4, 5, 6])
    child = cache.request([1, 2, 3, 4, 5, 6])
    child.parent = parent
    cache.manager.release(parent)
    parent.status = RequestStatus.FINISHED
    assert cache.manager.look_up(child).num_computed == 4


def test_a_copy_is_forgotten_with_the_request_it_was_for() -> None:
    cache = Cache()
    parent, _ = cache.admit([1, 2, 3])
    child = cache.branch(parent)
    cache.manager.release(child)
    assert cache.manager.take_moves().copies == []
    cache.check(parent)


# Host memory ----------------------------------------------------------------------------------------------------------


def test_out_to_the_host_and_back() -> None:
    cache = Cache(num_blocks=6, num_host_blocks=4)
    manager = cache.manager
    request, _ = cache.admit([1, 2, 3, 4, 5, 6])
    assert manager.reserve(request, 6) and len(request.block_ids) == 3
    blocks = request.block_ids[:2]
    assert manager.blocks_to_swap(request) == 2 and manager.swap_refusal(request) == ""
    assert manager.swap_out(request) == 2
    request.status = RequestStatus.SWAPPED
    assert request.block_ids == [0, 0] and request.num_computed_tokens == 6 and manager.pool.num_available == 6
    hosts = list(request.host_blocks)
    assert manager.take_moves().swap_out == list(zip(blocks, hosts, strict=True))
    cache.check(request)

    joining = manager.look_up(request)
    assert joining.num_computed == 6 and manager.blocks_to_join(request, joining, 9) == 3
    assert manager.join(request, joining, 9)
    assert len(request.block_ids) == 3 and 0 not in request.block_ids and request.num_computed_tokens == 6
    assert manager.host.num_free == 2, "what is only on its way back is not handed out yet"
    assert manager.take_moves().swap_in == list(zip(hosts, request.block_ids[:2], strict=True))
    assert manager.host.num_free == 4
    cache.check(request)


def test_shared_blocks_stay_on_the_device() -> None:
    cache = Cache(num_blocks=6, num_host_blocks=4)
    manager = cache.manager
    owner, _ = cache.admit([1, 2, 3, 4, 5])
    other, cached = cache.admit([1, 2, 3, 4, 9, 9])
    assert cached == 4 and manager.blocks_to_swap(other) == 1
    manager.swap_out(other)
    other.status = RequestStatus.SWAPPED
    assert other.block_ids == [owner.block_ids[0], 0]
    manager.release(owner)
    cache.check(other)
    manager.release(other)
    assert manager.host.num_used == 0
    cache.check()


@pytest.mark.parametrize("num_host_blocks, reason", [(0, "needs 2 host blocks and 0 are free"), (1, "1 are free")])
def test_a_host_pool_that_is_too_small_refuses(num_host_blocks: int, reason: str) -> None:
    cache = Cache(num_host_blocks=num_host_blocks)
    request, _ = cache.admit([1, 2, 3, 4, 5, 6])
    assert reason in cache.manager.swap_refusal(request)


def test_a_request_that_comes_back_and_leaves_in_the_same_step_moves_nothing() -> None:
    cache = Cache(num_host_blocks=4)
    manager = cache.manager
    request, _ = cache.admit([1, 2, 3, 4, 5, 6])
    manager.swap_out(request)
    request.status = RequestStatus.SWAPPED
    manager.take_moves()
    assert manager.join(request, manager.look_up(request), 7)
    request.status = RequestStatus.RUNNING
    assert "being copied" in manager.swap_refusal(request)
    manager.release(request)
    moves = manager.take_moves()
    assert moves.swap_in == [] and moves.swap_out == [] and manager.host.num_free == 4
    cache.check()


def family_of_which_the_first_comes_back(cache: Cache) -> tuple[Request, Request]:
    """A prompt of a full and a half block whose request is swapped in, and another answer that joins in that step."""
    manager = cache.manager
    parent, _ = cache.admit([1, 2, 3, 4, 5, 6])
    manager.swap_out(parent)
    parent.status = RequestStatus.SWAPPED
    manager.take_moves()
    # What the device still knew is gone, so that only the parent's own blocks are left to share.
    manager.release(cache.admit(list(range(50, 50 + 4 * manager.num_blocks)))[0])
    assert manager.join(parent, manager.look_up(parent), 7)
    parent.status = RequestStatus.RUNNING
    return parent, cache.branch(parent)


def test_a_copy_is_not_made_of_a_block_that_is_only_on_its_way_from_the_host() -> None:
    """Copies are done before blocks come in: the half-full block is computed again, the full one shared."""
    cache = Cache(num_blocks=6, num_host_blocks=4)
    parent, child = family_of_which_the_first_comes_back(cache)
    moves = cache.manager.take_moves()
    assert moves.copies == [] and len(moves.swap_in) == 2
    assert child.block_ids[0] == parent.block_ids[0] and child.num_computed_tokens >= 4
    cache.check(parent, child)


def test_a_block_that_comes_back_still_does_where_another_answer_waits_for_it() -> None:
    cache = Cache(num_blocks=6, num_host_blocks=4)
    parent, child = family_of_which_the_first_comes_back(cache)
    cache.manager.release(parent)
    parent.status = RequestStatus.PREEMPTED
    assert [block for _, block in cache.manager.take_moves().swap_in] == child.block_ids[:1]
    cache.check(child)

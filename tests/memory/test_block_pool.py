"""The pool against a model that is too simple to be wrong, and the order in which it gives blocks away."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.memory.block_pool import BlockPool, OutOfBlocksError


def take(pool: BlockPool, count: int) -> list[int]:
    return pool.take(count, [])


def test_every_block_is_handed_out_once_and_the_null_block_never() -> None:
    pool = BlockPool(5)
    blocks = take(pool, 5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    with pytest.raises(OutOfBlocksError, match="1 blocks were asked for and 0"):
        take(pool, 1)
    pool.check(Counter(blocks))


def test_a_take_that_cannot_be_met_changes_nothing() -> None:
    pool = BlockPool(3)
    held = take(pool, 1)
    with pytest.raises(OutOfBlocksError):
        take(pool, 3)
    assert pool.num_available == 2
    pool.check(Counter(held))


def test_unfindable_blocks_go_before_cached_ones_and_the_tail_of_a_sequence_before_its_head() -> None:
    pool = BlockPool(6)
    first, second = take(pool, 3), take(pool, 2)
    for block in (*first, *second):
        assert pool.register([block], [bytes([block])])[0] == [block]
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (1, 5)
    evicted: list[int] = []
    taken = pool.take(4, evicted)
    assert taken[1:] == evicted == first[::-1], "the free one first, then the older sequence from its tail"
    assert pool.find([bytes([first[0]])]) == [] and pool.find([bytes([second[0]])]) == [second[0]]


def test_a_touched_block_is_not_given_away() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 3)
    for block in blocks:
        pool.register([block], [bytes([block])])
    pool.release(blocks)
    pool.share([blocks[2]])  # the one that would go first
    assert blocks[2] not in take(pool, 2)
    with pytest.raises(OutOfBlocksError):
        take(pool, 1)


def test_equal_contents_are_known_once() -> None:
    pool = BlockPool(2)
    one, other = take(pool, 2)
    assert pool.register([one, other], [b"same", b"same"]) == ([one], [0])
    pool.release([other])
    assert pool.find([b"same", b"other", b"same"]) == [one] and pool.num_free == 1


def test_the_index_never_outgrows_the_pool() -> None:
    pool = BlockPool(64)
    for number in range(10_000):
        blocks = take(pool, 2)
        pool.register(blocks, [number.to_bytes(4, "little") + bytes([half]) for half in range(2)])
        pool.release(blocks)
    assert len(pool.registered_blocks()) <= 64


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_a_model(seed: int) -> None:
    """No block is both free and referenced, an evicted digest is a miss, counts are exact: 10^5 operations in all."""
    rng, pool = random.Random(seed), BlockPool(12)
    tables: list[list[int]] = []
    known: dict[bytes, int] = {}
    for operation in range(34_000):
        choice = rng.random()
        if choice < 0.4:
            count = rng.randint(1, 4)
            held = {block for table in tables for block in table}
            if count > 12 - len(held):
                with pytest.raises(OutOfBlocksError):
                    take(pool, count)
                continue
            evicted: list[int] = []
            blocks = pool.take(count, evicted)
            assert not held & set(blocks) and len(set(blocks)) == count
            gone = {digest for digest, block in known.items() if block in evicted}
            for digest in gone:
                del known[digest]
                assert pool.find([digest]) == []
            assert not set(blocks) & set(known.values()), "a findable block was handed out"
            tables.append(blocks)
        elif choice < 0.7 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif choice < 0.85 and tables:
            block, digest = rng.choice(rng.choice(tables)), rng.randbytes(1)
            if pool.digests[block] is None:
                assert pool.register([block], [digest])[0] == ([] if digest in known else [block])
                known.setdefault(digest, block)
        elif known:
            digest = rng.choice(list(known))
            assert pool.find([digest]) == [known[digest]]
            pool.share([known[digest]])
            tables.append([known[digest]])
        if operation % 50 == 0:
            pool.check(Counter(block for table in tables for block in table))
            assert sorted(known.values()) == pool.registered_blocks()


def test_check_sees_each_kind_of_damage() -> None:
    def damaged(harm: str) -> BlockPool:
        pool = BlockPool(4)
        blocks = take(pool, 2)
        pool.register([blocks[0]], [b"x"])
        pool.release([blocks[0]])
        if harm == "count":
            pool.ref_counts[blocks[1]] += 1
        elif harm == "twice free":
            pool._free.append(pool._free[0])
        elif harm == "free and held":
            pool._free.append(blocks[1])
        elif harm == "digest on a free block":
            pool.digests[pool._free[0]] = b"y"
        elif harm == "lost":
            pool._free.pop()
        return pool

    damaged("none").check({2: 1})
    for harm in ("count", "twice free", "free and held", "digest on a free block", "lost"):
        with pytest.raises(AssertionError):
            damaged(harm).check({2: 1})


def test_a_block_hangs_from_the_one_that_has_the_content_before_its_own() -> None:
    pool = BlockPool(6)
    blocks = take(pool, 4)
    assert pool.register(blocks[:2], [b"a", b"b"]) == (blocks[:2], [0, blocks[0]])
    twin, tail = blocks[2:]
    assert pool.register([twin, tail], [b"a", b"c"]) == ([tail], [blocks[0]])

    def parent(block: int) -> int:
        registered = pool.registered_blocks()
        return pool.parents_of(registered)[registered.index(block)]

    assert list(map(parent, (*blocks[:2], tail))) == [0, blocks[0], blocks[0]]
    pool.release(blocks[:2])
    for _ in range(2):  # the tail of what is cached goes first, then the beginning
        pool.release(take(pool, 4))
    assert pool.digests[blocks[0]] is None and parent(tail) == 0, "what came before is gone"
    again = take(pool, 1)
    assert pool.register(again, [b"x"]) == (again, [0])
    assert parent(tail) == 0, "the same place holds something else"
    assert pool.register(take(pool, 1), [b"d"], before=b"c")[1] == [tail]
    assert pool.register(take(pool, 1), [b"e"], before=b"gone")[1] == [0]

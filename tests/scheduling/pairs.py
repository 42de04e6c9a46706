"""Sets of cases over several dimensions: every pair of values, or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from engine.config import DISCIPLINES, PREEMPTIONS

Case = dict[str, Any]

ORDERS: dict[str, Case] = {
    "fcfs": {"order": "fcfs"},
    "priority": {"order": "priority"},
    "ageing": {"order": "priority", "ageing": 40.0},
    "fair": {"order": "fair", "user_weights": {"a": 3.0}},
}
"""Values of the dimension ``order``, with the options that each stands for."""

CORE_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "discipline": DISCIPLINES,
    "order": tuple(ORDERS),
    "preemption": PREEMPTIONS,
    "prefix_cache": (True, False),
    "speculative": ("off", "ngram", "draft:small"),
}
"""What an engine's scheduling is made of."""


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(sorted(case.items()), 2))


def products(dimensions: dict[str, tuple[Any, ...]], size: int) -> Iterator[Case]:
    """Every combination of values of every ``size`` of the dimensions."""
    for names in combinations(dimensions, size):
        for values in product(*(dimensions[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def covering(dimensions: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Cases in which every two values of different dimensions meet: greedily, each begins with a pair not yet met and
    takes for every other dimension the value that meets most."""
    todo = {pair for case in products(dimensions, 2) for pair in pairs_of(case)}
    cases = []
    while todo:
        case: Case = dict(min(todo, key=str))
        for name in sorted(dimensions, key=lambda name: -len(dimensions[name])):
            if name not in case:
                values = dimensions[name]
                case[name] = max(values, key=lambda value: len(pairs_of({**case, name: value}) & todo))
        todo -= pairs_of(case)
        cases.append({name: case[name] for name in dimensions})
    return cases


def name_of(case: Case) -> str:
    return " ".join(f"{value}" for value in case.values())


def with_order(case: Case) -> Case:
    """The case with its order's options in place of the order's name."""
    return {**case, **ORDERS[case["order"]]}

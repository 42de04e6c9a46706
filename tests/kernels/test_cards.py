"""The cards' figures and what a roofline makes of them."""

from __future__ import annotations

import pytest

from kernels.aot import TARGETS
from kernels.cards import CARDS, card_of, named_card


def test_every_target_has_a_card_with_its_source() -> None:
    assert {card.target for card in CARDS} == set(TARGETS)
    for card in CARDS:
        assert card.source and card_of(card.target).target == card.target
        assert {"fp16", "bf16", "fp32"} <= set(card.rates) and card.rates["fp16"] == card.rates["bf16"]
        assert ("fp8" in card.rates) == (card.target != "sm_80"), "fp8 begins with sm_89"
        assert card.rates["bf16"] > card.rates["fp32"]
        # A figure in the wrong unit is off by a thousand; these cards lie within a factor of ten of each other.
        assert 1e12 <= card.bandwidth < 1e13 and 1e14 < card.rates["bf16"] < 2e15
        assert card.memory is not None and 2e10 < card.memory < 2e11


def test_the_slower_of_moving_and_computing_decides() -> None:
    card = named_card("RTX 4090")
    assert card.roofline_s(1_008_000, 0, "bf16") == pytest.approx(1e-6)
    assert card.roofline_s(1_008_000, 165_200_000, "bf16") == pytest.approx(1e-6)
    assert card.roofline_s(1_008_000, 2 * 165_200_000, "fp16") == pytest.approx(2e-6)
    assert card.roofline_s(1_008_000, 165_200_000, "fp32") == pytest.approx(2e-6)
    assert card.roofline_s(1_008_000, 1, "int4") is None, "an unknown rate is not guessed"
    assert card.roofline_s(1_008_000, 0, "int4") == pytest.approx(1e-6), "and not needed where nothing is multiplied"


def test_another_card_can_be_named() -> None:
    assert named_card("h200 sxm") is named_card("H200SXM") is card_of("sm_90")
    card = named_card("L40S:sm_89:864:181")
    assert (card.name, card.target, card.bandwidth, card.rates) == (
        "L40S",
        "sm_89",
        864e9,
        {"fp16": 181e12, "bf16": 181e12},
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("RTX 40", "unknown card 'RTX 40'; known are A100 80GB SXM, RTX 4090, "),
        ("mine:sm_12:1:1", "unknown target 'sm_12'; known are sm_80, "),
        ("mine:sm_89:fast:1", "positive numbers"),
        ("mine:sm_89:0:1", "positive numbers"),
        ("mine:sm_89:1:inf", "positive numbers"),
        ("mine:sm_89:nan:1", "positive numbers"),
    ],
)
def test_a_card_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        named_card(text)

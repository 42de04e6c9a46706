"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stops import StopStrings


def run(stop: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    """The text certain after each piece, then what is left, and whether it stopped."""
    stops = StopStrings(stop)
    shown = []
    stopped = False
    for piece in pieces:
        text, stopped = stops.push(piece)
        shown.append(text)
    return [*shown, stops.flush()], stopped


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "stopped"),
    [
        (("bcd",), ["ab", "c", "de"], ["a", "", "", ""], True),
        (("bcd",), ["ab", "x"], ["a", "bx", ""], False),
        (("bcd",), ["ab"], ["a", "b"], False),
        (("bcd",), ["abcde", "more"], ["a", "", ""], True),
        ((), ["ab", "c"], ["ab", "c", ""], False),
        # Of two, the one that is complete first; of two at once, the longer.
        (("bcde", "c"), ["abcdef"], ["ab", ""], True),
        (("c", "bc"), ["abc"], ["a", ""], True),
        # A near miss that is itself a new beginning.
        (("aab",), ["a", "a", "a", "b", "x"], ["", "", "a", "", "", ""], True),
        (("abab",), ["ab", "ac"], ["", "abac", ""], False),
        # Nothing longer than a beginning is held back.
        (("\n\nUser:",), ["Hi.\n", "\nUse", "d"], ["Hi.", "", "\n\nUsed", ""], False),
        (("ß😀",), ["ß", "😀"], ["", "", ""], True),
        (("stop",), ["", "st", "", "op"], ["", "", "", "", ""], True),
    ],
)
def test_examples(stop: tuple[str, ...], pieces: list[str], shown: list[str], stopped: bool) -> None:
    assert run(stop, pieces) == (shown, stopped)


def test_after_a_stop_nothing_more_comes() -> None:
    stops = StopStrings(("x",))
    assert stops.push("ax") == ("a", True)
    assert stops.push("b") == ("", True)
    assert stops.flush() == ""


def expected(stop: tuple[str, ...], text: str) -> tuple[str, bool]:
    """By the definition: character by character until one is complete."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(max_examples=200)
@given(
    stop=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4).map(tuple),
    pieces=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=16),
)
def test_result_does_not_depend_on_the_pieces(stop: tuple[str, ...], pieces: list[str]) -> None:
    shown, stopped = run(stop, pieces)
    assert ("".join(shown), stopped) == expected(stop, "".join(pieces))


@settings(max_examples=100)
@given(
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
)
def test_only_a_possible_beginning_is_held_back(stop: tuple[str, ...], pieces: list[str]) -> None:
    stops = StopStrings(stop)
    shown = ""
    for number, piece in enumerate(pieces):
        text, stopped = stops.push(piece)
        shown += text
        if stopped:
            return
        whole = "".join(pieces[: number + 1])
        held = whole[len(shown) :]
        assert whole == shown + held
        longest = max((k for s in stop for k in range(len(s)) if whole.endswith(s[:k])), default=0)
        assert len(held) == longest

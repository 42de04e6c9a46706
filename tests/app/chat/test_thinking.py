"""Where a thought ends and the answer begins, however the text arrives."""

from __future__ import annotations

import pytest

from app.chat.thinking import split

CASES = {
    "none": ("Hello <b>you</b>", None, "Hello <b>you</b>", False),
    "whole": ("<think>\nso *it* is\n</think>\n\nHello", "so *it* is", "Hello", False),
    "spaces first": ("\n <think>a</think>b", "a", "b", False),
    "other word": ("<thinking>\na\n</thinking>\nb", "a", "b", False),
    "no end": ("<think>\nstill at it", "still at it", "", True),
    "end only": ("so it is\n\nand so\n</think>\n\nHello", "so it is\n\nand so", "Hello", False),
    "end only, behind a word": ("so it is.</think>\nHello", "so it is.", "Hello", False),
    "nothing thought": ("<think>\n\n</think>\n\nHello", None, "Hello", False),
    "about the tag": (
        "Write `</think>` or </think> in a line.",
        None,
        "Write `</think>` or </think> in a line.",
        False,
    ),
    "in a code block": ("```\n</think>\n```\nso", None, "```\n</think>\n```\nso", False),
    "behind a code block": ("```\n</think>\n```\nso\n</think>\nb", "```\n</think>\n```\nso", "b", False),
    "later": ("Use <think>x</think> like this", None, "Use <think>x</think> like this", False),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_are_told_from_answers(name):
    text, thought, answer, is_thinking = CASES[name]
    parts = split(text)
    assert (parts.thought, parts.answer, parts.is_thinking) == (thought, answer, is_thinking)


@pytest.mark.parametrize("name", CASES)
def test_half_a_tag_is_never_shown_while_text_arrives(name):
    text, thought, _, _ = CASES[name]
    for at in range(len(text) + 1):
        parts = split(text[:at], growing=True)
        if thought is not None and "<think" in text:
            assert "<" not in (parts.thought or "") + parts.answer
        if parts.thought is not None and thought is not None:
            assert thought.startswith(parts.thought.rstrip("\n"))

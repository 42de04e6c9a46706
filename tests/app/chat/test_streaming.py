"""A very long answer: what one update lays out stays bounded, and the end is what one rendering would have given."""

from __future__ import annotations

import pytest

from app.chat.answer_text import PANE_CHARACTERS, SLICE_CHARACTERS, UPDATE_LIMIT, AnswerText
from app.chat.answer_view import UPDATE_SECONDS, AnswerView, markdown_colors
from app.chat.blocks import DEAR_LIMIT
from app.chat.markdown import render
from tests.app.chat.long_answers import mixed


@pytest.mark.parametrize("kind", ["mixed", "one paragraph", "one code block"])
def test_20_000_tokens_lay_out_a_bounded_part_at_a_time(qtbot, theme, kind):
    pieces = {
        "mixed": lambda: mixed(20_000, seed=5),
        "one paragraph": lambda: ["word "] * 20_000,
        "one code block": lambda: ["```python\n"] + ["x = 1\n", "# note\n"] * 10_000,
    }[kind]()
    colors = markdown_colors(theme)
    widget = AnswerText(colors)
    qtbot.addWidget(widget)
    widget.resize(600, 400)
    widget.show()
    text = ""
    for at in range(0, len(pieces), 400):
        new = "".join(pieces[at : at + 400])
        text += new
        widget.set_text(text, growing=True)
        assert widget.laid_out_characters <= UPDATE_LIMIT + len(new)
    widget.set_text(text, growing=False)
    assert widget.html == render(text, colors)
    assert max(pane.document().characterCount() for pane in widget.panes) <= UPDATE_LIMIT
    if kind != "mixed":
        return
    once = AnswerText(colors)
    qtbot.addWidget(once)
    once.set_text(text, growing=False)
    assert [pane.toHtml() for pane in widget.panes] == [pane.toHtml() for pane in once.panes]


@pytest.mark.parametrize("kind", ["code block", "table"])
def test_a_finished_piece_of_a_long_block_is_not_laid_out_with_the_next(qtbot, theme, kind):
    opening, line = (
        ("```python\n", "x = 1  # note\n") if kind == "code block" else ("| a | b |\n|---|---|\n", "| 1 | x |\n")
    )
    widget = AnswerText(markdown_colors(theme))
    qtbot.addWidget(widget)
    text, laid_out = opening, []
    for _ in range(600):
        text += line
        widget.set_text(text, growing=True)
        laid_out.append(widget.laid_out_characters)
    assert PANE_CHARACTERS < max(laid_out) <= DEAR_LIMIT + 4 * len(line)


def test_a_growing_answer_is_drawn_at_most_twenty_times_a_second(workspace, bridge, qtbot, monkeypatch):
    workspace.send("hello")
    (view,) = [each for each in workspace.transcript.views if isinstance(each, AnswerView)]
    drawn = []
    original = view.text.set_text

    def count(text: str, *, growing: bool) -> None:
        drawn.append(text)
        original(text, growing=growing)

    monkeypatch.setattr(view.text, "set_text", count)
    for _ in range(200):
        bridge.say(1, "word ")
        qtbot.wait(1)
    assert 0 < len(drawn) <= 200 * 0.1 / UPDATE_SECONDS
    bridge.finish(1, "end")
    assert drawn[-1] == "word " * 200 + "end"


def test_a_burst_is_drawn_in_slices(workspace, bridge, theme, qtbot):
    """100,000 characters that come at once, as after a stall, and then again as history: never one long drawing."""
    workspace.send("hello")
    text = "".join(mixed(20_000, seed=6))
    final = render(text, markdown_colors(theme))
    bridge.say(1, text, tokens=20_000)
    bridge.finish(1)
    for _ in range(2):
        (view,) = [each for each in workspace.transcript.views if isinstance(each, AnswerView)]
        widest = [view.text.laid_out_characters]

        def is_whole(view=view, widest=widest) -> bool:
            widest.append(view.text.laid_out_characters)
            return view.text.html == final

        qtbot.waitUntil(is_whole, timeout=60_000)
        assert max(widest) <= UPDATE_LIMIT + SLICE_CHARACTERS < len(text) / 5
        workspace.open_conversation(workspace.current)


def test_an_answer_that_is_not_in_sight_costs_no_drawing(workspace, bridge, qtbot):
    workspace.send("hello")
    other = workspace.current
    workspace.new_conversation()
    for _ in range(50):
        bridge.say(1, "word ")
    qtbot.wait(2 * round(1000 * UPDATE_SECONDS))
    assert workspace.transcript.views == []
    workspace.open_conversation(other)
    assert other.open_answer.text == "word " * 50


def test_a_hidden_transcript_costs_no_drawing_and_catches_up(workspace, bridge, qtbot):
    workspace.send("hello")
    (view,) = [each for each in workspace.transcript.views if isinstance(each, AnswerView)]
    workspace.chat_panel.hide()
    for _ in range(50):
        bridge.say(1, "word ")
    qtbot.wait(2 * round(1000 * UPDATE_SECONDS))
    assert view.text.panes == []
    workspace.chat_panel.show()
    qtbot.waitUntil(lambda: view.text.plain_text().split() == ["word"] * 50)

"""Markdown to HTML: safe whatever the model writes, and the same however the text arrives."""

from __future__ import annotations

import re
from html import unescape

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from markdown_it import MarkdownIt
from PySide6.QtGui import QColor

from app.chat.blocks import BLOCK_LIMIT, BlockSplitter
from app.chat.highlight import CODE_COLORS, highlight
from app.chat.latex import use_block_rule
from app.chat.markdown import MarkdownStream, render
from app.chat.markup import MarkdownColors
from app.theme import DARK, LIGHT, READABLE_CONTRAST, contrast

COLORS = MarkdownColors(True, "#e6e8ec", "#9aa1ad", "#4da3ff", "#262a32", "#333842")

HOSTILE = [
    "![a cat](http://127.0.0.1:9/cat.png)",
    "![a file](file:///etc/passwd)",
    "![inline](data:image/png;base64,AAAA)",
    '<img src="http://127.0.0.1:9/x.png">',
    '<iframe src="http://127.0.0.1:9/"></iframe>',
    "<script>alert(1)</script>",
    '<a href="javascript:alert(1)">x</a>',
    "[click](javascript:alert(1))",
    "[click](JaVaScRiPt:alert(1))",
    "[click](java&#115;cript:alert(1))",
    "[open](file:///etc/passwd)",
    "[open](FILE:///etc/passwd)",
    "[data](data:text/html,<b>x</b>)",
    "[copy](copy:0.0)",
    "[relative](/etc/passwd)",
    "<file:///etc/passwd>",
    "<javascript:alert(1)>",
    '[t](http://ok.example/ "title <img src=file:///etc/passwd>")',
    '```"><img src=file:///etc/passwd>\ncode <b>bold</b>\n```',
    "&lt;img src=file:///etc/passwd&gt;",
    "| <img src=x> |\n|---|\n| <b>b</b> |",
    "[x]: file:///etc/passwd\n\n[x]",
]
ALLOWED_TAGS = {"p", "br", "strong", "em", "s", "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "span"}
ALLOWED_TAGS |= {"h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"}


def tags(html: str) -> list[tuple[str, str]]:
    return re.findall(r"<(\w+)([^>]*)>", html)


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_markup_becomes_text(source):
    html = render(source, COLORS)
    for name, attributes in tags(html):
        assert name in ALLOWED_TAGS
        assert "title=" not in attributes  # Qt would show it as a tool tip, and read that as markup
        assert "src" not in attributes and "background=" not in attributes and "url(" not in attributes
        for address in re.findall(r'href="([^"]*)"', attributes):
            assert re.match(r"(https?|mailto|copy):", unescape(address)), address
            assert not address.startswith("copy:") or source.startswith("```")


def test_what_is_not_shown_as_markup_is_still_readable():
    text = unescape(re.sub(r"<[^>]+>", "", render("\n\n".join(HOSTILE[:6]), COLORS)))
    for source in HOSTILE[:6]:
        assert source in text


def test_links_to_the_web_stay_links():
    html = render("[a](https://example.org/x?y=1&z=2) <http://example.org> [m](mailto:a@b.c)", COLORS)
    assert [a for name, a in tags(html) if name == "a"] == [
        ' href="https://example.org/x?y=1&amp;z=2"',
        ' href="http://example.org"',
        ' href="mailto:a@b.c"',
    ]


def test_a_link_defined_elsewhere_stays_text_and_nothing_vanishes():
    text = "[x]: http://example.org\n\nsee [x]"
    assert unescape(re.sub(r"<[^>]+>", "", render(text, COLORS))).split() == text.split()
    assert "<a" not in render(text, COLORS)


def shown(source: str) -> str:
    """The text of what is rendered, line breaks as such."""
    html = render(source, COLORS).replace("<br />", "\n")
    return unescape(re.sub(r"<[^>]+>", "", html)).replace("\u00a0", " ").strip("\n")


FORMULAS = [
    r"\(a_1 * b_1 * c_1\)",
    r"\[ \frac{a}{b} \\ *x* _y_ \]",
    r"$a_1 + b_1$ and $c_2 * d_2$ and $\alpha$",
    r"$$\sum_{i=1}^n i_1 * i_2 * i_3$$",
    "\\[\nx = [1] \\\\\n- y\n=\n# z * 1 * 2\n\\]",
    "$$\n\\begin{aligned}\na &= b \\\\\n  c &= d_1 * e_1 * f\n\\end{aligned}\n$$",
    "\\begin{align*}\na &= [b](c) \\\\\n* d\n\\end{align*}",
    r"an unclosed \( a_1 \] and \[",
]


@pytest.mark.parametrize("source", FORMULAS)
def test_formulas_are_shown_as_they_were_written(source):
    assert shown(source) == source
    assert not {"em", "strong", "ul", "ol", "h1", "a", "hr"} & {name for name, _ in tags(render(source, COLORS))}


def test_a_formula_may_follow_its_paragraph_and_sits_in_lists_and_tables():
    source = (
        "The sum is\n\\[\na_1 * b_1 * c\n\\]\nas said.\n\n- item\n  \\[ x_1 * y_1 * z \\]\n\n"
        "| a |\n|---|\n| \\(p_1 * q_1 * r\\) |"
    )
    text = shown(source)
    for formula in ("\\[\na_1 * b_1 * c\n\\]", r"\[ x_1 * y_1 * z \]", r"\(p_1 * q_1 * r\)"):
        assert formula in text
    assert "em" not in {name for name, _ in tags(render(source, COLORS))}


def test_prices_stay_prices():
    source = "It costs $5 and *not* $10, or $5-$10."
    assert shown(source) == source.replace("*", "")
    assert "monospace" not in render(source, COLORS)


def test_tasks_have_boxes_and_cells_their_side():
    html = render("- [x] done\n- [ ] open\n- [link](https://example.org)\n", COLORS)
    assert [attributes for name, attributes in tags(html) if name == "li"] == [
        ' class="checked"',
        ' class="unchecked"',
        "",
    ]
    assert "[x]" not in html
    html = render("| a | b | c |\n|:--|:-:|--:|\n| 1 | 2 | 3 |\n", COLORS)
    sides = [attributes for name, attributes in tags(html) if name == "td"]
    assert sides == [' align="left"', ' align="center"', ' align="right"']


def test_a_long_table_stays_a_table():
    rows = [f"| {n} | *row* {n} |" for n in range(400)]
    html = render("before\n\n| number | text |\n|---:|---|\n" + "\n".join(rows) + "\n\nafter\n", COLORS)
    names = [name for name, _ in tags(html)]
    assert names.count("table") > 3 and names.count("th") == 2 and names.count("tr") == 401
    assert names.count("em") == 400 and "|" not in html
    assert html.count("margin-bottom:8px") == 1  # the parts touch each other
    assert unescape(re.sub(r"<[^>]+>", "", html)).split()[-1] == "after"


def plain_blocks(text: str) -> str:
    """The same dialect, parsed as one document by the library alone: what the pieces must add up to."""
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    parser.disable(["reference", "html_block", "html_inline"])
    use_block_rule(parser)
    parser.add_render_rule("math_block", lambda _, tokens, idx, *rest: tokens[idx].content)
    return parser.render(text)


LINES = st.sampled_from(
    [
        "", "", "word", "some *text* and `code`", "# Title", "#", "#x", "- item", "- ", "-", "  more", "    four",
        "* * *", "***", "1. one", "2. two", "3)", "> quote", ">", "> - deep", "```", "```py", "~~~", "  ```", "===",
        "| a | b |", "|---|---|", "| 1 | 2 |", "[x]: http://a.b", "[x]", "**open", "\ttab", "+ plus", "<div>", "</div>",
        "\\", "  ", "$$", r"\[", r"\]", r"\[ x_1 \]", r"\begin{a}", r"\end{a}", "- [ ] task",
    ]
)  # fmt: skip
DOCUMENTS = st.lists(LINES, max_size=16).map("\n".join)


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_arriving_in_parts_gives_what_one_shot_gives(text, steps):
    stream = MarkdownStream(COLORS)
    at = number = 0
    while at < len(text):
        at += steps[number % len(steps)]
        number += 1
        stream.update(text[:at])
    stream.update(text)
    assert stream.html == render(text, COLORS)


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS)
def test_pieces_add_up_to_the_whole_document(text):
    splitter = BlockSplitter()
    pieces = [splitter.push(text[i : i + 1]) for i in range(len(text))]
    whole = [piece for part in pieces for piece in part] + [splitter.tail]
    assert "".join(piece.source for piece in whole) == text
    assert "".join(plain_blocks(piece.markdown) for piece in whole) == plain_blocks(text)


LONG = {
    "paragraph": "word " * 4000,
    "no spaces": "x" * 20_000,
    "code": "```python\n" + "value = call(1, 'a')  # note\n" * 300 + "```\n\nafter **all**",
    "list": "".join(f"{n}. item `{n}`\n" for n in range(1, 700)),
    "quote": "> quoted line\n" * 1500,
    "empty lines": "\n" * 9000 + "end",
    "table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 900,
    "brackets": "[" * 5000,
    "nested": ">" * 3000 + " deep\n" * 3,
}


@pytest.mark.parametrize("name", LONG)
def test_long_blocks_are_cut_where_their_text_alone_says(name):
    text = LONG[name]
    whole = MarkdownStream(COLORS)
    whole.update(text)
    for step in (250, 999):
        stream = MarkdownStream(COLORS)
        for at in range(0, len(text), step):
            stream.update(text[:at])
        stream.update(text)
        assert stream.html == whole.html
    assert max(len(piece.piece.source) for piece in whole.pieces) <= BLOCK_LIMIT
    assert "".join(piece.piece.source for piece in whole.pieces) == text


def test_finished_pieces_are_never_rendered_again():
    """Ordinary paragraphs, four characters at a time: an update renders the newest two paragraphs at most."""
    paragraph = "A sentence of some length that ends here. " * 5 + "\n\n"
    text = paragraph * 60
    stream = MarkdownStream(COLORS)
    updates = 0
    for at in range(0, len(text), 4):
        before = list(stream.finished)
        stream.update(text[:at])
        updates += 1
        assert all(old is new for old, new in zip(before, stream.finished, strict=False))
    assert len(stream.finished) == 58 or len(stream.finished) == 59
    assert stream.rendered_characters <= updates * 2 * len(paragraph) + len(text)


def test_a_cut_code_block_is_copied_whole_and_only_that():
    code = "".join(f"line_{n} = {n}\n" for n in range(800))
    text = f"before\n\n```python\n{code}```\n\nbetween\n\n```\nother\n```\n"
    stream = MarkdownStream(COLORS)
    stream.update(text)
    addresses = [tuple(map(int, a.split("."))) for a in re.findall(r'href="copy:([\d.]+)"', stream.html)]
    assert [stream.code(*address) for address in addresses] == [code, "other\n"]


def test_an_unfinished_code_block_can_be_copied_as_far_as_it_is():
    stream = MarkdownStream(COLORS)
    stream.update("```python\nx = 1\ny =")
    assert stream.code(0, 0) == "x = 1\ny ="


def test_windows_line_ends_split_between_arrivals():
    text = "one\r\ntwo\r\n\r\n```\r\ncode\r\n```\r\n"
    stream = MarkdownStream(COLORS)
    for at in range(len(text) + 1):
        stream.update(text[:at])
    assert stream.html == render(text.replace("\r\n", "\n"), COLORS)


@pytest.mark.parametrize(
    "language", ["python", "c++", "html", "json", "bash", "no-such-language", "", "x" * 500, "../etc"]
)
def test_highlighting_changes_no_character(language):
    code = '  <b>\n\tdef f(x): return \'a\' & "b"  # ü\n\n{"k": 1}\n\n'
    html = highlight(code, language, dark=True)
    assert unescape(re.sub(r"</?span[^>]*>", "", html)) == code


def test_python_is_coloured_and_unknown_languages_are_not():
    assert CODE_COLORS["Keyword"][0] in highlight("def f(): pass", "Python", dark=True)
    assert CODE_COLORS["Keyword"][1] in highlight("def f(): pass", "python", dark=False)
    assert "<span" not in highlight("def f(): pass", "klingon", dark=True)


def test_code_colours_are_readable_on_their_surface():
    for dark, light in CODE_COLORS.values():
        assert contrast(QColor(dark), QColor(DARK.raised)) >= READABLE_CONTRAST
        assert contrast(QColor(light), QColor(LIGHT.raised)) >= READABLE_CONTRAST

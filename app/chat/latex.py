r"""LaTeX in Markdown, left as it was written: formulas are neither set nor read as Markdown.

Known are ``\( … \)``, ``\[ … \]``, ``$ … $`` and ``$$ … $$`` inside a line, and blocks that begin with a line of
``\[``, ``$$`` or ``\begin{…}``. A block ends with its closing mark, or at an empty line, which display formulas cannot
hold: so where it ends depends on its own lines alone, and a text that grows never changes what is above.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline

BLOCK = "math_block"
INLINE = "math_inline"

_OPENING = re.compile(r"\\\[|\$\$(?!\$)|\\begin\{([A-Za-z]+\*?)\}")
_DOLLARS = re.compile(r"\$\$[^$]+\$\$|\$(?![\s$])(?:[^$\n\\]|\\.)*?(?<![\s\\])\$(?!\d)")
"""The second as Pandoc has it: no space inside the marks, no digit behind, so that prices stay prices."""
_CLOSING = {"(": r"\)", "[": r"\]"}


def use_block_rule(parser: MarkdownIt) -> None:
    # Formulas often follow their paragraph without an empty line.
    parser.block.ruler.before("fence", BLOCK, _block, {"alt": ["paragraph", "blockquote", "list"]})


def use_inline_rule(parser: MarkdownIt) -> None:
    parser.inline.ruler.before("escape", INLINE, _inline)


def _block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    if state.is_code_block(start_line):
        return False
    first = _line(state, start_line)
    opening = _OPENING.match(first)
    if opening is None:
        return False
    closing = _closing_of(opening)
    at = first.find(closing, opening.end())
    if at >= 0 and first[at + len(closing) :].strip(" .,;:"):
        return False  # a formula in a sentence
    if silent:
        return True
    line = start_line + 1
    while at < 0 and line < end_line and not state.isEmpty(line) and state.sCount[line] >= state.blkIndent:
        at = _line(state, line).find(closing)
        line += 1
    state.line = line
    token = state.push(BLOCK, "pre", 0)
    token.content = state.getLines(start_line, line, state.sCount[start_line], True)
    token.map = [start_line, line]
    return True


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _closing_of(opening: re.Match[str]) -> str:
    if opening[1]:
        return f"\\end{{{opening[1]}}}"
    return r"\]" if opening[0] == r"\[" else "$$"


def _inline(state: StateInline, silent: bool) -> bool:
    source, begin = state.src[: state.posMax], state.pos
    if source[begin] == "$":
        found = _DOLLARS.match(source, begin)
        end = found.end() if found else -1
    elif source[begin] == "\\" and source[begin + 1 : begin + 2] in ("(", ")", "[", "]"):
        closing = _CLOSING.get(source[begin + 1])
        end = source.find(closing, begin + 2) + 2 if closing else -1
        if end < 2:  # one mark without the other keeps its backslash
            if not silent:
                state.append_pending(source[begin : begin + 2])
            state.pos = begin + 2
            return True
    else:
        return False
    if end < 0:
        return False
    if not silent:
        token = state.push(INLINE, "span", 0)
        token.content = source[begin:end]
    state.pos = end
    return True

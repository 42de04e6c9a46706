"""Every text of the window can be translated: no literal reaches a widget as it is, and none is seen on the screen."""

from __future__ import annotations

import ast
import gettext
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import translation
from app.translation import ntr, tr

APP = Path(__file__).parents[2] / "app"
SHOWN_BY = {
    *("label", "button", "LineButton", "Card", "Gauge", "QLabel", "QPushButton", "QCheckBox", "QRadioButton"),
    *("setText", "setToolTip", "setAccessibleName", "setAccessibleDescription", "setPlaceholderText", "setWindowTitle"),
    *("setTitle", "setInformativeText", "addAction", "addMenu", "addTab", "addRow", "setPrefix", "setSuffix"),
    *("say", "setLabelText", "setHeaderLabels", "setHorizontalHeaderLabels", "setStatusTip", "setWhatsThis"),
}
ROLES = {"muted", "title", "heading", "error", "flat", "primary", "danger", "number"}
"""Second arguments of ``label`` and ``button``: how a text looks."""
UNITS = re.compile(r"(Batchscope|k?[KMG]?i?B|ms|s|tok/s|tokens?|×|%|px|CPU|GPU|KV|PNG|SVG|JSON|CSV|HTML|[A-Z0-9]{2,5})")


def _literals(node: ast.expr) -> Iterator[str]:
    """Texts that an argument writes out itself, in any of its alternatives."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
    elif isinstance(node, ast.IfExp):
        yield from _literals(node.body)
        yield from _literals(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _literals(value)
    elif isinstance(node, ast.BinOp):
        yield from _literals(node.left)
        yield from _literals(node.right)
    elif isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from _literals(element)


def _is_words(text: str) -> bool:
    words = re.findall(r"[A-Za-z/%]{2,}", UNITS.sub(" ", text))
    return bool(words) and text not in ROLES


def test_no_text_reaches_a_widget_untranslated() -> None:
    found = []
    for path in sorted(APP.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in SHOWN_BY:
                continue
            for argument in node.args:
                found += [f"{path.relative_to(APP)}:{node.lineno}: {t!r}" for t in _literals(argument) if _is_words(t)]
    assert found == []


def test_texts_are_written_out_where_they_are_translated() -> None:
    """A text that is put together before the call is in no catalogue."""
    wrong = []
    for path in sorted(APP.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("tr", "ntr"):
                texts = node.args[: 1 if node.func.id == "tr" else 2]
                wrong += [f"{path.relative_to(APP)}:{node.lineno}" for t in texts if isinstance(t, ast.JoinedStr)]
    assert wrong == []


class Bracketed(gettext.NullTranslations):
    def gettext(self, message: str) -> str:
        return f"⟦{message}⟧"

    def ngettext(self, singular: str, plural: str, n: int) -> str:
        return f"⟦{singular if n == 1 else plural}⟧"


@pytest.fixture
def bracketed() -> Iterator[None]:
    translation.use_catalogue(Bracketed())
    yield
    translation.use_catalogue(gettext.NullTranslations())


def test_names_are_filled_in_after_the_translation(bracketed: None) -> None:
    assert tr("Deleted “{title}”.", title="{a}") == "⟦Deleted “{a}”.⟧"
    assert ntr("{count:,} message", "{count:,} messages", 1204) == "⟦1,204 messages⟧"
    assert tr("braces {stay} without values") == "⟦braces {stay} without values⟧"


def test_a_catalogue_is_found_by_its_language_and_english_stands_in_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    _write_catalogue(folder / "batchscope.mo", {"": "Content-Type: text/plain; charset=UTF-8\n", "Pause": "Anhalten"})
    try:
        translation.use_language("de_AT", folder=tmp_path)
        assert tr("Pause") == "Anhalten"
        assert tr("Run on") == "Run on"
        translation.use_language("fr", folder=tmp_path)
        assert tr("Pause") == "Pause"
    finally:
        translation.use_catalogue(gettext.NullTranslations())


def _write_catalogue(path: Path, texts: dict[str, str]) -> None:
    """A ``.mo`` file: header, two tables of (length, offset), the strings; sorted by the original."""
    pairs = [(key.encode(), value.encode()) for key, value in sorted(texts.items())]
    data, tables = b"", ([], [])
    begin = 28 + 16 * len(pairs)
    for index in (0, 1):
        for pair in pairs:
            tables[index].extend((len(pair[index]), begin + len(data)))
            data += pair[index] + b"\0"
    numbers = [0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, begin, *tables[0], *tables[1]]
    path.write_bytes(b"".join(number.to_bytes(4, "little") for number in numbers) + data)


def test_nothing_on_the_screen_is_untranslated(tmp_path: Path) -> None:
    """The window in a language in which every translation stands in brackets; in a process of its own, since texts of
    tables are translated where they are imported."""
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.app.untranslated", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=APP.parent,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == []

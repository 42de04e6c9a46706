"""Texts in the user's language: every sentence that the window shows goes through :func:`tr` or :func:`ntr`.

The catalogues are gettext's: ``assets/translations/LANGUAGE/LC_MESSAGES/batchscope.mo``; a text that a catalogue lacks,
and a language that has none, is English. Names in braces are filled in after the translation, which may move them::

    tr("Deleted “{title}”.", title=conversation.title)
    ntr("{count:,} message", "{count:,} messages", 3)

``pybabel extract -k tr -k mark -k ntr:1,2 -o batchscope.pot app`` collects them, so a text is always
written out in its call.
"""

from __future__ import annotations

import gettext
from pathlib import Path
from typing import Any

CATALOGUES = Path(__file__).parent.parent / "assets" / "translations"

_catalogue: gettext.NullTranslations = gettext.NullTranslations()


def use_language(*languages: str, folder: Path = CATALOGUES) -> None:
    """Translate into the first of ``languages`` (``de``, ``pt_BR``) that has a catalogue in ``folder``, from now on."""
    use_catalogue(gettext.translation("batchscope", folder, languages, fallback=True))


def use_catalogue(catalogue: gettext.NullTranslations) -> None:
    global _catalogue
    _catalogue = catalogue


def tr(text: str, /, **values: Any) -> str:
    """``text`` in the user's language, with its names in braces filled in."""
    translated = _catalogue.gettext(text) if text else ""
    return translated.format(**values) if values else translated


def ntr(singular: str, plural: str, count: int, /, **values: Any) -> str:
    """The form for ``count`` things, ``{count}`` and the other names in braces filled in."""
    return _catalogue.ngettext(singular, plural, count).format(count=count, **values)


def mark(text: str, /) -> str:
    """A text that is written down before the language is known; whoever shows it calls :func:`tr`."""
    return text

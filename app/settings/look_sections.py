"""How the window looks and behaves, and what it keeps of runs."""

from __future__ import annotations

from pathlib import Path

from app.lab.fields import whole
from app.settings.preferences import LARGEST_FONT_PX, MOST_MB, SMALLEST_FONT_PX
from app.settings.rows import Fields, Row, Section
from app.translation import CATALOGUES, tr
from engine.recording import MIN_LIMIT_BYTES


class LookSection(Section):
    def __init__(self, fields: Fields, catalogues: Path = CATALOGUES) -> None:
        super().__init__(tr("Look"))
        schemes = [(tr("Follow the system"), "system"), (tr("Light"), "light"), (tr("Dark"), "dark")]
        self.scheme = self.add(fields.choice(tr("Theme"), "theme", schemes))
        box = whole(tr("Font size"), SMALLEST_FONT_PX, LARGEST_FONT_PX, SMALLEST_FONT_PX, suffix=" px")
        self.font_size = self.add(Row(tr("Font size"), box, tr("Of ordinary text; all other text is in proportion.")))
        box.valueChanged.connect(lambda pixels: fields.set(self.font_size, font_px=pixels))
        fields.follow(lambda: box.setValue(fields.store.values.font_px))
        languages = languages_in(catalogues)
        if languages:
            entries = [(tr("As the system"), ""), ("English", "en"), *((name, name) for name in languages)]
            hint = tr("Holds from the next start on.")
            self.language = self.add(fields.choice(tr("Language"), "language", entries, hint))


def languages_in(catalogues: Path) -> list[str]:
    """Those that there is a catalogue for."""
    return sorted(path.parent.parent.name for path in catalogues.glob("*/LC_MESSAGES/batchscope.mo"))


class ChatSection(Section):
    def __init__(self, fields: Fields) -> None:
        super().__init__(tr("Chat"))
        keys = [
            (tr("Enter; Shift+Enter breaks the line"), True),
            (tr("Ctrl+Enter; Enter breaks the line"), False),
        ]
        self.enter_sends = self.add(fields.choice(tr("Send a message with"), "enter_sends", keys))


class RunsSection(Section):
    def __init__(self, fields: Fields) -> None:
        super().__init__(
            tr("Runs"),
            about=tr("Each run of an engine is kept in a file while the window is open, so that one can look back."),
        )
        least = max(1, MIN_LIMIT_BYTES >> 20)
        box = whole(tr("Keep at most"), least, MOST_MB, least, suffix=" MiB")
        box.setSingleStep(64)
        hint = tr("Beyond that the oldest steps go. Holds from the engine's next start on.")
        self.limit = self.add(Row(tr("Keep at most"), box, hint))
        box.valueChanged.connect(lambda size: fields.set(self.limit, runs_limit_mb=size))
        fields.follow(lambda: box.setValue(fields.store.values.runs_limit_mb))
        self.texts = self.add(
            fields.check(
                tr("Texts"),
                "record_texts",
                tr("Keep prompts and answers, too"),
                tr("Whoever gets a recording can then read them. Holds from the engine's next start on."),
            )
        )

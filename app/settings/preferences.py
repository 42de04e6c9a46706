"""What the user has set, in one small file: frozen values, and a store that writes every change at once.

The file is JSON in the user's configuration folder. It is replaced whole, so a kill leaves the state before or after a
change; a value that makes no sense costs itself alone, a file that cannot be read is set aside, and both are said.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import platformdirs
from PySide6.QtCore import QObject, Signal

from app.theme import Scheme
from app.translation import tr
from engine.config import STARTER_MODEL, ConfigError, EngineConfig
from engine.output_files import OutputFailure, write_target
from engine.recording import DEFAULT_LIMIT_BYTES, MIN_LIMIT_BYTES

SMALLEST_FONT_PX, DEFAULT_FONT_PX, LARGEST_FONT_PX = 10, 13, 22
SMALLEST_MEMORY_MB = 64
"""Less holds no model at all."""
MOST_MB = 2**31 - 1

Start = Literal["last", "starter", "nothing"]


class Preferences(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, with what holds where nothing was set. An impossible value raises :class:`ConfigError`."""

    device: str = "auto"
    threads: int | None = None
    """CPU threads of the engine; None: as many as there are physical cores."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    """Longest context in tokens; None: what the model was made for."""
    memory_limit_mb: int | None = None
    """Most MiB that weights and KV blocks may take; None: what is free, less a margin."""
    model_folders: tuple[str, ...] = ()
    """Where models are looked for, besides the Hugging Face cache."""
    offline: bool = False
    """Whether nothing is ever fetched."""
    theme: Scheme = "system"
    font_px: int = DEFAULT_FONT_PX
    """Size of ordinary text in logical pixels; everything else is in proportion."""
    language: str = ""
    """A catalogue's name, ``de`` or ``pt_BR``; empty: the system's language where there is a catalogue for it."""
    enter_sends: bool = True
    """Whether Enter sends a message and Shift+Enter breaks the line; else Ctrl+Enter sends."""
    shortcuts: dict[str, str] = {}
    """Keys of those commands that have others than they ship with: a command's name -> keys as
    ``QKeySequence.PortableText`` writes them, empty for none."""
    last_model: str = ""
    start_with: Start = "last"
    runs_limit_mb: int = DEFAULT_LIMIT_BYTES >> 20
    """Most MiB of the file that a run is kept in for looking back."""
    record_texts: bool = False
    """Whether prompts and answers are kept with a run."""

    def __post_init__(self) -> None:
        self.engine_config(STARTER_MODEL)
        _within("font_px", self.font_px, SMALLEST_FONT_PX, LARGEST_FONT_PX)
        _within("runs_limit_mb", self.runs_limit_mb, max(1, MIN_LIMIT_BYTES >> 20), MOST_MB)
        if self.memory_limit_mb is not None:
            _within("memory_limit_mb", self.memory_limit_mb, SMALLEST_MEMORY_MB, MOST_MB)

    def engine_config(self, model: str) -> EngineConfig:
        """What an engine is started with that shall run ``model`` (see :attr:`EngineConfig.model`)."""
        return EngineConfig(
            model=model,
            device=self.device,
            threads=self.threads,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_model_len=self.max_model_len,
            memory_limit=None if self.memory_limit_mb is None else self.memory_limit_mb << 20,
        )


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value:,}; it must be {least:,} to {most:,}")


def default_preferences_path() -> Path:
    return Path(platformdirs.user_config_dir("batchscope", appauthor=False)) / "preferences.json"


class PreferenceStore(QObject):
    """The preferences in force, and their file."""

    changed = Signal()
    """``values`` are others."""
    save_problem = Signal(str)
    """A sentence: a change holds in this window, but could not be written down."""

    def __init__(self, path: Path | None = None, parent: QObject | None = None) -> None:
        """path: None keeps nothing."""
        super().__init__(parent)
        self.path = path
        self.notice = ""
        """A sentence where the file, or part of it, could not be read; else empty."""
        self._kept: dict[str, Any] = {}
        """What the file holds. Fields that this version does not know stay in it."""
        self._unsaved: dict[str, Any] = {}
        self.values, self.notice = self._read()

    def change(self, **fields: Any) -> None:
        """Other values for some fields, in force at once and written down at once.

        Raises :class:`ConfigError` for an impossible value; nothing has changed then.
        """
        plain = msgspec.to_builtins(fields)
        _parse(plain)
        before = self.values
        self._unsaved |= plain
        self._save()
        self.values, _ = _valid(self._kept)
        if self.values != before:
            self.changed.emit()

    def put(self, values: Preferences) -> None:
        """All fields at once."""
        self.change(**{name: getattr(values, name) for name in values.__struct_fields__})

    def _read(self) -> tuple[Preferences, str]:
        """What the file says, and what there is to say about the file."""
        if self.path is None:
            return Preferences(), ""
        try:
            self._kept = self._load()
        except OSError as error:
            return Preferences(), tr(
                "The preferences in {path} cannot be read ({reason}): those that ship are in force.",
                path=self.path,
                reason=error.strerror or error,
            )
        except ValueError:
            aside = _set_aside(self.path)
            return Preferences(), tr(
                "The preferences could not be read: those that ship are in force. The file is kept as {path}.",
                path=aside,
            )
        values, bad = _valid(self._kept)
        notice = tr("Preferences that make no sense are as they ship: {names}.", names=", ".join(bad)) if bad else ""
        return values, notice

    def _load(self) -> dict[str, Any]:
        """Raises OSError, and ValueError where the file holds something else."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from None

    def _save(self) -> None:
        """Writes what has changed into what the file holds now: another window may have changed other fields."""
        before, self._kept = self._kept, {**self._kept, **self._unsaved}
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                before = self._load()
            except ValueError:
                _set_aside(self.path)
            self._kept = {**before, **self._unsaved}
            text = msgspec.json.format(msgspec.json.encode(self._kept), indent=2).decode()
            write_target(tr("The preferences in"), self.path, text + "\n")
            self._unsaved = {}
        except (OutputFailure, OSError) as error:
            self.save_problem.emit(tr("This holds until the window closes: {reason}.", reason=str(error).rstrip(".")))


def _parse(plain: dict[str, Any]) -> Preferences:
    unknown = plain.keys() - set(Preferences.__struct_fields__)
    if unknown:
        raise ConfigError(f"there is no preference {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(plain, Preferences)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def _valid(kept: dict[str, Any]) -> tuple[Preferences, list[str]]:
    """What of a file makes sense, and the names of the fields that do not."""
    good: dict[str, Any] = {}
    bad: list[str] = []
    for name in Preferences.__struct_fields__:
        if name in kept:
            try:
                _parse({name: kept[name]})
            except ConfigError:
                bad.append(name)
            else:
                good[name] = kept[name]
    return _parse(good), bad


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    with contextlib.suppress(OSError):
        path.rename(aside)
    return aside

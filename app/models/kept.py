"""Two small lists about models that outlive the window: which were used last, and which were fetched by it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from engine.output_files import OutputFailure, write_target

RECENT = 6


class _Kept(msgspec.Struct):
    recent: list[str] = []
    fetched: list[str] = []


class KeptModels:
    """A convenience: where it cannot be read it begins empty, where it cannot be written it holds until the end."""

    def __init__(self, path: Path | None) -> None:
        """path: None keeps nothing."""
        self._path = path
        self._kept = _Kept()
        if path is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
                self._kept = msgspec.json.decode(path.read_bytes(), type=_Kept)

    @property
    def recent(self) -> list[str]:
        """What loads the models that were used last (:attr:`EngineConfig.model`), the newest first."""
        return list(self._kept.recent)

    def used(self, model: str) -> None:
        others = [each for each in self._kept.recent if each != model]
        self._change(recent=[model, *others][:RECENT])

    def forget(self, model: str) -> None:
        if model in self._kept.recent:
            self._change(recent=[each for each in self._kept.recent if each != model])

    def was_fetched(self, repository: str, commit: str) -> bool:
        """Whether it was this program that brought the revision to the disk."""
        return f"{repository}@{commit}" in self._kept.fetched

    def fetched(self, repository: str, commit: str) -> None:
        if not self.was_fetched(repository, commit):
            self._change(fetched=[*self._kept.fetched, f"{repository}@{commit}"])

    def _change(self, **fields: list[str]) -> None:
        for name, value in fields.items():
            setattr(self._kept, name, value)
        if self._path is not None:
            with contextlib.suppress(OSError, OutputFailure):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_target("", self._path, msgspec.json.encode(self._kept).decode())

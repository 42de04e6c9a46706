"""Why a model could not be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LoadErrorKind = Literal["offline", "memory", "unsupported", "damaged", "other"]


class ModelLoadError(Exception):
    """A model that cannot be loaded: the message is a sentence for the user, with the number and the way out.

    ``kind``: ``offline`` (not here, and no way to fetch it), ``memory`` (it does not fit), ``unsupported`` (sound, but
    not for this program), ``damaged`` (files missing, cut short or contradicting each other) or ``other``.
    """

    def __init__(self, message: str, kind: LoadErrorKind) -> None:
        super().__init__(message)
        self.message = message
        self.kind: LoadErrorKind = kind


class NotFiniteError(ModelLoadError):
    """A model whose first step gives infinity or NaN."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

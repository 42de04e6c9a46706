"""What :mod:`engine.fetch` tells whoever started it: one JSON object a line. Light: the window reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import msgspec


class HubFile(msgspec.Struct, frozen=True):
    name: str
    size: int


class FetchPlan(msgspec.Struct, frozen=True, tag_field="event", tag="plan"):
    """What is to be fetched, told before the first of it comes."""

    repository: str
    revision: str
    commit: str
    total_bytes: int
    here_bytes: int
    """Of those, what is on the disk already."""
    free_bytes: int
    """On the disk that it comes to."""
    files: list[HubFile]
    licence: str = ""


class FetchProgress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    file: str
    done_bytes: int
    """Of all files together."""
    total_bytes: int


class FetchDone(msgspec.Struct, frozen=True, tag_field="event", tag="done"):
    repository: str
    revision: str
    commit: str
    path: str


class FetchFailed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    kind: str
    """``gated``, ``not-found``, ``token``, ``offline``, ``disk``, ``unsupported``, ``damaged``, ``choose``, ``hub`` or
    ``other``."""
    message: str
    """A sentence with the way out."""
    choices: list[HubFile] = []
    """``choose``: the files of which one is to be named."""


FetchEvent = FetchPlan | FetchProgress | FetchDone | FetchFailed
fetch_events: msgspec.json.Decoder[FetchEvent] = msgspec.json.Decoder(FetchEvent)


def tell_on(stream: BinaryIO) -> Callable[[FetchEvent], None]:
    def tell(event: FetchEvent) -> None:
        stream.write(msgspec.json.encode(event) + b"\n")
        stream.flush()

    return tell

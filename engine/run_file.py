"""What a run file is made of: its frames, how they are laid out, found again and checked, and what is in them. Light.

::

    file    | magic 8 | version 4 | frame | frame | frame | …
    frame   | mark 4 | kind 1 | 0 ×3 | length 4 | payload crc 4 | step 8 | time 8 | head crc 4 | payload |

Little-endian. The head has a checksum of its own, so a file is gone through from head to head without a look at the
payloads, and the mark lets a reader find the next frame behind bytes that are no frame. ``time`` is the engine's clock
at the end of the step ``step``.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.environment import version as program_version
from engine.events import Keyframe
from engine.messages import ModelInfo

MAGIC = b"BATSCOPE"
FORMAT_VERSION = 1
PREFIX = struct.Struct("<8sI")
MARK = b"\xf5BSF"
_BODY = struct.Struct("<4sB3xIIqd")
_CRC = struct.Struct("<I")
HEAD_BYTES = _BODY.size + _CRC.size
MAX_PAYLOAD_BYTES = 1 << 30
_WINDOW_BYTES = 1 << 20
_COPY_BYTES = 1 << 20
_T = TypeVar("_T")


class FrameKind(enum.IntEnum):
    HEADER = 1
    """Once, first: what was run."""
    KEYFRAME = 2
    """The whole state after a step; a segment begins."""
    RECORD = 3
    """One step."""
    TEXT = 4
    """A prompt, or a piece of an answer."""
    END = 5
    """Once, last: the recording was ended, not torn off."""


class Head(NamedTuple):
    kind: int
    length: int
    crc: int
    step: int
    time: float


def pack_frame(kind: FrameKind, step: int, time: float, payload: bytes) -> bytes:
    body = _BODY.pack(MARK, kind, len(payload), zlib.crc32(payload), step, time)
    return b"".join((body, _CRC.pack(zlib.crc32(body)), payload))


def read_head(data: bytes, offset: int = 0) -> Head | None:
    """The head of the frame that begins at ``offset``; None where none does, or not all of it is there."""
    end = offset + _BODY.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[offset:end]):
        return None
    mark, kind, length, crc, step, time = _BODY.unpack_from(data, offset)
    return Head(kind, length, crc, step, time) if mark == MARK and length <= MAX_PAYLOAD_BYTES else None


def payload_of(data: bytes, offset: int = 0) -> bytes | None:
    """The payload of the frame at ``offset``; None where its bytes are not those that were written."""
    head = read_head(data, offset)
    if head is None:
        return None
    begin = offset + HEAD_BYTES
    payload = data[begin : begin + head.length]
    return payload if len(payload) == head.length and zlib.crc32(payload) == head.crc else None


class FrameScan:
    """Goes through a file from head to head; the file may grow behind it."""

    def __init__(self, file: BinaryIO, position: int) -> None:
        self._file = file
        self.position = position
        """Where the next frame begins."""
        self.torn = False
        """Whether something that is no whole frame lies at :attr:`position`."""
        self.jumped = False
        """Whether bytes that are no frames were passed over before the last frame."""
        self._window = b""
        self._window_at = 0

    def next(self, size: int) -> tuple[int, Head] | None:
        """(offset, head) of the next frame that lies wholly in the first ``size`` bytes; None where there is none."""
        self.jumped = False
        at = self.position
        head = self._head_at(at, size)
        if head is None and size - at >= HEAD_BYTES:
            found = self._search(at + 1, size)
            if found is not None:
                at, head = found
                self.jumped = True
        if head is None or at + HEAD_BYTES + head.length > size:
            self.torn = size > self.position
            self._window = b""
            return None
        self.torn = False
        self.position = at + HEAD_BYTES + head.length
        return at, head

    def _head_at(self, at: int, size: int) -> Head | None:
        if at + HEAD_BYTES > size:
            return None
        if not self._window_at <= at <= self._window_at + len(self._window) - HEAD_BYTES:
            self._read_window(at)
        return read_head(self._window, at - self._window_at)

    def _read_window(self, at: int) -> None:
        self._file.seek(at)
        self._window, self._window_at = self._file.read(_WINDOW_BYTES), at

    def _search(self, at: int, size: int) -> tuple[int, Head] | None:
        """The next head from ``at`` on that is whole."""
        while at + HEAD_BYTES <= size:
            self._read_window(at)
            place = self._window.find(MARK)
            while place >= 0:
                head = self._head_at(at + place, size)
                if head is not None:
                    return at + place, head
                if self._window_at != at:  # the head's rest lay beyond the window
                    self._read_window(at)
                place = self._window.find(MARK, place + 1)
            at += max(len(self._window) - len(MARK) + 1, 1)
        return None


# Payloads -------------------------------------------------------------------------------------------------------------


class RecordingError(ValueError):
    """A run file that cannot be read or written; the message says which and why."""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a run file says of itself."""

    version: int = FORMAT_VERSION
    """Of the format."""
    created: str = msgspec.field(default_factory=_now)
    """ISO 8601, UTC."""
    program: str = msgspec.field(default_factory=program_version)
    """Batchscope's version."""
    config: EngineConfig | None = None
    """None: not known, or with knobs that this program does not know."""
    info: ModelInfo | None = None
    workload: str = ""
    """Name of the workload; empty where there was none."""
    texts: bool = False
    """Whether prompts and answers are kept."""


class Text(msgspec.Struct, frozen=True, array_like=True):
    """A prompt, or a piece of an answer, as it came after a step."""

    request_id: int
    role: str
    """``system``, ``user`` or ``assistant``; ``prompt`` where there was no conversation."""
    text: str


class Owners(msgspec.Struct, array_like=True):
    """Blocks, and of each the request that took it last."""

    blocks: bytes
    """int32, little-endian."""
    requests: bytes
    """int64, little-endian; as many."""


class SegmentStart(msgspec.Struct, array_like=True):
    """Payload of a keyframe's frame."""

    keyframe: Keyframe
    owners: Owners
    """Of the blocks whose taker the tables of the keyframe do not tell."""


class _Header(msgspec.Struct):
    """A :class:`RunHeader` whose configuration and model may hold what this program does not know."""

    created: str
    program: str
    config: msgspec.Raw
    info: msgspec.Raw
    workload: str
    texts: bool


def read_header(file: BinaryIO) -> tuple[RunHeader, int]:
    """The header, and where it ends. Raises :class:`RecordingError` with the end of a sentence about the file."""
    beginning = file.read(PREFIX.size)
    if not beginning:
        raise RecordingError("is empty; a run file has at least a header")
    if len(beginning) < PREFIX.size or not beginning.startswith(MAGIC):
        raise RecordingError("is no run file of Batchscope")
    _, version = PREFIX.unpack(beginning)
    if version > FORMAT_VERSION:
        raise RecordingError(
            f"was written by a newer Batchscope, in version {version} of the format; this program reads version "
            f"{FORMAT_VERSION}. Update Batchscope to open it."
        )
    if version < 1:
        raise RecordingError(f"names version {version} of the format, which there never was")
    scan = FrameScan(file, PREFIX.size)
    found = scan.next(os.fstat(file.fileno()).st_size)
    if found is None or found[1].kind != FrameKind.HEADER or scan.jumped:
        raise RecordingError("breaks off in its header, or has a damaged one: nothing can be read of it")
    offset, _ = found
    file.seek(offset)
    payload = payload_of(file.read(scan.position - offset))
    if payload is None:
        raise RecordingError("has a damaged header: nothing can be read of it")
    try:
        raw = msgspec.msgpack.decode(payload, type=_Header)
    except msgspec.DecodeError as error:
        raise RecordingError(f"has a header that cannot be understood: {error}") from error
    header = RunHeader(
        version=version,
        created=raw.created,
        program=raw.program,
        config=_known(raw.config, EngineConfig),
        info=_known(raw.info, ModelInfo),
        workload=raw.workload,
        texts=raw.texts,
    )
    return header, scan.position


def _known(raw: msgspec.Raw, kind: type[_T]) -> _T | None:
    try:
        return msgspec.msgpack.decode(raw, type=kind | None)
    except msgspec.DecodeError:
        return None


# Files ----------------------------------------------------------------------------------------------------------------


def temporary_beside(path: Path) -> BinaryIO:
    """A file in the same folder, which can take the other's place in one step."""
    return path.with_name(f".{path.name}.{os.getpid()}.part").open("w+b", buffering=0)


def discard(temporary: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        temporary.close()
    with contextlib.suppress(OSError):
        Path(temporary.name).unlink()


def write_all(file: BinaryIO, data: bytes | bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += file.write(view[done:])


def copy_range(source: BinaryIO, target: BinaryIO, begin: int, end: int) -> None:
    source.seek(begin)
    while begin < end:
        data = source.read(min(end - begin, _COPY_BYTES))
        if not data:
            raise OSError(None, "it became shorter while it was copied")
        write_all(target, data)
        begin += len(data)

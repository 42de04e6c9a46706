"""The wire between the window and the engine: whole messages over a pipe, each behind its length.

::

    ┌──────────────────────┬─────────────────────────────────┐
    │ 4 bytes, little end  │ that many bytes of MessagePack  │   one message of engine/messages.py
    └──────────────────────┴─────────────────────────────────┘

Both ends use plain file descriptors: a buffered Python file would hold its lock while it blocks, and could not be
closed from another thread.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.messages import MAX_MESSAGE_BYTES, AnyCommand, AnyReply

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)


class BadRequest(msgspec.Struct, frozen=True):
    """A request whose command could be recognised, but not read; ``message`` says what is wrong with it."""

    request_id: int
    message: str


class BadConfig(msgspec.Struct, frozen=True):
    """A ``LoadModel`` or a ``Reconfigure`` with an impossible knob."""

    message: str


class BadPlan(msgspec.Struct, frozen=True):
    """A ``Compare`` that cannot be read."""

    message: str


Incoming = AnyCommand | BadRequest | BadConfig | BadPlan


class WireError(ValueError):
    """A message that cannot go over the wire, or bytes from it that are none."""


def encode(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire. Raises :class:`WireError` where it is too large or cannot be said."""
    try:
        payload = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} takes {len(payload):,} bytes; a message may have {MAX_MESSAGE_BYTES:,} at most"
        )
    return _LENGTH.pack(len(payload)) + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything; blocks while the pipe is full, raises OSError where nobody reads it any more."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_payloads(descriptor: int) -> Iterator[bytes]:
    """The payloads that arrive at ``descriptor``, until the other end closes; half a message at the end is dropped.

    Raises :class:`WireError` on an impossible length: the bytes are then no message stream, and nothing after them is.
    """
    buffer = bytearray()
    while True:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            return
        if not data:
            return
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {length:,} bytes is announced; {MAX_MESSAGE_BYTES:,} is the most")
            end = _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[_LENGTH.size : end])
            del buffer[:end]


def read_command(payload: bytes) -> Incoming | None:
    """Decode one command. One bad request must not cost its neighbours the engine, so only that request is refused."""
    try:
        return _command_decoder.decode(payload)
    except msgspec.DecodeError as error:
        # The knob's own sentence where there is one: msgspec adds the path inside the message.
        reason = str(error.__cause__ or error)
    match _as_mapping(payload):
        case {"command": "AddRequest", "request_id": int(request_id)}:
            return BadRequest(request_id, reason)
        case {"command": "LoadModel" | "Reconfigure"}:
            return BadConfig(reason)
        case {"command": "Compare"}:
            return BadPlan(reason)
    print(f"a command cannot be read and is ignored: {reason}", file=sys.stderr, flush=True)
    return None


def _as_mapping(payload: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return None

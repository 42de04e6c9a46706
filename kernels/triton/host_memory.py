"""Host memory that a GPU reads and writes by itself: for what it gives, and for the KV blocks of swapped requests.

::

    host block    0 … 255     256 … 511     512 … 767        pieces, each [planes, blocks of a piece, elements]
                  allocated   not yet       allocated        with the first of its blocks that moves

Locking pages takes about a second for a few GiB and takes them from everybody else; most runs never swap, and those
that do seldom need all of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.triton.block_copy import move_blocks, word_type

PIECE_BYTES = 128 * 2**20
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Piece:
    memory: torch.Tensor
    """[planes, blocks, elements]"""
    is_locked: bool
    """Whether kernels reach it."""


@dataclass(slots=True)
class _Part:
    piece: _Piece
    places: list[tuple[int, int]] = field(default_factory=list)
    """(block of the device, block of the piece)"""


class HostBlocks:
    """Room for so many host blocks. ``planes`` [planes, blocks, elements] are always the same blocks on the device."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pieces: dict[int, _Piece] = {}

    def parts(self, planes: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> list[_Part]:
        """``pairs`` (block, host block) by the pieces that they are in, which are there then."""
        block_bytes = planes.shape[0] * planes.shape[2] * planes.itemsize
        size = max(1, min(self.num_blocks, PIECE_BYTES // block_bytes))
        parts: dict[int, _Part] = {}
        for block, host_block in pairs:
            number, place = divmod(host_block, size)
            if number not in self._pieces:
                self._pieces[number] = _piece(planes, min(size, self.num_blocks - number * size))
            parts.setdefault(number, _Part(self._pieces[number])).places.append((block, place))
        return list(parts.values())


def to_host(parts: Sequence[_Part], planes: torch.Tensor) -> None:
    """Copy the parts' blocks of ``planes`` to the host."""
    for part in parts:
        _move(planes, part.piece.memory, part.places, planes.device, by_kernel=part.piece.is_locked)


def to_device(parts: Sequence[_Part], planes: torch.Tensor) -> None:
    """Copy the parts' blocks of the host to ``planes``."""
    for part in parts:
        pairs = [(place, block) for block, place in part.places]
        _move(part.piece.memory, planes, pairs, planes.device, by_kernel=part.piece.is_locked)


def _piece(planes: torch.Tensor, num_blocks: int) -> _Piece:
    size = planes.shape[0] * num_blocks * planes.shape[2] * planes.itemsize
    # Not torch.empty(pin_memory=True), which rounds up to a power of two and never gives the memory back. Whole pages
    # of its own, as a page cannot be locked twice.
    room = np.zeros(size + 2 * PAGE_BYTES, np.uint8)
    memory = room[-room.ctypes.data % PAGE_BYTES :][:size]
    is_locked = lock(memory, planes.device)
    shape = (planes.shape[0], num_blocks, planes.shape[2])
    return _Piece(torch.from_numpy(memory).view(planes.dtype).view(shape), is_locked)


def arrival(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy ``tensor`` to the host behind what is on the stream; the result waits for the copy alone."""
    on_host = tensor.to("cpu", non_blocking=True, copy=True)  # page-locked where a GPU fills it
    if tensor.device.type == "cpu":
        return lambda: on_host
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return on_host

    return wait


def lock(memory: np.ndarray, device: torch.device) -> bool:
    """Let kernels on ``device`` reach ``memory``, page-locked and mapped where that is a GPU, until the last array or
    tensor on it is gone. False where the system does not let so much be locked (Linux under Windows lets little)."""
    if device.type == "cpu":
        return True
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0) != runtime.cudaError.success:
        # The runtime keeps the error for whoever asks next, which is torch behind its next launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return True


def _move(
    source: torch.Tensor,
    destination: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    by_kernel: bool,
) -> None:
    if by_kernel:
        move_blocks(source, destination, pairs, device)
        return
    # Waits for the device.
    word = word_type(source.shape[2] * source.itemsize)
    table = torch.tensor(pairs, dtype=torch.int64)
    moved = source.view(word).index_select(1, table[:, 0].to(source.device))
    destination.view(word).index_copy_(1, table[:, 1].to(destination.device), moved.to(destination.device))

"""Weights from their files into the backend that computes with them, counted on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from engine.execution.device import DeviceChoice, make_backend
from engine.models.checkpoint import Checkpoint, Progress
from engine.models.transformers_spec import ModelSpec, TransformersSpec
from kernels.backend import Backend


def load_backend(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    choice: DeviceChoice,
    stage: str,
    progress: Progress,
    *,
    cuda_graphs: bool = True,
) -> Backend:
    """The checkpoint's weights in the backend that computes ``spec``; ``stage`` is what is said meanwhile.
    ``cuda_graphs``: as :attr:`engine.config.EngineConfig.cuda_graphs`. Raises :class:`ModelLoadError`, and whatever a
    device raises."""
    weights = _Counted(checkpoint.tensors(spec), stage, progress)
    if isinstance(spec, TransformersSpec):
        # Only where it is needed: the library takes seconds to import.
        from engine.execution.transformers_backend import TransformersBackend

        borrowed = TransformersBackend(choice.device)
        borrowed.load(spec, weights)
        return borrowed
    backend = make_backend(choice, cuda_graphs=cuda_graphs)
    backend.load(spec, weights)
    return backend


class _Counted(Mapping[str, torch.Tensor]):
    """Reports each tensor that is taken out."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stage: str, progress: Progress) -> None:
        self._tensors = tensors
        self._stage = stage
        self._progress = progress
        self._done = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        self._done += 1
        self._progress(self._stage, self._done, len(self._tensors))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

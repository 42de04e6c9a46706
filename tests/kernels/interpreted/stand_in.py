"""Recorded steps without a GPU: what was recorded is called again, over the same inputs into the same output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.sampling import SamplingBatch
from kernels.spec import HostStep, StepBatch
from kernels.triton.backend import TritonBackend
from kernels.triton.graphs import Recording


@dataclass
class KeptStep:
    run: Callable[[], torch.Tensor]
    output: torch.Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.fill_(float("nan"))
        self.output.copy_(self.run())


@dataclass
class KeptSteps:
    """A :class:`kernels.triton.graphs.Capture`."""

    recordings: list[KeptStep] = field(default_factory=list)
    """In the order in which they were made."""
    fail_at: int | None = None
    """Size of the step whose recording fails."""

    def record(self, run: Callable[[], torch.Tensor], beside: Recording | None) -> KeptStep:
        assert (beside is None) == (not self.recordings), "all recordings share the memory of the first"
        output = run().clone()
        if output.shape[0] == self.fail_at:
            raise torch.OutOfMemoryError("out of memory\nand where")
        self.recordings.append(KeptStep(run, output))
        return self.recordings[-1]

    def sizes(self) -> list[int]:
        return [recording.output.shape[0] for recording in self.recordings]

    def replays(self) -> dict[int, int]:
        """By size, where there were any."""
        return {recording.output.shape[0]: recording.replays for recording in self.recordings if recording.replays}


class PoisonedBackend(TritonBackend):
    """Between two steps all that no step may rely on is overwritten: with bytes of ones, which are NaN and -1, where
    inputs were, and with NaN in the null block."""

    @torch.inference_mode()
    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        self._inputs.memory.fill_(0xFF)
        if self._kv is not None:
            self._kv[:, :, 0] = float("nan")
        return super().upload(step, sampling, previous)

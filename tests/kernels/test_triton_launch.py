"""What a launch makes Triton compile, seen without a GPU: the arguments that would be passed, and Triton's own reading
of them. Steps of any shape must share one compiled kernel, and it must be the one that the ``kernels`` command checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from kernels import aot  # noqa: E402
from kernels.sampling import SamplingBatch, SamplingRow  # noqa: E402
from kernels.spec import StepBatch  # noqa: E402
from kernels.triton import (  # noqa: E402
    activation,
    attention_tiles,
    block_copy,
    embedding,
    int8_matmul,
    kv_write,
    matrix,
    norms,
    paged_attention,
    sampling,
    truncation,
)
from kernels.triton.configurations import Configuration, shipped_configurations  # noqa: E402
from kernels.triton.verification.base import make_batch  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(paged_attention.paged_attention_kernel, JITFunction), reason="this process interprets kernels"
)

Specialisation = list[tuple[str, Any]]
"""Of each parameter its type and what else it is compiled for; then the compiler's options."""


class _Launches:
    """Stands in for a kernel and keeps what Triton would specialise each launch on."""

    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.params = kernel.params
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.seen: list[Specialisation] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(size, int) and size > 0 for size in grid)

        def launch(*arguments: Any, **keywords: Any) -> None:
            _, specialisation, options = self._bind(*arguments, **keywords)
            found = [(kind, extra or None) for kind, extra in specialisation]
            self.seen.append([*found, ("options", options)])

        return launch

    def the_one(self, count: int) -> Specialisation:
        """What all of ``count`` launches were specialised on."""
        assert len(self.seen) == count and all(seen == self.seen[0] for seen in self.seen)
        return self.seen[0]


def _launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> _Launches:
    launches = _Launches(getattr(module, name))
    monkeypatch.setattr(module, name, launches)
    return launches


def _is_shipped(seen: Specialisation, kernel: str, config: str) -> bool:
    """Whether ``kernels`` compiles exactly this, types, alignments, constants and options, under such a name."""
    found = [c for c in shipped_configurations() if c.kernel == kernel and f"{c.config} ".startswith(f"{config} ")]
    assert found, config
    return [_described(c) for c in found].count(seen) == 1


def _described(configuration: Configuration) -> Specialisation:
    signature, attributes = aot.signature_of(configuration)
    entries: Specialisation = []
    for position, (name, kind) in enumerate(signature.items()):
        if kind == "constexpr":
            entries.append((kind, configuration.constants[name] or None))
        else:
            entries.append((kind, "D" if (position,) in attributes else None))
    return [*entries, ("options", aot.options_of(configuration))]


def _step(query_lens: list[int], seq_lens: list[int]) -> StepBatch:
    batch, _ = make_batch(query_lens, seq_lens, 16, torch.Generator().manual_seed(0))
    return batch


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that 16 does not divide."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def _attend(batch: StepBatch, window: int | None = None, num_kv_heads: int = 2) -> None:
    """Attention over three query heads a group of 64 dimensions, bfloat16."""
    q = torch.zeros(batch.num_tokens, 3 * num_kv_heads, 64, dtype=torch.bfloat16)
    cache = torch.zeros(1, num_kv_heads, 16, 64, dtype=torch.bfloat16)
    paged_attention.paged_attention(q, cache, cache, batch, scale=0.125, window=window)


def _attention_launches(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, name: str = "paged_attention_kernel"
) -> _Launches:
    processor = attention_tiles.Processor("sm_80", multiprocessors)
    monkeypatch.setattr(paged_attention, "processor", lambda device: processor)
    return _launches(monkeypatch, paged_attention, name)


DECODES = ([1], [1]), ([1] * 16, [16] * 16), ([1] * 5, [300, 2, 3, 4, 5])


def test_prompts_of_any_shape_share_an_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _attention_launches(monkeypatch, 1)
    for query_lens, seq_lens in ([16], [16]), ([2, 5], [240, 5]), ([17, 3, 2], [17, 3000, 9]), ([3] * 16, [3] * 16):
        batch = _step(query_lens, seq_lens)
        for window in (None, 1, 4096):
            _attend(batch, window)
    assert _is_shipped(launches.the_one(12), "paged_attention", "bf16 prefill d64 g3")


@pytest.mark.parametrize("multiprocessors", [0, 200], ids=["whole", "split"])
def test_decodes_of_any_number_share_an_attention_kernel(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    launches = _attention_launches(monkeypatch, multiprocessors)
    combining = _launches(monkeypatch, paged_attention, "combine_splits_kernel")
    for query_lens, seq_lens in DECODES:
        batch = _step(query_lens, seq_lens)
        _attend(batch)
        _attend(batch, 16)
    # As a step's inputs lie when they arrive in one copy, at addresses that 16 does not divide as well.
    odd = replace(
        batch,
        query_start=_shifted(batch.query_start),
        seq_lens=_shifted(batch.seq_lens),
        block_tables=_shifted(batch.block_tables),
        table_stride=_shifted(torch.ones(1, dtype=torch.int32)),
    )
    assert odd.seq_lens.data_ptr() % 16 != 0
    _attend(odd)
    assert _is_shipped(launches.the_one(7), "paged_attention", "bf16 decode d64 g3")
    assert len(combining.seen) == (0 if multiprocessors == 0 else 7)


def test_splits_of_any_number_are_combined_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _attention_launches(monkeypatch, 200)
    launches = _launches(monkeypatch, paged_attention, "combine_splits_kernel")
    for query_lens, seq_lens in DECODES:
        batch = _step(query_lens, seq_lens)
        shifted = {name: _shifted(getattr(batch, name)) for name in ("query_start", "seq_lens")}
        for window in (None, 16):
            _attend(replace(batch, **shifted), window, num_kv_heads=1)
    assert _is_shipped(launches.the_one(6), "combine_splits", "bf16 d64 3 heads")


@pytest.mark.parametrize(
    ("temperature", "top_p", "kind"), [(0.0, 1.0, "greedy"), (0.7, 1.0, "drawn"), (0.7, 0.9, "truncated")]
)
def test_samples_of_any_number_share_their_kernels(
    monkeypatch: pytest.MonkeyPatch, temperature: float, top_p: float, kind: str
) -> None:
    dtype, name, vocab = (torch.float16, "fp16", 49152) if kind == "truncated" else (torch.bfloat16, "bf16", 128256)
    samples = _launches(monkeypatch, sampling, "sample_kernel")
    reduces = _launches(monkeypatch, sampling, "sample_reduce_kernel")
    edges = _launches(monkeypatch, truncation, "truncation_kernel")
    for rows in (1, 16, 17):
        batch = SamplingBatch([SamplingRow(temperature=temperature, top_p=top_p)] * rows)
        tensors = {key: _shifted(torch.from_numpy(value)) for key, value in sampling.host_columns(batch).items()}
        sampling.sample_on_device(torch.zeros(rows, vocab, dtype=dtype), batch, tensors)
    assert _is_shipped(samples.the_one(3), "sample", f"{name} {vocab} tokens {kind}")
    reduced = reduces.the_one(3)
    if kind == "drawn":
        assert _is_shipped(reduced, "sample_reduce", f"{vocab} tokens drawn")
    if kind == "truncated":
        assert _is_shipped(edges.the_one(3), "truncation", f"{name} {vocab} tokens")
    else:
        assert not edges.seen


def test_int8_products_of_as_many_rows_as_a_tile_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _launches(monkeypatch, int8_matmul, "int8_matmul_kernel")
    sums = _launches(monkeypatch, int8_matmul, "sum_cuts_kernel")
    for rows, outputs in ((1, 4096), (16, 70), (7, 16)):
        x, q = torch.zeros(rows, 14336, dtype=torch.bfloat16), torch.zeros(outputs, 14336, dtype=torch.int8)
        int8_matmul.int8_matmul(x, q, torch.zeros(outputs))
    assert _is_shipped(products.the_one(3), "int8_matmul", "bf16 16 rows 14336 deep")
    assert _is_shipped(sums.the_one(3), "sum_cuts", "bf16")


@pytest.mark.parametrize("sampled", [True, False])
def test_embeddings_of_any_number_share_a_kernel(monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    launches = _launches(monkeypatch, embedding, "embedding_kernel")
    table = matrix.Matrix(torch.zeros(9, 4096, dtype=torch.bfloat16))
    for tokens, before in ((1, 1), (16, 3), (33, 16)):
        ids, source = _shifted(torch.zeros(tokens).long()), _shifted(torch.zeros(tokens, dtype=torch.int32))
        previous = _shifted(torch.zeros(before).long()) if sampled else None
        embedding.embedding(ids, table, torch.bfloat16, token_source=source, previous=previous)
    assert _is_shipped(launches.the_one(3), "embedding", f"bf16 4096 wide{'' if sampled else ', ids known'}")


@pytest.mark.parametrize(
    ("kv_dtype", "name"), [(torch.bfloat16, ""), (torch.float8_e4m3fn, " e4m3fn cache")], ids=["bf16", "fp8"]
)
def test_steps_of_any_shape_share_the_kv_write(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype, name: str
) -> None:
    launches = _launches(monkeypatch, kv_write, "kv_write_kernel")
    cache = torch.zeros(1, 3, 16, 64, dtype=kv_dtype)
    for tokens, max_position in ((1, 1), (2, 2), (16, 4096), (33, 131_072)):
        qkv = torch.zeros(tokens, 15 * 64, dtype=torch.bfloat16)
        row = _shifted(torch.zeros(tokens).long())
        kv_write.kv_write(qkv, cache, cache, row, row, torch.zeros(1, 64).expand(max_position, 64), num_heads=9)
    assert _is_shipped(launches.the_one(4), "kv_write", f"bf16 9/3 heads d64 rotary 64{name}")


def test_steps_of_any_shape_share_the_row_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = _launches(monkeypatch, norms, "rms_norm_kernel")
    activated = _launches(monkeypatch, activation, "silu_mul_kernel")
    weight = torch.zeros(577, dtype=torch.bfloat16)
    for rows in (1, 16, 33):
        x = torch.zeros(rows, 577, dtype=torch.bfloat16)
        norms.rms_norm(x, x, weight, 1e-5)
        activation.silu_mul(torch.zeros(rows, 2 * 1537, dtype=torch.bfloat16))
    for launches, kernel, config in (
        (norm, "rms_norm", "bf16 577 wide + residual"),
        (activated, "silu_mul", "bf16 1537 wide"),
    ):
        assert _is_shipped(launches.the_one(3), kernel, config)


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float32, 1536), (torch.float8_e4m3fn, 6144)])
def test_copies_of_any_number_and_type_share_a_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, elements: int
) -> None:
    launches = _launches(monkeypatch, block_copy, "copy_blocks_kernel")
    for count in (1, 16, 17):
        kv = torch.zeros(2, 40, elements, dtype=dtype)
        block_copy.copy_blocks(kv, [(1, 2 + i) for i in range(count)])
    assert _is_shipped(launches.the_one(3), "copy_blocks", "768 words of 64 bits")

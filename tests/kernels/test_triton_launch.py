"""What a launch makes Triton compile, seen without a GPU: the arguments that would be passed, and Triton's own reading
of them. Steps of any shape must share one compiled kernel, and it must be the one that the ``kernels`` command checks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from kernels import aot  # noqa: E402
from kernels.spec import StepBatch  # noqa: E402
from kernels.triton import activation, block_copy, kv_write, norms, paged_attention  # noqa: E402
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
    """Whether ``kernels`` compiles exactly this: types, alignments, constants, options."""
    found = [c for c in shipped_configurations() if (c.kernel, c.config) == (kernel, config)]
    assert len(found) == 1, config
    return _described(found[0]) == seen


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


def test_steps_of_any_shape_share_the_two_attention_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _launches(monkeypatch, paged_attention, "paged_attention_kernel")
    cache = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)

    def launch(batch: StepBatch, window: int | None) -> None:
        q = torch.zeros(batch.num_tokens, 6, 64, dtype=torch.bfloat16)
        paged_attention.paged_attention(q, cache, cache, batch, scale=0.125, window=window)

    mixed = [_step([16], [16]), _step([1, 5], [240, 5]), _step([17, 1, 2], [17, 3000, 9]), _step([3] * 16, [3] * 16)]
    decodes = [_step([1], [1]), _step([1] * 16, [16] * 16), _step([1] * 5, [300, 2, 3, 4, 5])]
    for batch in mixed:
        launch(batch, None)
        launch(batch, 1)
        launch(batch, 4096)
    assert len(launches.seen) == 12 and all(seen == launches.seen[0] for seen in launches.seen)
    assert _is_shipped(launches.seen[0], "paged_attention", "bf16 mixed d64 g3 64x32")

    launches.seen.clear()
    for batch in decodes:
        launch(batch, None)
        launch(batch, 16)
    odd = StepBatch(
        **{name: getattr(batch, name) for name in ("token_ids", "positions", "slot_mapping", "logits_rows")},
        query_start=_shifted(batch.query_start),
        seq_lens=_shifted(batch.seq_lens),
        block_tables=_shifted(batch.block_tables),
    )
    assert odd.seq_lens.data_ptr() % 16 != 0
    launch(odd, None)
    assert len(launches.seen) == 7 and all(seen == launches.seen[0] for seen in launches.seen)
    assert _is_shipped(launches.seen[0], "paged_attention", "bf16 decode d64 g3 16x32")


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

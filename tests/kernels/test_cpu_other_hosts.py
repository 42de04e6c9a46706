"""Kernels for CPUs that are not this one: with vectors of 16 numbers, and without any of the instructions looked for.

LLVM splits vectors that are longer than this CPU's, so that they run everywhere; instructions only some CPUs have are
compiled and looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent.relative_to(ROOT)
X86 = "x86_64" in binding.get_default_triple()

pytestmark = pytest.mark.skipif(not X86, reason="the features are those of x86")


def features_here() -> str:
    return binding.get_host_cpu_features().flatten()


def in_process(arguments: list[str], features: str, environment: dict[str, str]) -> str:
    """Output of a Python that makes kernels for these features."""
    environment = os.environ | environment | {"KERNELS_CPU_FEATURES": features, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lanes", "features", "compiled_for"),
    [
        (16, "avx512f avx512bw fma", {}),
        # SSE2, which every x86 CPU of 64 bits has: no fused multiply and add, no instruction that rounds down.
        (8, "", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    ],
)
def test_results_are_those_of_the_plain_decoder(
    lanes: int, features: str, compiled_for: dict[str, str], pytestconfig: pytest.Config
) -> None:
    """What is compiled is kept from run to run, apart from what this CPU's own features make."""
    if lanes == 16 and not binding.get_host_cpu_features().get("fma"):
        pytest.skip("a fused multiply and add, which this CPU lacks, would be made of calls")
    cache = pytestconfig.cache.mkdir(f"kernels-{lanes}-lanes")
    environment = {"NUMBA_CACHE_DIR": str(cache), "NUMBA_CPU_FEATURES": features_here()} | compiled_for
    tests = [f"{HERE}/{name}.py" for name in ("test_cpu_elementwise", "test_cpu_bitwise", "test_cpu_backend")]
    chosen = "elementwise or batch_and_the_threads or zeros or (every_feature and (windows or qk))"
    options = ["-p", "tests.kernels.other_host", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=590"]
    output = in_process(["-m", "pytest", *options, "-k", chosen, *tests], features, environment)
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 50 and "skipped" not in output, output[-2000:]


LOOK = """
import tests.kernels.other_host
import numba
from numba import types
from kernels.cpu.vectors import LANES, int8_instruction, panel_tile

def product(rows, a, b, count, out, row_scales, scales):
    panel_tile(rows, a, 0, b, 0, 32, 128, count, out, 0, 64, row_scales, 0, scales, 0)

rows, columns, out = (kind[::1] for kind in (types.int16, types.int8, types.float32))
kernel = numba.njit(types.void(types.intp, rows, columns, types.intp, out, out, out))(product)
print(LANES, int8_instruction())
print(*kernel.inspect_asm().values())
"""


@pytest.mark.parametrize(
    ("cpu", "features", "instruction", "name"),
    [
        ("sapphirerapids", "avx2 fma avx512f avx512bw avx512vnni", "vpdpwssd", "AVX-512 VNNI"),
        ("skylake-avx512", "avx2 fma avx512f avx512bw", "vpmaddwd", "AVX-512"),
        ("haswell", "avx2 fma", "vpmaddwd", "AVX2"),
    ],
)
def test_the_instructions_of_int8(cpu: str, features: str, instruction: str, name: str) -> None:
    """Compiled and not run. Accumulators and their columns are whole registers of the longest kind."""
    compiled_for = ",".join(f"+{feature}" for feature in features.split())
    output = in_process(["-c", LOOK], features, {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": compiled_for})
    first, assembly = output.split("\n", 1)
    lanes, register = ("16", "zmm") if "avx512f" in features else ("8", "ymm")
    assert first == f"{lanes} {name}"
    registers = re.findall(rf"\s{instruction}\s[^\n]*%([xyz]mm)\d+\s*$", assembly, re.MULTILINE)
    assert registers and set(registers) == {register}
    others = {"vpdpwssd", "vpmaddwd", "vpmulld"} - {instruction}
    assert not [other for other in others if other in assembly]

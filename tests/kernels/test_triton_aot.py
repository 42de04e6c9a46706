"""The ``kernels`` command: what it compiles fits, does not spill and is right, and it says so in the promised form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from rich.console import Console

from kernels import __main__ as command
from kernels import aot
from kernels.aot import TARGETS, Label, Resources
from kernels.cards import card_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1500)  # 300 compilations and their errors: some three minutes on two idle cores

OCCUPIED = {"registers", "spills", "shared_bytes"}
ON_PAPER = {"workload", "bytes", "operations", "card", "roofline_us"}
KEYS = {"kernel", "target", "config", "max_error", "ok"} | OCCUPIED | ON_PAPER


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=1490,
    )


@pytest.fixture(scope="module")
def shipped() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    # A user's own TRITON_INTERPRET must not turn compiling into interpreting.
    result = _command("--json", "-", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr == "", "progress in a pipe"
    document = json.loads(result.stdout)
    assert set(document) == {"kernels"}
    return document["kernels"]


def _kernels_of_the_package() -> set[Any]:
    from triton.runtime.jit import JITFunction

    import kernels.triton

    modules = [import_module(f"kernels.triton.{module.name}") for module in iter_modules(kernels.triton.__path__)]
    return {
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def test_every_kernel_ships(shipped: list[dict[str, Any]]) -> None:
    from kernels.triton.configurations import shipped_configurations

    configurations = shipped_configurations()
    missing = _kernels_of_the_package() - {configuration.function for configuration in configurations}
    assert not missing, "these kernels are launched, but nobody compiles them here"
    expected = [
        (configuration.kernel, target, configuration.config)
        for target in TARGETS
        for configuration in configurations
        if configuration.targets is None or target in configuration.targets
    ]
    assert [(entry["kernel"], entry["target"], entry["config"]) for entry in shipped] == expected
    assert len(set(expected)) == len(expected), "a name is given twice"
    assert all(set(entry) == KEYS for entry in shipped)
    kernels = {configuration.kernel for configuration in configurations}
    assert {(kernel, target) for kernel, target, _ in expected} == {(k, t) for k in kernels for t in TARGETS}


def test_nothing_spills_and_everything_fits(shipped: list[dict[str, Any]]) -> None:
    for entry in shipped:
        assert entry["ok"] is True, entry
        assert entry["spills"] == 0, entry
        assert 0 < entry["registers"] <= (512 if entry["target"].startswith("gfx") else 255), entry
        assert entry["shared_bytes"] <= TARGETS[entry["target"]].shared_limit, entry
    attention = [entry for entry in shipped if entry["kernel"] == "paged_attention"]
    assert all(entry["shared_bytes"] > 0 for entry in attention)


def test_the_least_time_is_the_slower_of_moving_and_computing(shipped: list[dict[str, Any]]) -> None:
    for entry in shipped:
        card = card_of(entry["target"])
        assert entry["card"] == card.name
        assert entry["workload"] and entry["bytes"] > 0 and entry["operations"] >= 0, entry
        moving, computing = entry["bytes"] / card.bandwidth, 0.0
        if entry["operations"]:
            computing = entry["operations"] / card.rates[entry["config"].split()[0]]
        assert entry["roofline_us"] == pytest.approx(1e6 * max(moving, computing)), entry


def test_bytes_and_operations_are_those_of_the_workload(shipped: list[dict[str, Any]]) -> None:
    def found(kernel: str, begin: str) -> dict[str, Any]:
        (entry,) = [
            e for e in shipped if e["target"] == "sm_90" and e["kernel"] == kernel and e["config"].startswith(begin)
        ]
        return entry

    def size(*shape: int) -> int:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").nbytes

    decode = found("paged_attention", "bf16 decode d64 g3 ")
    assert decode["workload"] == "32 decodes of 1,024 tokens"
    keys, queries = size(32, 1024, 8, 64), size(32, 24, 64)
    assert decode["bytes"] == 2 * keys + 2 * queries
    assert decode["operations"] == 2 * 2 * 64 * 24 * 32 * 1024

    halved = found("paged_attention", "bf16 fp8-kv decode d64 g3 ")
    assert halved["bytes"] == keys + 2 * queries and halved["operations"] == decode["operations"]

    prompt = found("paged_attention", "bf16 prefill d64 g3 ")
    assert prompt["workload"] == "a prompt of 2,048 tokens"
    assert prompt["operations"] == sum(2 * 2 * 64 * 24 * seen for seen in range(1, 2049))

    norm = found("rms_norm", "bf16 8192 wide + residual")
    assert norm["workload"] == "2,048 tokens"
    assert norm["bytes"] == 4 * size(2048, 8192) + size(8192)
    assert norm["operations"] == 0


def test_errors_are_measured(shipped: list[dict[str, Any]]) -> None:
    for entry in shipped:
        limit = 5e-6 if entry["config"].startswith("fp32") else 2.0**-4 if "e4m3" in entry["config"] else 2e-2
        assert entry["max_error"] <= limit, entry
    rounded = [entry["max_error"] for entry in shipped if entry["kernel"] == "paged_attention"]
    assert min(rounded) > 0, "float arithmetic in another order cannot be exact"


def _targets_of(configuration: Any) -> set[str]:
    return set(TARGETS if configuration.targets is None else configuration.targets)


def test_every_attention_tile_is_compiled_wherever_it_is_used() -> None:
    pytest.importorskip("triton")
    from kernels.triton.attention_tiles import TILES
    from kernels.triton.configurations import shipped_configurations

    families = {target: "amd" if target.startswith("gfx") else "sm_80" for target in TARGETS} | {"sm_90": "sm_90"}
    sizes = {"*u8": 1, "*fp16": 2, "*bf16": 2, "*fp32": 4}
    compiled = set()
    for each in shipped_configurations():
        if each.kernel == "paged_attention":
            constants, size = each.constants, sizes[each.types["key_ptr"]]
            row = (constants["ONE_TOKEN"], size, constants["DIM_PADDED"])
            tile = (constants["ROWS"], constants["KEYS"], each.num_warps, each.num_stages)
            compiled |= {(target, row, tile) for target in _targets_of(each)}
    for target, family in families.items():
        for row, tile in TILES[family].items():
            if target == "sm_80" and row[1] == 1:
                continue  # no floats of 8 bits
            # A group of up to 8 heads fits into the rows of every tile.
            assert (target, row, (tile.rows, tile.keys, tile.num_warps, tile.num_stages)) in compiled


def test_every_tile_of_an_int8_product_is_compiled() -> None:
    pytest.importorskip("triton")
    from kernels.triton.configurations import shipped_configurations
    from kernels.triton.int8_matmul import ODD_TILE, TILES

    compiled = set()
    for each in shipped_configurations():
        if each.kernel == "int8_matmul":
            assert _targets_of(each) == set(TARGETS)
            tile = tuple(each.constants[name] for name in ("ROWS", "OUTPUTS", "DEPTH"))
            compiled.add((each.types["x_ptr"], *tile, each.num_warps, each.num_stages))
    for (_, size), tile in TILES.items():
        types = ["*fp32"] if size == 4 else ["*bf16", "*fp16"]
        shape = (tile.rows, tile.outputs, tile.depth, tile.num_warps, tile.num_stages)
        assert any((kind, *shape) in compiled for kind in types), tile
    odd = (ODD_TILE.rows, ODD_TILE.outputs, ODD_TILE.depth, ODD_TILE.num_warps, ODD_TILE.num_stages)
    assert {("*bf16", *odd), ("*fp32", *odd)} <= compiled


def test_the_same_program_is_compiled_once() -> None:
    pytest.importorskip("triton")
    from kernels.triton.configurations import shipped_configurations

    configurations = shipped_configurations()
    codes = [aot._code(configuration) for configuration in configurations]
    first = configurations[0]
    other_workload = replace(first, config="another name", traffic=replace(first.traffic, bytes=1), tolerance=1.0)
    assert aot._code(other_workload) == codes[0]
    assert aot._code(replace(first, num_warps=2 * first.num_warps)) not in codes
    assert aot._code(replace(first, constants=first.constants | {"HEAD_DIM": 7})) not in codes
    assert aot._code(replace(first, types=first.types | {"q_ptr": "*i8"})) not in codes


@pytest.mark.parametrize(
    "arguments",
    [
        ["--targets", "sm_12"],
        ["--targets", ","],
        ["--cards", "RTX 1"],
        ["--cards", "H200 SXM", "--targets", "sm_90"],
        ["--what"],
        ["--json", "no/such/folder/kernels.json"],
        ["--json", "."],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = _command(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    if "sm_12" in arguments:
        assert "unknown target 'sm_12'" in result.stderr and "gfx942" in result.stderr
    if "RTX 1" in arguments:
        assert "unknown card 'RTX 1'; known are A100 80GB SXM, " in result.stderr
    if "--json" in arguments:
        assert f"--json {arguments[1]} cannot be written: " in result.stderr


def test_without_triton_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    for target in ("-", str(tmp_path / "findings.json")):
        assert command.main(["--json", target]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and "Triton is not installed" in printed.err
    assert list(tmp_path.iterdir()) == [], "looking whether a file can be written leaves none"


@pytest.mark.parametrize(
    ("resources", "error", "problem"),
    [
        (Resources(64, 0, 1024), 1e-6, ""),
        (Resources(255, 3, 1024), 1e-6, "3 spilled registers"),
        (Resources(64, 0, 70_000), 1e-6, "70,000 bytes of shared memory where gfx942 has 65,536"),
        (Resources(64, 0, 1024), 0.5, "error 0.5, tolerance 1e-05"),
        (Resources(64, 0, 1024), float("nan"), "error nan, tolerance 1e-05"),
        (RuntimeError("no such instruction"), 1e-6, "does not compile: no such instruction"),
        (Resources(64, 0, 1024), RuntimeError("index out of range"), "cannot be interpreted: index out of range"),
    ],
)
def test_what_is_not_ok(resources: Resources | Exception, error: float | Exception, problem: str) -> None:
    label = Label("k", "bf16 wide", 1e-5, "4 rows", 5_300, 0, None, "")
    finding = aot._finding(label, card_of("gfx942"), _future(resources), _future(error))
    assert finding.problem == problem
    entry = finding.as_json()
    assert entry["ok"] == (not problem)
    assert entry["roofline_us"] == pytest.approx(1e-3)
    json.dumps(entry, allow_nan=False)
    tables = StringIO()
    command._show([finding], Console(file=tables, width=120))
    assert ("failed" in tables.getvalue()) == bool(problem)


def _future(value: Any) -> Any:
    future: aot.Future[Any] = aot.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future

"""The ``kernels`` command: what it compiles fits, does not spill and is right, and it says so in the promised form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels import aot
from kernels.aot import DEFAULT_TARGETS, TARGETS, Label, Resources

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # compiling and interpreting side by side: a minute on two idle cores

KEYS = {"kernel", "target", "config", "registers", "spills", "shared_bytes", "max_error", "ok"}
KERNELS = {"paged_attention", "kv_write", "rms_norm", "silu_mul", "copy_blocks"}


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=590,
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


def test_every_kernel_is_there_for_every_target(shipped: list[dict[str, Any]]) -> None:
    assert all(set(entry) == KEYS for entry in shipped)
    assert {(entry["kernel"], entry["target"]) for entry in shipped} == {
        (kernel, target) for kernel in KERNELS for target in DEFAULT_TARGETS
    }
    names = [(entry["kernel"], entry["target"], entry["config"]) for entry in shipped]
    assert len(set(names)) == len(names)


def test_nothing_spills_and_everything_fits(shipped: list[dict[str, Any]]) -> None:
    for entry in shipped:
        assert entry["ok"] is True, entry
        assert entry["spills"] == 0, entry
        assert 0 < entry["registers"] <= (512 if entry["target"].startswith("gfx") else 255), entry
        assert entry["shared_bytes"] <= TARGETS[entry["target"]].shared_limit, entry
    attention = [entry for entry in shipped if entry["kernel"] == "paged_attention"]
    assert all(entry["shared_bytes"] > 0 for entry in attention)


def test_errors_are_measured(shipped: list[dict[str, Any]]) -> None:
    for entry in shipped:
        limit = 5e-6 if entry["config"].startswith("fp32") else 2e-2
        assert entry["max_error"] <= limit, entry
    rounded = [entry["max_error"] for entry in shipped if entry["kernel"] == "paged_attention"]
    assert min(rounded) > 0, "float arithmetic in another order cannot be exact"


def test_every_tile_of_the_table_is_compiled(shipped: list[dict[str, Any]]) -> None:
    from kernels.triton.paged_attention import TILES

    configs = {entry["config"] for entry in shipped if entry["kernel"] == "paged_attention"}
    for one_token, itemsize, dim in TILES:
        kinds = r"fp32" if itemsize == 4 else r"(bf16|fp16)"
        pattern = rf"{kinds} {'decode' if one_token else 'mixed'} d(\d+) "
        dims = [int(match[1 if itemsize == 4 else 2]) for config in configs if (match := re.match(pattern, config))]
        assert any(dim // 2 < each <= dim for each in dims), (one_token, itemsize, dim)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--targets", "sm_12"],
        ["--targets", ","],
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
    if "--json" in arguments:
        assert f"--json {arguments[1]} cannot be written: " in result.stderr


def test_without_triton_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from kernels import __main__ as command

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
    finding = aot._finding(Label("k", "c", 1e-5), "gfx942", _future(resources), _future(error))
    assert finding.problem == problem
    entry = finding.as_json()
    assert entry["ok"] == (not problem)
    json.dumps(entry, allow_nan=False)


def _future(value: Any) -> Any:
    future: aot.Future[Any] = aot.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future

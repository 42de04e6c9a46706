"""The command line as scripts use it: exit codes, what goes to which stream, and no display or half a display."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import app.cli as cli
from engine import doctor, environment
from engine.environment import DisplayState, module_command, module_environment
from engine.output_files import target_fault

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X11")


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``batchscope`` from a folder that is not ours, with no display unless one is given."""
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"}
    env = {name: value for name, value in module_environment().items() if name not in hidden} | variables
    return subprocess.run(
        module_command("app.cli", *arguments), capture_output=True, text=True, env=env, cwd=cwd, timeout=120
    )


def test_version(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"batchscope {environment.version()}\n"


def test_help_lists_the_commands_that_exist_and_no_others(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    listed = re.findall(r"^    (\w+) {2}", done.stdout, re.MULTILINE)
    assert listed == ["demo", "replay", "desktop", *cli.MODULES]
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert set(listed) == set(re.findall(r"^batchscope (\w+)", readme, re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay"], "replay"),
        (["--threads", "many"], "many"),
        (["--threads", "0"], "threads is 0; it must be 1 to 1,024"),
        (["--kv-blocks", "0"], "kv_blocks is 0; it must be at least 1"),
        (["--model", ""], "model is empty"),
        (["--dtype", "int3"], "int3"),
        (["demo", "--seconds", "0"], "0 is not within 1 to 3600"),
        (["demo", "--seconds", "nan"], "nan is not within"),
        (["--threads", "2", "bench", "--scenario", "x"], "bench takes its options after its name"),
        (["demo", "--discipline", "vllm"], "unrecognized arguments: --discipline vllm"),
    ],
)
def test_wrong_usage_is_2_with_the_help_and_the_reason_last(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage: batchscope" in done.stderr
    assert words in done.stderr.strip().splitlines()[-1]


def test_the_bench_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []

    def become(path: str, command: list[str], env: dict[str, str]) -> None:
        became.extend([path, command])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(sys, "platform", "linux")
    rest = ["--scenario", "a b", "--goodput", "ttft:100", "--json", "-", "--help"]
    for name, (module, _) in cli.MODULES.items():
        became.clear()
        with pytest.raises(SystemExit):
            cli.main([name, *rest])
        assert became[0] == sys.executable
        assert became[1][-len(rest) - 2 :] == ["-m", module, *rest]


def test_a_command_s_exit_code_is_batchscope_s(tmp_path: Path) -> None:
    assert run("bench", "--no-such-option", cwd=tmp_path).returncode == 2


@pytest.fixture
def demos(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The demos that were asked for, instead of running them."""
    asked: list[Any] = []
    demo = SimpleNamespace(run_demo=lambda options: asked.append(options) or 0)
    monkeypatch.setitem(sys.modules, "app.demo", demo)
    return asked


def test_without_a_display_the_demo_runs_offscreen_and_one_line_says_so(
    demos: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cli.main(["--model", "somewhere", "--threads", "2"]) == 0
    (options,) = demos
    assert options.offscreen
    assert (options.model, options.threads) == ("somewhere", 2)
    assert (options.seconds, options.scenario, options.screenshot, options.json) == (20.0, None, None, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no display" in err


def test_a_missing_library_is_named_with_its_package_instead_of_an_abort(
    demos: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = DisplayState(broken="Qt cannot open a window here: libxcb-cursor.so.0 missing", fix="sudo apt install x")
    monkeypatch.setattr(cli, "display_state", lambda: broken)
    assert cli.main([]) == 1
    assert cli.main(["demo"]) == 1
    assert demos == []
    assert cli.main(["demo", "--offscreen"]) == 0
    err = capsys.readouterr().err
    assert "libxcb-cursor.so.0 missing" in err
    assert "sudo apt install x" in err


def test_a_qt_that_cannot_be_imported_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: Any) -> int:
        raise ImportError("libEGL.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(cli, "demo", fails)
    assert cli.main(["demo", "--offscreen"]) == 1
    assert "apt install libegl1" in capsys.readouterr().err


def test_our_own_import_errors_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: Any) -> int:
        raise ModuleNotFoundError("No module named 'app.nothing'", name="app.nothing")

    monkeypatch.setattr(cli, "demo", fails)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo", "--offscreen"])


# The display ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("libxcb-cursor.so.0", "libxcb-cursor0"),
        ("libxkbcommon-x11.so.0", "libxkbcommon-x11-0"),
        ("libX11-xcb.so.1", "libx11-xcb1"),
        ("libEGL.so.1", "libegl1"),
        ("libdbus-1.so.3", "libdbus-1-3"),
        ("libglib-2.0.so.0", "libglib2.0-0"),
    ],
)
def test_debian_s_package_names(library: str, package: str) -> None:
    assert environment.debian_package(library) == package


@linux_only
def test_a_plugin_that_misses_a_library_is_found_out_before_qt_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ctypes

    real = ctypes.CDLL

    def load(name: str, *rest: Any) -> Any:
        if name.endswith("libqxcb.so") or name == "libxcb-cursor.so.0":
            raise OSError("libxcb-cursor.so.0: cannot open shared object file: No such file or directory")
        return real(name, *rest)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("QT_QPA_PLATFORM", raising=False)
    state = environment.display_state()
    assert "libxcb-cursor.so.0 missing" in state.broken
    assert "libxcb-cursor0" in state.fix.split()


@linux_only
def test_a_display_where_nobody_answers_is_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    if environment.missing_libraries():
        pytest.skip("this machine lacks Qt's X11 libraries")
    monkeypatch.setenv("DISPLAY", ":4711")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("QT_QPA_PLATFORM", raising=False)
    state = environment.display_state()
    assert "':4711'" in state.absent
    assert not state.broken


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_share_the_cores_unless_the_user_says_otherwise(before: dict[str, str], after: dict[str, str]) -> None:
    environment.share_cores(before)
    assert before == after


# The window as a process ---------------------------------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_window_and_its_engine_quietly(number: signal.Signals, tmp_path: Path) -> None:
    env = module_environment() | {"QT_QPA_PLATFORM": "offscreen", "DISPLAY": ":0"}
    env |= {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    window = subprocess.Popen(
        module_command("app.cli", "--model", str(tmp_path / "nothing")),
        env=env,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process = psutil.Process(window.pid)
        deadline = time.monotonic() + 60
        while not process.children() and window.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        (engine,) = process.children()
        begun = time.monotonic()
        window.send_signal(number)
        _, err = window.communicate(timeout=20)
    finally:
        window.kill()
        window.wait()
    assert window.returncode == 0
    assert "Traceback" not in err
    assert "QThread" not in err
    assert time.monotonic() - begun < 5
    assert not engine.is_running()


# The doctor ----------------------------------------------------------------------------------------------------------

DOCTOR_KEYS = {
    "version",
    "python",
    "platform",
    "device",
    "backend",
    "backend_reason",
    "threads",
    "packages",
    "model_cache",
    "missing",
}


def test_the_doctor_writes_json_and_nothing_else(tmp_path: Path) -> None:
    done = run("doctor", "--json", "-", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert set(report) >= DOCTOR_KEYS
    assert done.returncode == 0
    assert report["version"] == environment.version()
    assert report["packages"]["torch"]
    assert report["threads"] >= 1
    assert all(set(miss) == {"what", "fix"} for miss in report["missing"])


def test_the_doctor_says_so_first_where_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: pytest.fail("the work had begun"))
    for target, words in ((tmp_path / "no" / "folder.json", "there is no folder"), (tmp_path, "this is a folder")):
        with pytest.raises(SystemExit) as caught:
            doctor.main(["--json", str(target)])
        assert caught.value.code == 2
        assert f"--json {target}: {words}" in capsys.readouterr().err


@linux_only
@pytest.mark.parametrize(
    ("redirection", "words"),
    [
        (">&-", "batchscope: standard output is closed: redirect it to a file, or to /dev/null\n"),
        (">/dev/full", "batchscope doctor: standard output cannot be written: No space left on device\n"),
        ("--json - >/dev/full", "batchscope doctor: standard output cannot be written: No space left on device\n"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_a_sentence_and_1(redirection: str, words: str, tmp_path: Path) -> None:
    command = shlex.join(module_command("app.cli", "doctor")) + " " + redirection
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=module_environment(), cwd=tmp_path, timeout=120
    )
    assert (done.returncode, done.stderr) == (1, words)


# The files of results ------------------------------------------------------------------------------------------------


def test_a_place_for_a_result_is_tried_without_a_trace(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("kept")
    (tmp_path / "link.json").symlink_to(tmp_path / "later.json")
    for target in (None, "-", there, tmp_path / "new.json", tmp_path / "link.json"):
        assert target_fault("--json", target) == ""
    assert there.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "there.json"]


@linux_only
def test_a_place_where_no_file_can_be_made_is_refused_and_a_pipe_is_not(tmp_path: Path) -> None:
    assert target_fault("--json", "/proc/x.json").startswith("--json /proc/x.json cannot be written: ")
    assert target_fault("--json", tmp_path / ("n" * 300)).endswith("cannot be written: File name too long")
    os.mkfifo(tmp_path / "pipe")
    assert target_fault("--json", tmp_path / "pipe") == ""  # and nobody waits for its reader


def _raise(*_: object, **__: object) -> Any:
    raise RuntimeError("CUDA driver initialization failed")


def test_the_doctor_survives_a_gpu_that_raises_at_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in dir(torch.cuda):
        if not name.startswith("_") and callable(getattr(torch.cuda, name)):
            monkeypatch.setattr(torch.cuda, name, _raise)
    findings = doctor.examine()
    assert findings.can_run
    assert findings.report["device"] == "cpu"
    assert findings.report["backend"] == "cpu"
    assert "CUDA driver initialization failed" in findings.report["backend_reason"]


def test_the_doctor_survives_a_gpu_whose_first_operation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    findings = doctor.examine()
    assert findings.report["device"] == "cpu"
    assert findings.can_run


def test_the_doctor_names_missing_packages_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version

    def version(name: str) -> str:
        if name == "gguf":
            raise doctor.metadata.PackageNotFoundError(name)
        return "0.1" if name == "numpy" else real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    findings = doctor.examine()
    assert not findings.can_run
    assert findings.report["packages"]["gguf"] is None
    fixes = {miss["what"]: miss["fix"] for miss in findings.missing}
    assert "pip install" in fixes["the package gguf"]
    assert any(what.startswith("numpy 0.1 is installed, but >=") for what in fixes)


def test_the_doctor_survives_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch" or name.startswith("engine.exec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch now raises ImportError
    findings = doctor.examine()
    assert not findings.can_run
    assert findings.report["device"] is None
    assert findings.report["threads"] >= 1
    assert any("torch" in miss["what"] for miss in findings.missing)
    json.dumps(findings.report)


def test_the_doctor_s_table_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = doctor.examine()
    findings.miss("a thing", "sudo apt install thing")
    doctor.show(findings)
    out = capsys.readouterr().out
    assert "missing a thing" in out
    assert "sudo apt install thing" in out
    assert "Batchscope can run here." in out

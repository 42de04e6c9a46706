"""The log: bounded, complete about loads and faults, and silent about what was said in a chat."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import qWarning

from app import privacy
from app.log_file import FILE_BYTES, FILES, EngineLog, LogFile, log_failure
from engine.environment import module_environment
from engine.messages import Loading

CANARY = "canary-3141"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFile]:
    made = LogFile(tmp_path / "state")
    yield made
    made.close()


def written(log: LogFile) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in log.files())


def test_it_begins_with_versions_and_is_the_users_alone(log: LogFile) -> None:
    assert "Batchscope" in written(log) and "Qt 6" in written(log)
    assert log.path.stat().st_mode & 0o077 == 0


def test_it_never_takes_more_than_its_files(log: LogFile) -> None:
    logger = logging.getLogger("batchscope")
    for number in range(5000):
        logger.info("%d %s", number, "x" * 900)
    assert len(log.files()) == FILES
    assert all(path.stat().st_size <= FILE_BYTES for path in log.files())
    assert "4999 x" in log.path.read_text()
    log.wipe()
    assert log.files() == []
    logger.info("after that")
    assert "after that" in written(log)


def test_a_folder_that_takes_nothing_costs_the_log_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    log = LogFile(tmp_path / "file" / "state")
    logging.getLogger("batchscope").error("nobody reads this")
    log.close()
    assert log.files() == []
    assert capfd.readouterr().err == ""


@pytest.mark.qt_no_exception_capture
def test_uncaught_exceptions_of_every_thread_are_in_it(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: heard.append(kind))
    monkeypatch.setattr(threading, "excepthook", lambda arguments: heard.append(arguments.exc_type))
    log.catch_faults()

    def fail() -> None:
        raise OverflowError("of the thread")

    thread = threading.Thread(target=fail, name="worker-7")
    thread.start()
    thread.join()
    try:
        {}[CANARY]
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    assert "uncaught in worker-7: OverflowError: of the thread" in written(log)
    assert "test_log_file.py" in written(log) and "in fail" in written(log)
    assert "uncaught: KeyError" in written(log)
    assert CANARY not in written(log)
    assert heard == [OverflowError, KeyError], "whoever heard of them before still does"


@pytest.mark.qt_log_level_fail("CRITICAL")
def test_qts_messages_are_in_it_and_go_on_to_who_had_them(log: LogFile, qtlog) -> None:
    log.catch_faults()
    qWarning("something about a pixmap")
    assert "WARNING Qt: something about a pixmap" in written(log)
    assert any("something about a pixmap" in record.message for record in qtlog.records)


def test_a_crash_in_native_code_is_in_the_next_windows_log(tmp_path: Path) -> None:
    code = (
        "import ctypes, sys; from pathlib import Path; from app.log_file import LogFile; "
        "LogFile(Path(sys.argv[1])).catch_faults(); ctypes.string_at(0)"
    )
    state = tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", code, str(state)], env=module_environment(), capture_output=True)
    assert done.returncode < 0
    code = code.replace("ctypes.string_at(0)", "0")
    subprocess.run([sys.executable, "-c", code, str(state)], env=module_environment(), capture_output=True, check=True)
    text = (state / "batchscope.log").read_text()
    assert "The last window crashed" in text
    assert "Fatal Python error: Segmentation fault" in text and "string_at" in text


def test_loads_and_deaths_are_in_it(rig, log: LogFile) -> None:
    engine_log = EngineLog(rig.bridge)
    rig.load()
    rig.client.loading("Reading weights", 1, 2)
    rig.client.die(
        f"A step failed (KeyError: '{CANARY}')",
        (
            "Traceback (most recent call last):",
            '  File "/x/engine/serving.py", line 7, in run',
            f"    template.render({CANARY!r})",
            f"jinja2.exceptions.TemplateError: {CANARY} cannot be",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
    )
    rig.wait_for(lambda: rig.bridge.state == "dead")
    text = written(log)
    assert "Loading starter: device auto" in text
    assert "Ready after" in text
    assert "The engine died, exit code -9: A step failed (KeyError" in text
    assert 'File "/x/engine/serving.py", line 7, in run' in text
    assert "jinja2.exceptions.TemplateError" in text
    assert "Tried to allocate 2 GiB" in text
    assert CANARY not in text
    rig.load()
    rig.bridge.loading.emit(Loading("Packing weights", 1, 2))
    rig.bridge.loading.emit(Loading("Packing weights", 2, 2))
    assert written(log).count("Loading: Packing weights") == 1
    rig.bridge.shutdown()
    rig.bridge.start(rig.bridge.config)
    rig.client.fail_to_load("There is no config.json in /models/x.", "damaged")
    rig.wait_for(lambda: rig.bridge.state == "failed")
    assert "Not loaded (damaged): There is no config.json in /models/x." in written(log)
    engine_log.deleteLater()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(CANARY), "ValueError"),
        (KeyError(CANARY), "KeyError"),
        (RuntimeError(CANARY), "RuntimeError"),
        (UnicodeEncodeError("utf-8", CANARY, 0, 1, CANARY), "UnicodeEncodeError"),
        (FileNotFoundError(2, "No such file", "/a/b"), "FileNotFoundError: No such file, /a/b"),
        (AttributeError("no attribute 'x'"), "AttributeError: no attribute 'x'"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_failure_is_quoted_only_where_it_cannot_quote_a_chat(log: LogFile, error: Exception, words: str) -> None:
    assert privacy.failure_words(error) == words
    log_failure("here", error)
    assert CANARY not in written(log)


def test_names_of_people_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "ada")
    text = "/srv/people/ada/models /home/bob/x '/Users/eve/y' /data/ada/z ada@host adamant C:\\Users\\Eve\\q"
    assert privacy.without_names(text) == "~/models ~/x '~/y' /data/~/z ~@host adamant ~\\q"

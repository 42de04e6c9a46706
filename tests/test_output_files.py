"""Results in files: whole or not at all, whatever the target is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.output_files import OutputFailure, write_target


def test_a_result_takes_the_place_of_the_old_one_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_target("--json", path, "one")
    path.chmod(0o640)
    write_target("--json", path, "two é")
    assert path.read_text(encoding="utf-8") == "two é" and path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputFailure, match="No space left"):
        write_target("--json", path, "new")
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    write_target("--json", link, "new")
    assert link.is_symlink() and (tmp_path / "real.json").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_target("--json", pipe, "through")
    reader.join(5)
    assert got == ["through"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputFailure, match=r"x\.json cannot be written"):
        write_target("--json", tmp_path / "none" / "x.json", "text")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="whoever may write everywhere has no such folder")
def test_a_file_in_a_folder_that_takes_no_other_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old and longer")
    tmp_path.chmod(0o555)
    try:
        write_target("--json", path, "new")
    finally:
        tmp_path.chmod(0o755)
    assert path.read_text() == "new"


def test_standard_output_by_its_path_is_written_to() -> None:
    script = "from engine.output_files import write_target; write_target('--json', '/dev/stdout', 'through')"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "through"

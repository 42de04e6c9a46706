"""Fetches a model from the Hugging Face hub into its cache: ``python -m engine.fetch ORG/NAME [--revision R]``.

Tells what it does on standard output, one JSON object a line (:mod:`engine.fetch_events`). Ending the process ends the
download; the next one goes on where it stopped, because what has come of a file keeps its name::

    blobs/<sha256>.incomplete ──size and SHA-256 right──▶ blobs/<sha256> ◀──link── snapshots/<commit>/model.safetensors

Only safetensors or one GGUF file, with the configuration and the tokenizer, are fetched: no pickles and no code.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

import filelock

from engine.fetch_events import FetchDone, FetchEvent, FetchFailed, FetchPlan, FetchProgress, HubFile, tell_on
from engine.fetch_plan import PlanError, choose_files
from engine.models.errors import ModelLoadError
from engine.models.families import outline
from engine.models.hub import is_repository

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_TELL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20
"""Written at once; a break loses less than that."""
_MARGIN_BYTES = 64 << 20
"""Stays free on the disk."""


class Fetch:
    """One repository at one revision."""

    def __init__(self, repository: str, revision: str, file: str, tell: Callable[[FetchEvent], None]) -> None:
        """``file``: the GGUF file to fetch; empty: the safetensors, or the only GGUF file."""
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_CACHE

        self._api = HfApi(library_name="batchscope")
        self._repository = repository
        self._revision = revision
        self._file = file
        self._tell = tell
        self._folder = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
        self._told_at = 0.0
        self._before = 0
        """Bytes of the files before the one that comes."""

    def plan(self) -> tuple[FetchPlan, list[RepoSibling]]:
        """What is to be fetched; asks the hub. Raises :class:`PlanError`, or what the hub's library raises."""
        info = self._api.model_info(self._repository, revision=self._revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        sizes = {name: sibling.size or 0 for name, sibling in siblings.items()}
        chosen = [siblings[name] for name in choose_files(self._repository, sizes, self._file)]
        self._refuse_unknown(info, [sibling.rfilename for sibling in chosen])
        commit = str(info.sha)
        total = sum(sibling.size or 0 for sibling in chosen)
        here = sum(self._here(sibling, commit) for sibling in chosen)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder.parent).free
        files = [HubFile(sibling.rfilename, sibling.size or 0) for sibling in chosen]
        licence = str(getattr(info.card_data, "license", None) or "")
        plan = FetchPlan(self._repository, self._revision, commit, total, here, free, files, licence)
        if total - here + _MARGIN_BYTES > free:
            raise PlanError(
                f"{self._repository} needs {_size(total - here)} more on the disk, and {_size(free)} are free in "
                f"{self._folder.parent}. Make room there, or set HF_HUB_CACHE to a folder on another disk.",
                "disk",
            )
        return plan, chosen

    def run(self) -> None:
        plan, chosen = self.plan()
        self._tell(plan)
        for sibling in sorted(chosen, key=lambda sibling: sibling.size or 0):
            self._one(sibling, plan)
            self._before += sibling.size or 0
        snapshot = self._folder / "snapshots" / plan.commit
        if self._revision != plan.commit:
            ref = self._folder / "refs" / self._revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(plan.commit, encoding="utf-8")
        self._tell(FetchDone(self._repository, self._revision, plan.commit, str(snapshot)))

    def _refuse_unknown(self, info: ModelInfo, names: list[str]) -> None:
        """Before gigabytes come: an architecture that is not run is refused by its configuration."""
        if any(name.endswith(".gguf") for name in names) or "config.json" not in names:
            return
        config = dict(info.config or {})
        if config.get("architectures") or config.get("model_type"):
            try:
                outline(config)
            except ModelLoadError as error:
                # The hub tells only a few of the keys; a number that it leaves out says nothing.
                if error.kind == "unsupported":
                    raise PlanError(f"{self._repository} cannot be run: {error.message}", "unsupported") from error

    # Files -----------------------------------------------------------------------------------------------------------

    def _here(self, sibling: RepoSibling, commit: str) -> int:
        """Bytes of a file that need not come any more."""
        places = [self._folder / "snapshots" / commit / sibling.rfilename]
        if digest := _digest(sibling):
            places += [self._folder / "blobs" / digest, self._folder / "blobs" / f"{digest}.incomplete"]
        return max((min(place.stat().st_size, sibling.size or 0) for place in places if place.exists()), default=0)

    def _one(self, sibling: RepoSibling, plan: FetchPlan) -> None:
        """A large file by our own hand, which knows how to go on; a small one, and every link, by the library's."""
        from huggingface_hub import hf_hub_download

        self._report(sibling.rfilename, 0, plan.total_bytes)
        digest = _digest(sibling)
        if digest and not (self._folder / "blobs" / digest).exists():
            self._large(sibling, digest, plan)
        hf_hub_download(self._repository, sibling.rfilename, revision=plan.commit, library_name="batchscope")

    def _large(self, sibling: RepoSibling, digest: str, plan: FetchPlan) -> None:
        from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get
        from huggingface_hub.utils._headers import build_hf_headers

        url = hf_hub_url(self._repository, sibling.rfilename, revision=plan.commit)
        headers = build_hf_headers(library_name="batchscope")
        place = get_hf_file_metadata(url, headers=dict(headers)).location
        if urlsplit(place).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's, not the store's that it points to
        blobs = self._folder / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        locks = self._folder.parent / ".locks" / self._folder.name
        locks.mkdir(parents=True, exist_ok=True)
        partial = blobs / f"{digest}.incomplete"
        with filelock.FileLock(locks / f"{digest}.lock"):
            with partial.open("ab") as file:
                begun = file.tell()
                counted: Any = _Counted(file, lambda done: self._report(sibling.rfilename, done, plan.total_bytes))
                http_get(place, counted, resume_size=begun, headers=headers, expected_size=sibling.size)
            self._check(partial, sibling, digest)
            partial.replace(blobs / digest)

    def _check(self, partial: Path, sibling: RepoSibling, digest: str) -> None:
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            partial.unlink()
            raise PlanError(
                f"{sibling.rfilename} came with the SHA-256 {found[:12]}… instead of {digest[:12]}…; it was not kept. "
                "Fetch it again.",
                "damaged",
            )

    def _report(self, name: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            self._tell(FetchProgress(name, self._before + done, total))


class _Counted:
    """A file that tells how long it is, as it grows."""

    def __init__(self, file: BinaryIO, grown: Callable[[int], None]) -> None:
        self._file = file
        self._grown = grown

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._file.flush()  # what has come is kept, however this process ends
        self._grown(self._file.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _digest(sibling: RepoSibling) -> str:
    """SHA-256 of a large file, empty for a small one."""
    return sibling.lfs.sha256 if sibling.lfs is not None else ""


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


# Words for what goes wrong -------------------------------------------------------------------------------------------


def failure(error: Exception, repository: str, revision: str) -> FetchFailed:
    """What to tell of an error: a sentence with the way out."""
    from huggingface_hub import errors

    again = "What has come is kept; fetch it again and it goes on where it stopped."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, PlanError):
        return FetchFailed(error.kind, str(error), error.choices)
    if isinstance(error, errors.GatedRepoError):
        return FetchFailed(
            "gated",
            f"{repository} is gated: its owner wants to be asked first. Open https://huggingface.co/{repository}, "
            "accept the conditions, then log in on this machine with 'hf auth login' (or set HF_TOKEN) and try again.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchFailed("not-found", f"{repository} has no revision {revision!r}. Leave it empty for the main one.")
    if status == 401 and "credentials" in str(error).lower():
        return FetchFailed("token", "The hub does not accept the token of this machine; log in with 'hf auth login'.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return FetchFailed(
            "not-found",
            f"The hub has no model {repository}, or it is private. Check the name; for a private one log in with "
            "'hf auth login' (or set HF_TOKEN).",
        )
    if status == 403:
        return FetchFailed("gated", f"The hub refuses {repository} to the token of this machine: {_first_line(error)}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return FetchFailed("offline", "HF_HUB_OFFLINE is set: nothing is fetched. Unset it, or turn offline mode off.")
    if status is not None:
        return FetchFailed("hub", f"The hub answers with the error {status} ({_first_line(error)}). {again}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchFailed("disk", f"The disk is full. Make room, then go on. {again}")
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests") or isinstance(
        error, ConnectionError | TimeoutError
    ):
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        return FetchFailed(
            "offline", f"{endpoint} cannot be reached ({_first_line(error)}). Check the network. {again}"
        )
    return FetchFailed("other", f"{repository} could not be fetched: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].rstrip(".") if lines else ""
    return re.sub(r"^\[Errno -?\d+\] ", "", first) or type(error).__name__


# The command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.fetch")
    parser.add_argument("repository", metavar="ORG/NAME")
    parser.add_argument("--revision", default="main", help="branch, tag or commit")
    parser.add_argument("--file", default="", help="the GGUF file to fetch, where there are several")
    parser.add_argument("--plan", action="store_true", help="only tell what would be fetched")
    options = parser.parse_args(arguments)
    repository = options.repository.strip()
    tell = tell_on(sys.stdout.buffer)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not is_repository(repository):
        tell(FetchFailed("not-found", f"{repository!r} is no name on the hub; one looks like org/name."))
        return 1
    from huggingface_hub import constants

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    try:
        fetch = Fetch(repository, options.revision, options.file, tell)
        if options.plan:
            tell(fetch.plan()[0])
        else:
            fetch.run()
    except Exception as error:
        tell(failure(error, repository, options.revision))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

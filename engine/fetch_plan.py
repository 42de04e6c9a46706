"""Which files of a repository make a model: weights in one form, the configuration, the tokenizer, nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.fetch_events import HubFile

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_BESIDE = re.compile(
    r"^(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template"
    r"|preprocessor_config|model\.safetensors\.index)\.json$|^merges\.txt$|^vocab\.txt$|^tokenizer\.model$"
    r"|^chat_template\.jinja$"
)
_PICKLE = re.compile(r"\.(bin|pt|pth|ckpt)$")


class PlanError(Exception):
    """Why nothing is fetched, as a sentence with the way out."""

    def __init__(self, message: str, kind: str, choices: list[HubFile] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.choices = choices or []


def choose_files(repository: str, sizes: Mapping[str, int], file: str = "") -> list[str]:
    """Names of the files to fetch, of those in the repository with their bytes. ``file``: the GGUF file wanted.

    Raises :class:`PlanError`: ``choose`` lists the GGUF files where none was named, ``unsupported`` says what there is.
    """
    beside = [name for name in sizes if _BESIDE.match(name)]
    if file:
        if file not in sizes:
            raise PlanError(f"{repository} has no file {file}.", "not-found")
        return [file]
    single = [name for name in sizes if name == "model.safetensors"]
    shards = [name for name in sizes if "/" not in name and name.startswith("model") and _SHARD.search(name)]
    if single or (shards and "model.safetensors.index.json" in sizes):
        if "config.json" not in sizes:
            raise PlanError(f"{repository} has weights but no config.json, which says what they are.", "unsupported")
        index = "model.safetensors.index.json"
        return sorted(single + [name for name in beside if name != index] if single else shards + beside)
    ggufs = sorted(name for name in sizes if name.endswith(".gguf") and "mmproj" not in name)
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        choices = [HubFile(name, sizes[name]) for name in ggufs]
        raise PlanError(f"{repository} has {len(ggufs)} GGUF files; choose one.", "choose", choices)
    pickles = [name for name in sizes if _PICKLE.search(name)]
    if pickles:
        raise PlanError(
            f"{repository} holds its weights as pickles ({pickles[0]}), which can run code when they are opened; "
            "Batchscope fetches only safetensors and GGUF. Look for a repository that has the model so.",
            "unsupported",
        )
    raise PlanError(
        f"{repository} has neither safetensors nor GGUF files; it is no model for Batchscope.", "unsupported"
    )

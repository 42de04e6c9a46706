"""The download from a hub that is imitated on this machine: what is asked for, how it goes on, what is said."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.environment import module_command, module_environment
from engine.fetch_events import FetchDone, FetchEvent, FetchFailed, FetchPlan, FetchProgress, fetch_events
from engine.fetch_plan import PlanError, choose_files
from engine.model_catalog import ModelEntry
from engine.model_scan import Remembered, Scan
from engine.remove_model import remove_imported
from tests.models.fake_hub import COMMIT, FakeHub, Repository

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
NAME = "org/tiny-model"


def weights(megabytes: int = 3) -> bytes:
    """A whole safetensors file with one tensor."""
    size = megabytes << 20
    tensor = {"model.embed_tokens.weight": {"dtype": "F16", "shape": [size // 128, 64], "data_offsets": [0, size]}}
    header = json.dumps(tensor).encode()
    return len(header).to_bytes(8, "little") + header + bytes(range(256)) * (size // 256)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    made = FakeHub()
    made.repositories[NAME] = Repository(
        {
            "model.safetensors": weights(),
            "config.json": json.dumps(CONFIG).encode(),
            "tokenizer.json": b"{}",
            "pytorch_model.bin": b"a pickle",
            "modeling.py": b"print('code')",
            "README.md": b"words",
        },
        config=dict(CONFIG),
    )
    yield made
    made.close()


def environment(hub: FakeHub, cache: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in module_environment().items() if not name.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", **more}


def fetch(hub: FakeHub, cache: Path, *arguments: str, **more: str) -> list[FetchEvent]:
    done = subprocess.run(
        module_command("engine.fetch", *(arguments or (NAME,))),
        capture_output=True,
        env=environment(hub, cache, **more),
        timeout=60,
    )
    events = [fetch_events.decode(line) for line in done.stdout.splitlines()]
    assert events, done.stderr.decode()
    assert (done.returncode == 0) == (not isinstance(events[-1], FetchFailed))
    return events


def entries(cache: Path) -> list[ModelEntry]:
    return list(Scan(Remembered(None), cache_dir=cache / "none")._hub(cache / "hub"))


def test_a_model_is_fetched_without_pickles_and_code(hub: FakeHub, tmp_path: Path) -> None:
    plan, *others = fetch(hub, tmp_path)
    assert isinstance(plan, FetchPlan) and plan.commit == COMMIT and plan.licence == "apache-2.0"
    assert {file.name for file in plan.files} == {"model.safetensors", "config.json", "tokenizer.json"}
    done = others[-1]
    assert isinstance(done, FetchDone)
    folder = Path(done.path)
    assert folder.joinpath("model.safetensors").read_bytes() == weights()
    assert not any(path.endswith((".bin", ".py")) for _, path, _ in hub.requests)
    (entry,) = entries(tmp_path)
    assert (entry.name, entry.model, entry.revision, entry.state) == (NAME, NAME, "main", "ready")
    assert entry.parameters == (3 << 20) // 128 * 64


def test_only_the_plan_is_told_where_that_is_asked(hub: FakeHub, tmp_path: Path) -> None:
    (plan,) = fetch(hub, tmp_path, NAME, "--plan")
    assert isinstance(plan, FetchPlan) and plan.here_bytes == 0 and plan.free_bytes > plan.total_bytes
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_breaks_in_the_middle_goes_on_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.break_after = 1_200_000
    process = subprocess.Popen(
        module_command("engine.fetch", NAME), stdout=subprocess.PIPE, env=environment(hub, tmp_path)
    )
    name = f"{hashlib.sha256(weights()).hexdigest()}.incomplete"
    assert process.stdout is not None
    deadline = time.monotonic() + 30
    while not (partial := list(tmp_path.rglob(name))) or partial[0].stat().st_size < 1 << 20:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.kill()  # as the window's cancel, or the machine's end, does
    process.wait()
    process.stdout.close()
    kept = partial[0].stat().st_size
    (entry,) = entries(tmp_path)
    assert entry.state == "incomplete" and "not finished" in entry.reason
    hub.break_after = None
    hub.requests.clear()
    plan, *_, done = fetch(hub, tmp_path)
    assert isinstance(plan, FetchPlan) and plan.here_bytes >= kept
    assert isinstance(done, FetchDone)
    assert Path(done.path, "model.safetensors").read_bytes() == weights()
    ranges = [range_ for method, path, range_ in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert ranges == [f"bytes={kept}-"]
    assert entries(tmp_path)[0].state == "ready"


def test_what_came_wrong_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    digest = hashlib.sha256(weights()).hexdigest()
    blobs = tmp_path / "hub" / "models--org--tiny-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(b"x" * 1000)
    failed = fetch(hub, tmp_path)[-1]
    assert isinstance(failed, FetchFailed) and failed.kind == "damaged"
    assert digest not in {path.stem for path in blobs.iterdir()}


@pytest.mark.parametrize(
    ("change", "arguments", "variables", "kind", "words"),
    [
        ("none", ["org/nothing"], {}, "not-found", "no model org/nothing"),
        ("none", ["org/nothing"], {"HF_TOKEN": "hf_right"}, "not-found", "no model org/nothing"),
        ("none", [NAME, "--revision", "v9"], {}, "not-found", "no revision 'v9'"),
        ("private", [NAME], {}, "not-found", "hf auth login"),
        ("gated", [NAME], {}, "gated", "accept the conditions"),
        ("none", [NAME], {"HF_TOKEN": "hf_wrong"}, "token", "hf auth login"),
        ("none", [NAME], {"HF_HUB_OFFLINE": "1"}, "offline", "HF_HUB_OFFLINE"),
        ("none", [NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "offline", "cannot be reached"),
        ("none", ["nonsense"], {}, "not-found", "org/name"),
        ("family", [NAME], {}, "unsupported", "MambaForCausalLM"),
    ],
)
def test_what_cannot_be_fetched_is_a_sentence_with_the_way_out(
    hub: FakeHub,
    tmp_path: Path,
    change: str,
    arguments: list[str],
    variables: dict[str, str],
    kind: str,
    words: str,
) -> None:
    repository = hub.repositories[NAME]
    repository.gated, repository.private = change == "gated", change == "private"
    if change == "family":
        repository.config = {"architectures": ["MambaForCausalLM"]}
    failed = fetch(hub, tmp_path, *arguments, **variables)[-1]
    assert isinstance(failed, FetchFailed)
    assert failed.kind == kind and words in failed.message


def test_a_token_of_the_usual_place_opens_what_is_private(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[NAME].private = True
    (tmp_path / "token").write_text("hf_right")
    assert isinstance(fetch(hub, tmp_path)[-1], FetchDone)


def remove(hub: FakeHub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = module_command("engine.remove_model", *arguments)
    return subprocess.run(command, capture_output=True, text=True, env=environment(hub, cache), timeout=60)


def test_a_revision_is_removed_again(hub: FakeHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    assert remove(hub, tmp_path, NAME, "--revision", COMMIT).returncode == 0
    assert entries(tmp_path) == [] and not list(tmp_path.rglob("*.safetensors"))
    again = remove(hub, tmp_path, NAME, "--revision", COMMIT)
    assert again.returncode == 1 and "not in the cache any more" in again.stderr


def test_only_what_was_imported_is_removed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for folder in (models / "mine", tmp_path / "theirs"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="only what it has imported"):
        remove_imported(tmp_path / "theirs", tmp_path)
    remove_imported(models / "mine", tmp_path)
    assert list(models.iterdir()) == [] and (tmp_path / "theirs" / "model.safetensors").exists()


def test_progress_only_grows(hub: FakeHub, tmp_path: Path) -> None:
    told = [event.done_bytes for event in fetch(hub, tmp_path) if isinstance(event, FetchProgress)]
    assert told and told == sorted(told)


SIZES = {"config.json": 1, "tokenizer.json": 1}


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ({"model.safetensors": 9, "consolidated.safetensors": 9}, {"model.safetensors"}),
        (
            {
                "model-00001-of-00002.safetensors": 9,
                "model-00002-of-00002.safetensors": 9,
                "model.safetensors.index.json": 1,
                "original/model-00001-of-00001.safetensors": 9,
            },
            {
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            },
        ),
        ({"model.safetensors": 9, "q4.gguf": 3}, {"model.safetensors"}),
    ],
)
def test_one_form_of_the_weights_is_chosen(files: dict[str, int], chosen: set[str]) -> None:
    assert set(choose_files(NAME, {**SIZES, **files})) == {*SIZES, *chosen}


def test_of_several_gguf_files_one_is_to_be_named() -> None:
    sizes = {"q4.gguf": 4, "q8.gguf": 8, "README.md": 1}
    with pytest.raises(PlanError, match="2 GGUF files") as caught:
        choose_files(NAME, sizes)
    assert [(file.name, file.size) for file in caught.value.choices] == [("q4.gguf", 4), ("q8.gguf", 8)]
    assert choose_files(NAME, sizes, "q8.gguf") == ["q8.gguf"]


def test_pickles_are_refused() -> None:
    with pytest.raises(PlanError, match="pickles"):
        choose_files(NAME, {**SIZES, "pytorch_model.bin": 9})


def test_the_module_is_light_until_it_fetches(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import engine.fetch_events, engine.model_scan, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        env=module_environment(),
        cwd=tmp_path,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "engine" in loaded and not loaded & {"torch", "huggingface_hub", "numpy", "gguf", "tokenizers"}

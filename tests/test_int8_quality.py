"""The command that says what a type costs in quality: its figures against Transformers, its rule, its exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from engine.text.codec import TextCodec
from tests import int8_quality
from tests.process.tiny_model import make_tiny_model

NUM_TOKENS = int8_quality.WINDOW + int8_quality.CHUNK + 70
"""A whole window of several chunks, then one that ends in the middle of a chunk."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("quality") / "tiny")


def test_perplexity_is_that_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = int8_quality.TEXT.read_text(encoding="utf-8")
    found = int8_quality.measure(str(folder), ["float32"], NUM_TOKENS, text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(TextCodec.from_folder(folder).encode(text)[: NUM_TOKENS + 1])
    windows = zip(tokens[:-1].split(int8_quality.WINDOW), tokens[1:].split(int8_quality.WINDOW), strict=True)
    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(model(read[None]).logits[0], following, reduction="sum")
            for read, following in windows
        ]
    assert found["tokens"] == NUM_TOKENS
    (result,) = found["results"]
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses).item() / NUM_TOKENS), rel=1e-5)
    assert (result["ratio"], result["greedy_agreement"], result["mean_kl"]) == (1.0, 1.0, 0.0)


def test_a_type_beyond_the_limit_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "quality.json"
    command = ["--model", str(folder), "--dtypes", "bfloat16", "--tokens", "300", "--json", str(target)]
    assert int8_quality.main(command) == 0
    assert "yes" in capsys.readouterr().out
    (result,) = json.loads(target.read_text())["results"]
    assert 0 < abs(result["ratio"] - 1) <= int8_quality.LIMIT
    assert result["mean_kl"] > 0 and 0.9 < result["greedy_agreement"] <= 1
    monkeypatch.setattr(int8_quality, "LIMIT", abs(result["ratio"] - 1) / 2)
    assert int8_quality.main([*command[:-1], "-"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_what_cannot_be_measured_is_refused_with_a_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, sentence in (
        (["--dtypes", "int3"], "dtype is 'int3'"),
        (["--model", str(tmp_path / "none")], "There is no folder"),
        (["--tokens", "1"], "--tokens must be at least 2"),
    ):
        with pytest.raises(SystemExit) as ended:
            int8_quality.main(["--model", str(folder), *options])
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err


def test_a_known_divergence() -> None:
    quality = int8_quality.Quality("other")
    exact, other = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[0.25, 0.75], [0.75, 0.25]])
    quality.add(exact.log(), other.log(), torch.tensor([0, 1]))
    found = quality.figures()
    assert found["perplexity"] == pytest.approx(4.0) and found["ratio"] == pytest.approx(math.sqrt(2))
    assert found["greedy_agreement"] == 0.5 and not found["within_limit"]
    assert found["mean_kl"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_starter_model_is_within_the_limit(starter_folder: Path, dtype: str) -> None:
    text = int8_quality.TEXT.read_text(encoding="utf-8")
    found = int8_quality.measure(str(starter_folder), [dtype], 1_024, text)
    (result,) = found["results"]
    assert found["passed"], result
    assert result["greedy_agreement"] > 0.9

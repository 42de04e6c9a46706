"""A GGUF Llama comes out as the checkpoint it was made from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.messages import ChatMessage
from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.models.gguf_import import halves_from_pairs, import_gguf
from engine.text.codec import TextCodec
from tests.models.tiny_gguf import HEAD_DIM, HIDDEN, TOKENS, as_converter_permutes, write_tiny_gguf


def imported(tmp_path: Path, tied: bool = True) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf", tied)
    result = import_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: None, quantised="F32")
    assert result.weights_sha256 == hashlib.sha256(result.weights.read_bytes()).hexdigest()
    return Checkpoint.open(tmp_path / "model"), expected


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_the_file_was_made_from(tmp_path: Path, tied: bool) -> None:
    checkpoint, expected = imported(tmp_path, tied)
    spec = checkpoint.spec(torch.float32)
    tensors = checkpoint.tensors(spec)
    assert spec.tie_embeddings == tied
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        assert tensors[name].dtype == torch.float32
        assert np.array_equal(tensors[name].numpy(), values), name


def test_shape_and_names_reach_the_decoder(tmp_path: Path) -> None:
    checkpoint, _ = imported(tmp_path)
    spec = checkpoint.spec(torch.float32)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (64, 2, 4, 2, 16)
    assert (spec.vocab_size, spec.max_position, spec.rms_norm_eps) == (len(TOKENS), 128, 1e-5)
    reference = 1.0 / 50_000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    torch.testing.assert_close(spec.inv_freq, reference)
    assert checkpoint.eos_token_ids == {2}


def test_transformers_reads_the_import_as_a_llama(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, expected = imported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(model.state_dict()[name].numpy(), expected[name])


def test_order_of_rows_makes_neighbouring_pairs_into_halves() -> None:
    """Rotating pairs (2i, 2i + 1) of the file's rows is rotating halves (i, i + d/2) of the import's: the reason for
    the other order, checked as arithmetic and not as a permutation."""
    random = np.random.default_rng(1)
    weight, x = random.standard_normal((2 * HEAD_DIM, HIDDEN)), random.standard_normal(HIDDEN)
    angle = 3.0 / 10_000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angle), np.sin(angle)
    filed = (as_converter_permutes(weight, 2) @ x).reshape(2, HEAD_DIM // 2, 2)
    pairs = np.stack((filed[..., 0] * cos - filed[..., 1] * sin, filed[..., 1] * cos + filed[..., 0] * sin), -1)
    undone = (halves_from_pairs(as_converter_permutes(weight, 2), 2) @ x).reshape(2, 2, HEAD_DIM // 2)
    halves = np.stack((undone[:, 0] * cos - undone[:, 1] * sin, undone[:, 1] * cos + undone[:, 0] * sin), 1)
    np.testing.assert_allclose(pairs[..., 0], halves[:, 0])
    np.testing.assert_allclose(pairs[..., 1], halves[:, 1])
    assert not np.array_equal(as_converter_permutes(weight, 2), weight)


def test_tokenizer_splits_digits_merges_and_keeps_control_tokens_whole(tmp_path: Path) -> None:
    checkpoint, _ = imported(tmp_path)
    codec = TextCodec.from_folder(checkpoint.folder)
    ids = codec.encode("hel the 12<|im_end|>")
    assert [TOKENS[token_id] for token_id in ids] == ["hel", "Ġthe", "Ġ", "1", "2", "<|im_end|>"]
    assert codec.decode(ids) == "hel the 12"
    chat = codec.encode_chat([ChatMessage("user", "hel")])
    assert [TOKENS[i] for i in chat] == ["<|im_start|>", *"user", "Ċ", "hel", "<|im_end|>", "Ċ"]
    assert codec.vocab_size == len(TOKENS)


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[int, int]] = []
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: seen.append((done, total)))
    counts = [done for done, _ in seen]
    assert counts == sorted(set(counts))
    assert seen[-1] == (Checkpoint.open(tmp_path / "model").stored_bytes,) * 2


@pytest.mark.parametrize(("change", "words"), [({"architecture": "gemma"}, "gemma"), ({"pre": "viking"}, "viking")])
def test_other_files_are_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ModelLoadError, match=words) as refused:
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: None)
    assert refused.value.kind == "unsupported"


def test_written_files_are_json_that_transformers_understands(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    checkpoint, _ = imported(tmp_path)
    assert GenerationConfig.from_pretrained(checkpoint.folder).eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert json.loads((checkpoint.folder / "tokenizer_config.json").read_text())["add_bos_token"] is False

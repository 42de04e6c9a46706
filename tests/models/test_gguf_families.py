"""Random Llamas and Qwens of Transformers, through a GGUF file and back: the native decoder gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.models.gguf_config import llama3_divisors
from engine.models.gguf_header import GgufTensor
from engine.models.gguf_import import _Planned, _rows, import_gguf
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import VOCAB, SavedModel, save_family
from tests.models.tiny_gguf import HIDDEN, write_reference_gguf, write_tiny_gguf

F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
Q4_0, Q5_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0
PROMPT = random_prompt(40, VOCAB)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def through_gguf(tmp_path: Path, family: str, kind: GGMLQuantizationType = F32, **more: Any) -> tuple[SavedModel, Path]:
    saved = save_family(family, tmp_path / "reference")
    write_reference_gguf(tmp_path / "model.gguf", saved.reference, kind, **more)
    import_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda done, total: None)
    return saved, tmp_path / "model"


def difference(saved: SavedModel, folder: Path) -> float:
    model = PagedModel(folder, block_size=4, num_blocks=40)
    [logits] = model.logits([(make_request(0, PROMPT), len(PROMPT))])
    return float((logits - saved.logits(PROMPT)).abs().max())


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama-tied",
        "llama-mha",
        "llama-wide-heads",
        "llama-biases",
        "qwen2",
        "qwen2-tied",
        "qwen3",
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    saved, folder = through_gguf(tmp_path, family)
    assert difference(saved, folder) < 1e-4


@pytest.mark.parametrize(
    ("kind", "stored", "tolerance"),
    [(F32, "F32", 1e-4), (F16, "F16", 1e-4), (BF16, "BF16", 1e-4), (Q8_0, "F16", 2e-2), (Q5_1, "F16", 2e-2)],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_types_stay_and_what_is_quantised_becomes_float16(
    tmp_path: Path, family: str, kind: GGMLQuantizationType, stored: str, tolerance: float
) -> None:
    saved, folder = through_gguf(tmp_path, family, kind)
    checkpoint = Checkpoint.open(folder)
    types = {name: entry.dtype for shard in checkpoint.shards for name, entry in shard.tensors.items()}
    assert types["model.layers.0.self_attn.q_proj.weight"] == types["lm_head.weight"] == stored
    assert types["model.norm.weight"] == "F32"
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert checkpoint.config["torch_dtype"] == names[stored]
    assert difference(saved, folder) < tolerance


def test_a_chunk_at_a_time_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_family("qwen2", tmp_path / "reference")
    write_reference_gguf(tmp_path / "model.gguf", saved.reference, Q4_0)
    whole = import_gguf(tmp_path / "model.gguf", tmp_path / "whole", lambda done, total: None)
    monkeypatch.setattr("engine.models.gguf_import._CHUNK_VALUES", 200)
    assert import_gguf(tmp_path / "model.gguf", tmp_path / "cut", lambda done, total: None).weights_sha256 == (
        whole.weights_sha256
    )


# Rotary positions ----------------------------------------------------------------------------------------------------


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    saved, folder = through_gguf(tmp_path / "linear", "llama-linear", fields=fields)
    assert difference(saved, folder) < 1e-4
    fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    saved, folder = through_gguf(tmp_path / "yarn", "llama-yarn", fields=fields)
    assert difference(saved, folder) < 1e-4


def test_llama_3_frequencies_become_its_rule(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Heads and base as Llama 3.1's, so that all three ranges of its rule occur.
    parameters = {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=parameters,
        tie_word_embeddings=False,
    )
    reference = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.15)
    divisors = llama3_divisors(LLAMA3, 64, 500_000.0).astype(np.float32)
    assert len(set(divisors.tolist())) > 4
    write_reference_gguf(tmp_path / "model.gguf", reference, extra={"rope_freqs.weight": divisors})
    import_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda done, total: None)
    assert Checkpoint.open(tmp_path / "model").config["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}
    assert difference(SavedModel(tmp_path, reference), tmp_path / "model") < 1e-4


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expert_count": 8}, "a mixture of experts.*expert_count is 8"),
        ({"attention.sliding_window": 8}, "a sliding window.*attention.sliding_window is 8"),
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"attention.value_length": 8}, "attention.value_length is 8"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, "attn_factor is 2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_a_field_that_is_not_imported_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        through_gguf(tmp_path, "llama", fields=fields)
    assert refused.value.kind == "unsupported"
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("extra", ["blk.0.ssm_a.weight", "blk.0.attn_q_norm.weight", "rope_freqs.weight"])
def test_a_tensor_that_is_not_imported_is_named(tmp_path: Path, extra: str) -> None:
    with pytest.raises(ModelLoadError, match=extra) as refused:
        through_gguf(tmp_path, "llama", extra={extra: np.array([1.5, 3.0, 1.0, 2.0], dtype=np.float32)})
    assert refused.value.kind == "unsupported"


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    saved = save_family("qwen3", tmp_path / "reference")
    state = saved.reference.state_dict()
    state.pop("model.layers.1.self_attn.k_norm.weight")
    saved.reference.state_dict = lambda: state  # type: ignore[method-assign]
    write_reference_gguf(tmp_path / "model.gguf", saved.reference)
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.self_attn\.k_norm\.weight") as refused:
        import_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda done, total: None)
    assert refused.value.kind == "damaged"


def test_a_part_of_a_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("output_norm.weight", np.zeros(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"one of the 3 parts.*llama-gguf-split --merge") as refused:
        import_gguf(tmp_path / "m-00001-of-00003.gguf", tmp_path / "model", lambda done, total: None)
    assert refused.value.kind == "unsupported"


@pytest.mark.parametrize("keep", [0, 3, 40, 9000, -1000])
def test_a_file_cut_short_is_damaged(tmp_path: Path, keep: int) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[:keep])
    with pytest.raises(ModelLoadError, match=r"no whole GGUF file") as refused:
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: None)
    assert refused.value.kind == "damaged"
    assert not (tmp_path / "model").exists()


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    saved = save_family("llama", tmp_path / "reference")
    with torch.no_grad():
        saved.reference.model.layers[0].mlp.up_proj.weight[3] = 90_000.0
    write_reference_gguf(tmp_path / "model.gguf", saved.reference, Q8_0)
    with pytest.raises(ModelLoadError, match=r"ffn_up\.weight has values up to 9e\+04"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda done, total: None)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_other_quantisations_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    """Blocks of any bits at all: two programs that read the format must agree on them."""
    from gguf.constants import GGML_QUANT_SIZES
    from transformers.integrations.gguf.dequant import dequantize

    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    data = np.random.default_rng(3).integers(0, 256, (48, 2 * size), dtype=np.uint8)
    shape = (48, 2 * block)
    reference = dequantize(torch.from_numpy(data), int(number)).reshape(shape).numpy()
    tensor = GgufTensor(shape, kind, int(number), 0)
    item = _Planned("blk.0.ffn_up.weight", tensor, data, "up", "F32", 0)
    with np.errstate(invalid="ignore"):
        ours = np.concatenate(list(_rows(item))).reshape(shape)
    same = np.isfinite(reference)
    assert same.mean() > 0.9, "random scales are finite mostly"
    np.testing.assert_allclose(ours[same], reference[same], rtol=1e-5, atol=1e-6 * np.abs(reference[same]).max())

"""What the Transformers library is to compute is looked at before any weight is read: sizes, windows, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from engine.config import EngineConfig
from engine.execution.sizing import plan_memory
from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.models.families import NATIVE, TRANSFORMERS, library_config, outline
from engine.models.transformers_model import inspect_model, window_of
from engine.models.transformers_spec import TransformersSpec
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import VOCAB, large_weights
from tests.models.transformers_families import LIBRARY_FAMILIES, SIZES, save_library_family


def saved_config(name: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    architecture, values = LIBRARY_FAMILIES[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**SIZES, **values, **changes}, architectures=[architecture])
    config.save_pretrained(tmp_path)
    written: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    return written


def test_every_family_of_the_table_is_compared_with_the_library() -> None:
    tested = {architecture for architecture, _ in LIBRARY_FAMILIES.values()}
    assert tested | {"Gemma3ForConditionalGeneration"} == set(TRANSFORMERS)
    assert not set(TRANSFORMERS) & set(NATIVE)


@pytest.mark.parametrize("architecture", TRANSFORMERS)
def test_the_light_table_says_what_the_library_does(architecture: str) -> None:
    family = TRANSFORMERS[architecture]
    kind = getattr(transformers, family.model_class or architecture).config_class
    assert kind.model_type == family.model_type
    defaults = kind()
    assert {name: getattr(defaults, name) for name in family.defaults} == family.defaults


@pytest.mark.parametrize("name", LIBRARY_FAMILIES)
def test_the_outline_without_the_library_is_right(name: str, tmp_path: Path) -> None:
    config = saved_config(name, tmp_path)
    spec, seen = inspect_model(config, torch.float32), outline(config)
    assert (seen.architecture, seen.runner, seen.max_position) == (spec.architecture, "transformers", spec.max_position)
    assert seen.kv_values == sum(layer.values_per_token for layer in spec.layers)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "olmo2", "granite", "gpt-neox", "olmoe"])
def test_the_memory_plan_is_what_the_loaded_model_takes(name: str, tmp_path: Path) -> None:
    save_library_family(name, tmp_path)
    model = PagedModel(tmp_path, block_size=16, num_blocks=9, dtype=torch.bfloat16)
    loaded = model.backend._model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    plan = plan_memory(model.spec, EngineConfig(), 256, 2**33, on_gpu=False)
    assert plan.weight_bytes == sum(parameter.nbytes for parameter in loaded.parameters())
    assert plan.block_bytes == model.backend.kv_bytes_per_block(16)
    assert plan.block_bytes * 10 == sum(storage.nbytes for storage in model.backend._storages())


def test_a_model_s_numbers_are_copies_and_no_views_of_the_files(tmp_path: Path) -> None:
    saved = save_library_family("olmo2", tmp_path)
    model = PagedModel(tmp_path, block_size=16, num_blocks=9)
    prompt = random_prompt(9, VOCAB)
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:  # in place, as a damaged disk would
        file.seek(weights.stat().st_size // 2)
        file.write(b"\xff" * 4096)
    [logits] = model.logits([(make_request(0, prompt), len(prompt))])
    assert float((logits - saved.logits(prompt)).abs().max()) < 1e-4


# The text part of a model that sees ----------------------------------------------------------------------------------


def seeing_gemma(folder: Path) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**SIZES, "head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    text["num_hidden_layers"] = 4
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96)
    torch.manual_seed(1)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    large_weights(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("named", ["as saved", "model.language_model.", "language_model.model."])
def test_of_a_model_with_pictures_the_text_part_runs(named: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = seeing_gemma(tmp_path)
    if named != "as saved":
        path = tmp_path / "model.safetensors"
        stored = load_file(path)
        renamed = {
            re.sub(r"^(model\.language_model|language_model\.model)\.", named, name): stored[name] for name in stored
        }
        assert renamed.keys() != stored.keys() or any(name.startswith(named) for name in stored)
        save_file(renamed, path, metadata={"format": "pt"})
    model = PagedModel(tmp_path, block_size=4, num_blocks=40)
    prompt = [token for token in random_prompt(40, VOCAB) if token != 96]
    [logits] = model.logits([(make_request(0, prompt), len(prompt))])
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert float((logits - expected).abs().max()) < 1e-4
    assert model.spec.architecture == "Gemma3ForConditionalGeneration"


def test_a_text_config_that_leaves_sizes_out_means_the_library_s(tmp_path: Path) -> None:
    """As the published checkpoints of Gemma 3 do."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model"},
        "eos_token_id": [1, 106],
    }
    spec, seen = inspect_model(config, torch.float32), outline(config)
    assert (seen.num_layers, seen.num_kv_heads, seen.head_dim, seen.max_position) == (2, 4, 256, 131_072)
    assert seen.kv_values == sum(layer.values_per_token for layer in spec.layers)


# Positions -----------------------------------------------------------------------------------------------------------


def test_long_rope_ends_where_its_positions_change(tmp_path: Path) -> None:
    spec = inspect_model(saved_config("phi3-longrope", tmp_path), torch.float32)
    assert spec.max_position == 220 and "220 tokens, where LongRoPE" in spec.limit_reason


@pytest.mark.parametrize("name", ["phi3-longrope", "stablelm-dynamic"])
def test_positions_do_not_depend_on_who_shares_the_step(name: str, tmp_path: Path) -> None:
    """Beside a context at the very end of what the model was made for, and after it."""
    saved = save_library_family(name, tmp_path)
    model = PagedModel(tmp_path, block_size=16, num_blocks=60)
    short, again = random_prompt(20, VOCAB), random_prompt(20, VOCAB)
    long = random_prompt(model.spec.max_position, VOCAB)
    beside, _ = model.logits([(make_request(0, short), 20), (make_request(1, long), len(long))])
    [after] = model.logits([(make_request(2, again), 20)])
    for logits in (beside, after):
        assert float((logits - saved.logits(short)).abs().max()) < 1e-4


# What is refused, and before any weight is there ---------------------------------------------------------------------

OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **SIZES}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        "T5ForConditionalGeneration is not supported: it is an encoder-decoder",
    ),
    "pictures": (
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}},
        "LlavaForConditionalGeneration is not supported: it takes pictures or sound",
    ),
    "sound": (
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "audio_config": {}},
        "takes pictures or sound",
    ),
    "mamba": ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM .* state of another"),
    "rwkv": ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "RwkvForCausalLM .* state of another"),
    "hybrid": (
        {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_state": 16},
        "FalconH1ForCausalLM .* state of another",
    ),
    "linear attention": (
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "layer_types": ["linear_attention"]},
        "Qwen3NextForCausalLM .* state of another",
    ),
    "latent attention": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512},
        "DeepseekV3ForCausalLM .*multi-head latent attention",
    ),
    "code": (
        {"architectures": ["BaichuanForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.Baichuan"}},
        "BaichuanForCausalLM .* never runs code of a checkpoint",
    ),
    "gptq": ({**OLMO2, "quantization_config": {"quant_method": "gptq"}}, "quantised .gptq"),
    "awq": ({**OLMO2, "quantization_config": {"quant_method": "awq"}}, "quantised .awq"),
    "bitsandbytes": ({**OLMO2, "quantization_config": {"quant_method": "bitsandbytes"}}, "quantised .bitsandbytes"),
    "quantised inside": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**SIZES, "quantization_config": {"quant_method": "gptq"}},
        },
        "quantised .gptq",
    ),
    "no text part": ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is None"),
    "bidirectional": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            **SIZES,
            "head_dim": 32,
            "use_bidirectional_attention": True,
        },
        "Gemma3ForCausalLM cannot run with paged attention .* its mask",
    ),
    "impossible sizes": ({**OLMO2, "num_attention_heads": "many"}, "config.json: "),
    "no length": ({**OLMO2, "max_position_embeddings": 0}, "max_position_embeddings is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, words = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def never(*_: Any) -> Any:
        raise AssertionError("the weights were touched")

    monkeypatch.setattr(Checkpoint, "tensors", never)
    with pytest.raises(ModelLoadError, match=words):
        Checkpoint.open(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLMO2))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="pickles"):
        Checkpoint.open(tmp_path)


def test_a_checkpoint_with_code_of_its_own_runs_the_library_s(tmp_path: Path) -> None:
    """Published Phi-3 has an ``auto_map``; the code it names is never looked at, nor any other choice of code."""
    saved = save_library_family("phi3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3"}
    config["attn_implementation"] = config["_attn_implementation"] = "somebody/attention"
    config["torch_dtype"] = "float64"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_phi3.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    assert not {"auto_map", "attn_implementation"} & library_config(config).keys()
    prompt = random_prompt(9, VOCAB)
    [logits] = PagedModel(tmp_path, block_size=4, num_blocks=9).logits([(make_request(0, prompt), len(prompt))])
    assert logits.dtype == torch.float32 and float((logits - saved.logits(prompt)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "damaged", "lacks model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "unsupported", "has extra, which Olmo2ForCausalLM"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}), "damaged", "do not fit Olmo2"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            "unsupported",
            "model.norm.weight is stored as I32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, kind: str, words: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_library_family("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=words) as refused:
        PagedModel(tmp_path, block_size=4, num_blocks=9)
    assert refused.value.kind == kind


@pytest.mark.parametrize("window", [1, 2, 8, 255, 256])
def test_the_window_of_a_sliding_mask(window: int) -> None:
    found = window_of(masking_utils.sliding_window_causal_mask_function(window), 256)
    assert found == (None if window == 256 else window)


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masking_utils.chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_a_mask_that_is_no_window_is_noticed(mask: Any) -> None:
    assert isinstance(window_of(mask, 256), str)


def test_an_attention_that_cannot_be_replaced_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2 import modeling_olmo2

    config = saved_config("olmo2", tmp_path)
    plain = modeling_olmo2.Olmo2Attention.forward

    def second_layer_alone(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        return plain(self, hidden_states, *args, **options) if self.layer_idx == 1 else (hidden_states, None)

    monkeypatch.setattr(modeling_olmo2.Olmo2Attention, "forward", second_layer_alone)
    with pytest.raises(ModelLoadError, match=r"1 of its 3 layers call the attention that can be replaced"):
        inspect_model(config, torch.float32)


def test_the_library_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    config = saved_config("olmo2", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelLoadError, match="pip install transformers") as refused:
        inspect_model(config, torch.float32)
    assert refused.value.kind == "other"


def test_a_spec_is_plain_data(tmp_path: Path) -> None:
    config = saved_config("gemma3", tmp_path)
    spec = inspect_model(config, torch.float32)
    assert isinstance(spec, TransformersSpec) and spec.library == f"Transformers {transformers.__version__}"
    assert [layer.window for layer in spec.layers] == [8, None, 8]
    other = inspect_model({**config, "sliding_window": 9}, torch.float32)
    assert other.fingerprint() != spec.fingerprint()

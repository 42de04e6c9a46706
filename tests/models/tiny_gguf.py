"""Tiny models as llama.cpp's converter would write them: a Llama with q and k with their rows in its order, Q4_1 and
Q8_0 weights; and whatever random Llama or Qwen Transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("Ġt", "Ġth", "Ġthe", "he", "hel")
MERGES = ("Ġ t", "Ġt h", "Ġth e", "h e", "he l")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

Array = npt.NDArray[np.float32]


def byte_characters() -> list[str]:
    """GPT-2's 256 characters for bytes, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


TOKENS = [*CONTROL, *byte_characters(), *WORDS]


def as_converter_permutes(weight: Array, heads: int) -> Array:
    """The order of rows that llama.cpp's converter gives q and k: within a head, row i beside row i + d/2."""
    rows = []
    for head in np.split(weight, heads):
        half = len(head) // 2
        for index in range(half):
            rows += [head[index], head[index + half]]
    return np.stack(rows)


def write_tiny_gguf(
    path: Path, tied: bool = True, pre: str = "smollm", architecture: str = "llama"
) -> dict[str, Array]:
    """Write the file; the weights that an import must give, under their safetensors names."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    expected: dict[str, Array] = {}

    def put(stored: str, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, heads: int = 0) -> None:
        # Quantised first, so that what is expected is exactly what the file can hold.
        data = quantize(random.standard_normal(shape, dtype=np.float32), kind)
        expected[name] = np.ascontiguousarray(dequantize(data, kind), dtype=np.float32)
        if heads:
            data = quantize(as_converter_permutes(expected[name], heads), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)

    q4, q8, f32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
    put("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN), q8)
    for layer in range(LAYERS):
        stored, name = f"blk.{layer}", f"model.layers.{layer}"
        put(f"{stored}.attn_norm.weight", f"{name}.input_layernorm.weight", (HIDDEN,), f32)
        put(f"{stored}.attn_q.weight", f"{name}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN), q4, HEADS)
        put(f"{stored}.attn_k.weight", f"{name}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), q4, KV_HEADS)
        put(f"{stored}.attn_v.weight", f"{name}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), q4)
        put(f"{stored}.attn_output.weight", f"{name}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), q4)
        put(f"{stored}.ffn_norm.weight", f"{name}.post_attention_layernorm.weight", (HIDDEN,), f32)
        put(f"{stored}.ffn_gate.weight", f"{name}.mlp.gate_proj.weight", (INNER, HIDDEN), q4)
        put(f"{stored}.ffn_up.weight", f"{name}.mlp.up_proj.weight", (INNER, HIDDEN), q4)
        put(f"{stored}.ffn_down.weight", f"{name}.mlp.down_proj.weight", (HIDDEN, INNER), q4)
    put("output_norm.weight", "model.norm.weight", (HIDDEN,), f32)
    if not tied:
        put("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN), q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


STORED_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` → ``blk.3.attn_q.weight``."""
    name, _, kind = name.rpartition(".")
    if not name.startswith("model.layers."):
        return f"{STORED_NAMES[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{STORED_NAMES[part]}.{kind}"


def write_reference_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    fields: dict[str, Any] | None = None,
    extra: dict[str, Array] | None = None,
) -> None:
    """A Transformers model as the converter writes it, its matrices as ``kind``; the weights in ``model`` become what
    the file can hold. ``fields``: more of the architecture's own; ``extra``: more tensors."""
    import torch

    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // 4)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in (fields or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{config.model_type}.{name}", value)
    add_tiny_tokenizer(writer, size=config.vocab_size)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        data = quantize(values, stored)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(dequantize(data, stored), dtype=np.float32)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and config.model_type == "llama":
            data = quantize(as_converter_permutes(parameter.numpy(), heads), stored)
        writer.add_tensor(stored_name(name), data, raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tiny_tokenizer(writer: GGUFWriter, size: int) -> None:
    """Of ``size`` tokens; some letters may have none."""
    tokens = [*CONTROL, *byte_characters()][:size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges([])
    writer.add_eos_token_id(2)

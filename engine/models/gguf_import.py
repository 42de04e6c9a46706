"""A Llama in a GGUF file, written out once as an ordinary safetensors checkpoint.

The weights are dequantised to float32, which holds a four-bit value times its scale plus its offset as Transformers and
llama.cpp compute it. They are written one tensor at a time, so that the import needs little more memory than the
largest of them.

llama.cpp rotates neighbouring pairs (2i, 2i + 1) and stores the rows of q and k so that this fits; the decoder rotates
halves (i, i + d/2). Per head of d rows::

    in the file     0    d/2   1   d/2+1   2  …        row 2i is i, row 2i + 1 is i + d/2
    written out     0    1     2   …      d/2  d/2+1 …
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of a control token."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    folder: Path
    weights: Path
    weights_sha256: str


def import_gguf(source: Path, folder: Path, progress: Callable[[int, int], None]) -> ImportedModel:
    """Write the checkpoint of ``source`` into ``folder`` (made here). ``progress``: bytes written, bytes in all.

    Raises :class:`ModelLoadError` where the file is not a Llama with a byte-level tokenizer of SmolLM's kind.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelLoadError(
            f"{source.name} holds the architecture {fields.get('general.architecture')!r}; only llama is imported.",
            "unsupported",
        )
    config = _config(fields)
    folder.mkdir(parents=True)
    config["tie_word_embeddings"] = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    weights = folder / "model.safetensors"
    digest = _write_weights(reader, weights, config, progress)
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", _tokenizer_config(fields)),
    ):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return ImportedModel(folder, weights, digest)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields.get("llama.vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # The file has a float32; its shortest decimal is what the number was before (1e-05).
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _write_weights(reader: GGUFReader, path: Path, config: dict[str, Any], progress: Callable[[int, int], None]) -> str:
    """Write the safetensors file tensor by tensor and return its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for tensor in reader.tensors:
        size = int(np.prod(tensor.shape)) * 4
        # GGUF lists the fastest dimension first.
        shape = [int(length) for length in reversed(tensor.shape)]
        header[_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [total, total + size]}
        total += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    written = 0
    with path.open("wb") as file:
        for prefix in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(prefix)
            file.write(prefix)
        for tensor in reader.tensors:
            data = _float32(tensor, config).data.cast("B")
            digest.update(data)
            file.write(data)
            written += len(data)
            progress(written, total)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _float32(tensor: ReaderTensor, config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The weights of one tensor as the decoder wants them: float32, contiguous, halves instead of pairs."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"] if part == "attn_q" else config["num_key_value_heads"]
        values = halves_from_pairs(values, heads)
    return np.ascontiguousarray(values, dtype=np.float32)


def halves_from_pairs(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of q or k [num_heads · d, columns] (diagram above)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[-2] not in _TENSOR_NAMES:
        raise ModelLoadError(f"The GGUF file has the tensor {name}, which Batchscope does not know.", "unsupported")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{_TENSOR_NAMES[parts[-2]]}.{parts[-1]}"


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """SmolLM's tokenizer: byte-level BPE, every digit a token of its own."""
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelLoadError(
            f"The GGUF file's tokenizer is {kind}; only ('gpt2', 'smollm') is imported.", "unsupported"
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[f"{name}_token"] = tokens[number]
    config["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    config["clean_up_tokenization_spaces"] = False
    config["model_max_length"] = fields["llama.context_length"]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config

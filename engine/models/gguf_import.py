"""A Llama or Qwen in a GGUF file, written out as an ordinary safetensors checkpoint.

What the file has as float32, float16 or bfloat16 stays that. What is quantised becomes float16: of the halves it keeps
most of a value (a scale of 11 bits times a few), and rounding to 11 bits is far below the step of any quantisation,
while float32 would take twice the disk. Weights are written a few rows at a time, so that the import needs little
memory.

llama.cpp rotates neighbouring pairs (2i, 2i + 1) in the architecture ``llama`` and stores the rows of q and k so that
this fits; the decoder rotates halves (i, i + d/2), as llama.cpp itself does for Qwen. Per head of d rows::

    in the file     0    d/2   1   d/2+1   2  …        row 2i is i, row 2i + 1 is i + d/2
    written out     0    1     2   …      d/2  d/2+1 …
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.models.architecture import expected_tensors, spec_from_config
from engine.models.errors import ModelLoadError
from engine.models.gguf_config import config_of
from engine.models.gguf_header import IMPORTED_BYTES, GgufHeader, GgufTensor, imported_type, read_gguf_header
from engine.models.gguf_tokenizer import ends_of_answer, token_id, tokenizer_config_of, tokenizer_of

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"
"""Not a weight of the decoder: it says how rotary positions are scaled."""
_CHUNK_VALUES = 1 << 23
"""Values of a tensor that are in memory at once, beside the file's own pages."""
_NUMPY_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int], None]
"""Bytes written, bytes in all."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    folder: Path
    weights: Path
    weights_sha256: str


def import_gguf(source: Path, folder: Path, progress: Progress, *, quantised: str = "F16") -> ImportedModel:
    """Write the checkpoint of ``source`` into ``folder`` (made here). ``quantised``: the safetensors type of what the
    file has quantised.

    Raises :class:`ModelLoadError`: ``unsupported`` names the architecture, the field, the tokenizer or the tensor that
    is not imported, ``damaged`` what the file lacks.
    """
    header = read_gguf_header(source, lists=True)
    _refuse_part(source, header)
    fields, shapes = header.fields, {name: tensor.shape for name, tensor in header.tensors.items()}
    divisors = None
    if shapes.pop(_FREQUENCIES, None) is not None:
        divisors = _mapped(source, header, _FREQUENCIES).view(np.float32).reshape(-1)
    config = config_of(fields, shapes, divisors)
    plan = [_Planned.of(source, header, name, config, quantised) for name in shapes]
    _refuse_overlaps(source, header, plan)
    _check(plan, config)
    config |= _special_ids(fields)
    most = max(("F32", "F16", "BF16"), key=lambda kind: sum(item.num_bytes for item in plan if item.dtype == kind))
    config["torch_dtype"] = _TORCH_NAMES[most]
    tokenizer = tokenizer_of(fields)
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    digest = _write_weights(plan, weights, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config_of(fields, config["max_position_embeddings"])),
    ):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return ImportedModel(folder, weights, digest)


def _refuse_part(source: Path, header: GgufHeader) -> None:
    if header.num_parts > 1:
        raise ModelLoadError(
            f"{source.name} is one of the {header.num_parts} parts of a model; join them first "
            "(llama-gguf-split --merge FIRST-PART WHOLE.gguf).",
            "unsupported",
        )


def _refuse_overlaps(source: Path, header: GgufHeader, plan: list[_Planned]) -> None:
    end = 0
    for item in sorted(plan, key=lambda item: item.tensor.offset):
        if item.tensor.offset < end or item.tensor.offset % header.alignment:
            raise ModelLoadError(
                f"{source} contradicts itself: {item.stored} begins at byte {item.tensor.offset:,} of the tensors, "
                "within another or beside the file's grid; download it again.",
                "damaged",
            )
        end = item.tensor.offset + item.data.nbytes


def _mapped(source: Path, header: GgufHeader, name: str) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, mapped from the file: uint8, a row of the tensor in each row."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    tensor = header.tensors[name]
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.number)]
    except (ValueError, KeyError) as error:
        raise _unknown_type(name, tensor) from error
    *rows, columns = tensor.shape
    begin, width = header.data_begin + tensor.offset, columns // block * size
    shape = (math.prod(rows), width)
    if columns % block or begin + math.prod(shape) > source.stat().st_size:
        raise ModelLoadError(
            f"{source} is no whole GGUF file: {name} is not all there. It was cut short or changed; download it again.",
            "damaged",
        )
    # A plain view of the mapping: slices of it cost less.
    return np.memmap(source, dtype=np.uint8, mode="r", offset=begin, shape=shape).view(np.ndarray)


def _unknown_type(name: str, tensor: GgufTensor) -> ModelLoadError:
    return ModelLoadError(
        f"The GGUF file's tensor {name} is stored as {tensor.type}, which is not imported. Take the model as Q8_0, "
        "Q6_K, Q4_K or F16, where there is one.",
        "unsupported",
    )


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    ends = ends_of_answer(fields)
    return {
        "bos_token_id": token_id(fields, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token_id(fields, "padding"),
    }


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor as it will be written."""

    stored: str
    """Its name in the file."""
    tensor: GgufTensor
    data: npt.NDArray[np.uint8]
    name: str
    dtype: str
    """As safetensors names it."""
    heads: int
    """Of a tensor whose rows are in pairs; 0: they are as they should be."""

    @classmethod
    def of(cls, source: Path, header: GgufHeader, stored: str, config: dict[str, Any], quantised: str) -> _Planned:
        tensor, heads = header.tensors[stored], 0
        part = stored.split(".")[-2:-1]
        if header.architecture == "llama" and part in (["attn_q"], ["attn_k"]):
            heads = config["num_attention_heads" if part == ["attn_q"] else "num_key_value_heads"]
        dtype = imported_type(tensor.type, quantised)
        return cls(stored, tensor, _mapped(source, header, stored), _name(stored), dtype, heads)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * IMPORTED_BYTES[self.dtype]


def _check(plan: list[_Planned], config: dict[str, Any]) -> None:
    """Whether the decoder that ``config`` describes has these tensors, before gigabytes are written."""
    expected = expected_tensors(spec_from_config(config, torch.float32))
    found = {item.name: item for item in plan}
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelLoadError(
            f"The GGUF file lacks {missing[0]} and {len(missing) - 1} more tensors, which {config['architectures'][0]} "
            "needs; download it again.",
            "damaged",
        )
    for name, item in found.items():
        if name not in expected:
            raise ModelLoadError(
                f"The GGUF file has the tensor {item.stored}, which {config['architectures'][0]} does not use; "
                "the answers would be wrong.",
                "unsupported",
            )
        if item.shape != expected[name]:
            raise ModelLoadError(
                f"The GGUF file's tensor {item.stored} has the shape {list(item.shape)}; its fields ask for "
                f"{list(expected[name])}.",
                "damaged",
            )


def _write_weights(plan: list[_Planned], path: Path, progress: Progress) -> str:
    """Write the safetensors file and return its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for item in plan:
        end = total + item.num_bytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [total, end]}
        total = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    written = 0
    with path.open("wb") as file:
        for prefix in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(prefix)
            file.write(prefix)
        for item in plan:
            for values in _rows(item):
                data = np.ascontiguousarray(values).data.cast("B")
                digest.update(data)
                file.write(data)
                written += len(data)
                progress(written, total)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _rows(item: _Planned) -> Iterator[npt.NDArray[Any]]:
    """The values as they are written, some rows at a time; bfloat16 as its bits."""
    step = max(1, _CHUNK_VALUES * len(item.data) // math.prod(item.shape))
    parts = (_converted(item, item.data[begin : begin + step]) for begin in range(0, len(item.data), step))
    if item.heads:
        yield halves_from_pairs(np.concatenate(list(parts)).reshape(item.shape), item.heads)
    else:
        yield from parts


def _converted(item: _Planned, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The values of these rows, end to end."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if item.tensor.type == item.dtype:
        return rows.reshape(-1).view(_NUMPY_TYPES[item.dtype])
    try:
        # As one row: blocks lie end to end, and the library goes through rows one handful after the other.
        values = dequantize(rows.reshape(-1), GGMLQuantizationType(item.tensor.number))
    except NotImplementedError as error:
        raise _unknown_type(item.stored, item.tensor) from error
    if item.dtype == "F32":
        return np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ModelLoadError(
            f"The GGUF file's tensor {item.stored} has values up to {np.abs(values).max():.3g}, which float16 does not "
            "hold.",
            "unsupported",
        )
    return halves


def halves_from_pairs(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's order of the rows of q or k [num_heads · d, …] (diagram above)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-2] not in _TENSOR_NAMES:
        raise ModelLoadError(f"The GGUF file has the tensor {name}, which Batchscope does not know.", "unsupported")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{_TENSOR_NAMES[parts[-2]]}.{parts[-1]}"

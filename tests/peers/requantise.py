"""The same weights in Q8_0, which some peers are faster in: ``python -m tests.peers.requantise IN.gguf OUT.gguf``."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

MADE_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def requantise(source: Path, target: Path) -> None:
    """Write the weights of ``source`` to ``target``: in Q8_0 those that are quantised, the others as they are."""
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None, f"{source} names no architecture"
    writer = GGUFWriter(target, architecture.contents())
    for name, field in reader.fields.items():
        if not name.startswith(MADE_BY_THE_WRITER):
            of_items = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0):
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        else:
            values = dequantize(np.asarray(tensor.data), tensor.tensor_type)
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    requantise(arguments.source, arguments.target)

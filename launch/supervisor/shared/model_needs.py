"""How much memory a model needs, computed from its config and the headers of its files.

Called after poise-loader has checked the directory, so nothing is checked again here.
"""

import json
import os
import struct

from .decoder_shape import decoder_shape

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PACKED = {"int8": 1, "int4": 0.5}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _headers(model):
    for entry in sorted(os.listdir(model)):
        if entry.endswith(".safetensors"):
            with open(os.path.join(model, entry), "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            yield from header.values()


def stored_elements(model):
    """(elements, dtype most of them have) of the checkpoint."""
    counts = {}
    for tensor in _headers(model):
        elements = 1
        for extent in tensor["shape"]:
            elements *= extent
        counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + elements
    most = max(counts, key=counts.get)
    return sum(counts.values()), _STORED.get(most, "float32")


def elements_of_shape(shape):
    """Elements of a model that has no weight files: its matrices, which are nearly all of it."""
    return shape.layers * shape.layer_entries() + shape.head_entries() + shape.positions * shape.hidden


def needs(model, dtype, load_format, quantization):
    """(dtype, bytes of weights, bytes of KV a token, bytes of ACT a token)."""
    with open(os.path.join(model, "config.json"), "rb") as file:
        config = json.load(file)
    shape = decoder_shape(config)
    if load_format == "dummy":
        elements = elements_of_shape(shape)
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    else:
        elements, stored = stored_elements(model)
    kept = stored if dtype == "auto" else dtype
    width = _BYTES.get(kept, 4)
    weights = elements * width
    if quantization in _PACKED:  # a scale for each group of 128
        weights -= round(shape.layers * shape.layer_entries() * (width - _PACKED[quantization] - width / 128))
    return kept, weights, 2 * shape.layers * shape.kv_dim * width, shape.layers * shape.hidden * width

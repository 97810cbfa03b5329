"""How much memory a model needs, computed from its config and the headers of its files.

Called after poise-loader has checked the directory, so nothing is checked again here.
"""

import json
import os
import struct

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
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


def elements_of_shape(config):
    """Elements of a model that has no weight files: the matrices of an OPT decoder, which are nearly all of it."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = 4 * hidden * hidden + 2 * hidden * config.get("ffn_dim", 4 * hidden)
    words = config["vocab_size"] * config.get("word_embed_proj_dim", hidden)
    return layers * layer + words + config.get("max_position_embeddings", 2048) * hidden


def needs(model, dtype, load_format):
    """(dtype, bytes of weights, bytes of KV a token, bytes of ACT a token)."""
    with open(os.path.join(model, "config.json"), "rb") as file:
        config = json.load(file)
    if load_format == "dummy":
        elements = elements_of_shape(config)
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    else:
        elements, stored = stored_elements(model)
    kept = stored if dtype == "auto" else dtype
    width = _BYTES.get(kept, 4)
    act = config["num_hidden_layers"] * config["hidden_size"] * width
    return kept, elements * width, 2 * act, act

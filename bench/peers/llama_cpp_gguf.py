#!/usr/bin/env python3
"""A GGUF file of Llama-3-70B's shape with random 4-bit codes (Q4_0), for llama.cpp beside poise on the same work.

llama.cpp has no dummy weights, so the file is written whole (37 GiB) by several processes; best on /dev/shm. `--tiny` writes a small
one, which shows on any machine that a build of llama.cpp reads such files. bench/README.md says how llama.cpp is built and measured.

    bench/peers/llama_cpp_gguf.py /dev/shm/model.gguf [--tiny]
"""

import argparse
import multiprocessing
import os
import pathlib
import struct

FLOAT32, Q4_0 = 0, 2  # GGUF's numbers of these types
VALUES = 32  # of a block of Q4_0: a float16 scale and sixteen bytes of codes
BLOCK_BYTES = 18
ALIGNMENT = 32
HEAD_DIM = 128
SCALE = struct.pack("<e", 0.01)


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def fact(key, value):
    kinds = {int: (4, "<I"), float: (6, "<f")}
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    kind, form = kinds[type(value)]
    return text(key) + struct.pack("<I", kind) + struct.pack(form, value)


def facts(shape):
    return [
        fact("general.architecture", "llama"), fact("general.file_type", 2), fact("tokenizer.ggml.model", "no_vocab"),
        fact("llama.block_count", shape["layers"]), fact("llama.context_length", 8192),
        fact("llama.embedding_length", shape["hidden"]), fact("llama.feed_forward_length", shape["ffn"]),
        fact("llama.attention.head_count", shape["hidden"] // HEAD_DIM), fact("llama.attention.head_count_kv", shape["kv_heads"]),
        fact("llama.attention.layer_norm_rms_epsilon", 1e-5), fact("llama.rope.freq_base", 500000.0),
        fact("llama.rope.dimension_count", HEAD_DIM), fact("llama.vocab_size", shape["vocab"]),
    ]  # fmt: skip


def tensors(shape):
    """(name, sizes with the innermost first, type) of each."""
    hidden, ffn, kv = shape["hidden"], shape["ffn"], shape["kv_heads"] * HEAD_DIM
    yield "token_embd.weight", (hidden, shape["vocab"]), Q4_0
    yield "output_norm.weight", (hidden,), FLOAT32
    yield "output.weight", (hidden, shape["vocab"]), Q4_0
    matrices = {
        "attn_q": (hidden, hidden), "attn_k": (hidden, kv), "attn_v": (hidden, kv), "attn_output": (hidden, hidden),
        "ffn_gate": (hidden, ffn), "ffn_up": (hidden, ffn), "ffn_down": (ffn, hidden),
    }  # fmt: skip
    for layer in range(shape["layers"]):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (hidden,), FLOAT32
        for name, sizes in matrices.items():
            yield f"blk.{layer}.{name}.weight", sizes, Q4_0


def byte_count(sizes, kind):
    count = 1
    for size in sizes:
        count *= size
    return 4 * count if kind == FLOAT32 else count // VALUES * BLOCK_BYTES


def aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_tensor(work):
    path, at, size, kind = work
    noise = os.urandom(16 << 16)
    codes = b"".join(SCALE + noise[i : i + 16] for i in range(0, len(noise), 16))
    ones = struct.pack("<f", 1.0) * (size // 4) if kind == FLOAT32 else b""
    with open(path, "r+b", buffering=0) as file:
        while size > 0:
            written = os.pwrite(file.fileno(), (ones or codes)[:size], at)
            at, size = at + written, size - written


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("file", type=pathlib.Path)
    options.add_argument("--tiny", action="store_true")
    chosen = options.parse_args()
    shape = {"layers": 80, "hidden": 8192, "ffn": 28672, "kv_heads": 8, "vocab": 128256}
    if chosen.tiny:
        shape = {"layers": 2, "hidden": 256, "ffn": 512, "kv_heads": 1, "vocab": 512}
    all_facts, all_tensors = facts(shape), list(tensors(shape))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(all_tensors), len(all_facts)) + b"".join(all_facts)
    at, places = 0, []
    for name, sizes, kind in all_tensors:
        head += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at)
        places.append(at)
        at += aligned(byte_count(sizes, kind))
    head += bytes(aligned(len(head)) - len(head))
    with chosen.file.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + at)
    with multiprocessing.Pool() as pool:
        pool.map(write_tensor, [(chosen.file, len(head) + place, byte_count(sizes, kind), kind)
                                for place, (_, sizes, kind) in zip(places, all_tensors)], chunksize=1)  # fmt: skip
    print(f"{chosen.file}: {(len(head) + at) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()

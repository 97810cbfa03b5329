#!/usr/bin/env python3
"""Broken model directories: each ends in one sentence and exit code 2.

Every case takes a sound tiny OPT model and breaks one thing of it; each is a test, seen twice. `poise-loader
--validate-only` refuses it within two seconds of a core (--within SECONDS for other builds) with one line that
holds the words given here; and so does `poise run` as a whole. A few sound directories, of the forms HuggingFace
writes, must pass the first.
"""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import harness
from harness import expect

LAYERS, HIDDEN, FFN, HEADS, VOCAB, POSITIONS = 2, 16, 24, 2, 31, 20

CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_dim": FFN,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "word_embed_proj_dim": HIDDEN,
    "torch_dtype": "float32",
}


# ---- a sound model, and the pieces to break


def shapes():
    yield "model.decoder.embed_tokens.weight", [VOCAB, HIDDEN]
    yield "model.decoder.embed_positions.weight", [POSITIONS + 2, HIDDEN]
    yield from norm("model.decoder.final_layer_norm")
    for layer in range(LAYERS):
        prefix = f"model.decoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{prefix}self_attn.{name}", HIDDEN, HIDDEN)
        yield from norm(prefix + "self_attn_layer_norm")
        yield from norm(prefix + "final_layer_norm")
        yield from linear(prefix + "fc1", FFN, HIDDEN)
        yield from linear(prefix + "fc2", HIDDEN, FFN)


def linear(name, rows, cols):
    return [(name + ".weight", [rows, cols]), (name + ".bias", [rows])]


def norm(name):
    return [(name + ".weight", [HIDDEN]), (name + ".bias", [HIDDEN])]


def sound_tensors():
    """Name to (dtype, shape, bytes)."""
    tensors = {}
    for name, shape in shapes():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = ("F32", shape, struct.pack(f"<{count}f", *[0.01] * count))
    return tensors


def header_of(tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return header


def file_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def data_of(tensors):
    return b"".join(data for _, _, data in tensors.values())


def safetensors(tensors):
    return file_bytes(header_of(tensors), data_of(tensors))


def write_sound(directory, config=None, tensors=None):
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "model.safetensors").write_bytes(safetensors(tensors or sound_tensors()))


# ---- ways to break it: each returns what to do with an empty directory


def config(**changes):
    def make(directory):
        write_sound(directory, {k: v for k, v in {**CONFIG, **changes}.items() if v is not REMOVED})

    return make


def config_text(text):
    def make(directory):
        write_sound(directory)
        (directory / "config.json").write_bytes(text)

    return make


def tensors(change):
    """`change` may alter the dictionary of tensors before the file is written."""

    def make(directory):
        changed = sound_tensors()
        change(changed)
        write_sound(directory, tensors=changed)

    return make


def header(change):
    """`change` may alter the header, or return another; the tensors' bytes stay as they were."""

    def make(directory):
        write_sound(directory)
        whole = sound_tensors()
        made = header_of(whole)
        made = change(made) or made
        (directory / "model.safetensors").write_bytes(file_bytes(made, data_of(whole)))

    return make


def weights(raw):
    def make(directory):
        write_sound(directory)
        (directory / "model.safetensors").write_bytes(raw)

    return make


def cut(keep):
    def make(directory):
        write_sound(directory)
        whole = (directory / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(whole[: keep(len(whole))])

    return make


def sharded(change=lambda files, weight_map: None, index=None):
    """Two shards and their index; `change` may alter both before they are written, `index` replaces its text."""

    def make(directory):
        write_sound(directory)
        (directory / "model.safetensors").unlink()
        files, weight_map = {"a.safetensors": {}, "b.safetensors": {}}, {}
        for number, (name, tensor) in enumerate(sound_tensors().items()):
            file = sorted(files)[number % 2]
            files[file][name] = tensor
            weight_map[name] = file
        change(files, weight_map)
        for file, contents in files.items():
            (directory / file).write_bytes(safetensors(contents))
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
        (directory / "model.safetensors.index.json").write_bytes(text if index is None else index)

    return make


def special(name, place):
    """The file `name` is replaced by what `place` puts there."""

    def make(directory):
        write_sound(directory)
        (directory / name).unlink()
        place(directory / name)

    return make


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False}


def gptq_tensors():
    """The matrices as GPTQ packs them, eight inputs of four bits in a word; all codes are 0."""
    made = {}
    for name, (dtype, shape, data) in sound_tensors().items():
        if len(shape) == 1 or "embed" in name:
            made[name] = (dtype, shape, data)
            continue
        (rows, cols), module = shape, name.removesuffix(".weight")
        made[module + ".qweight"] = ("I32", [cols // 8, rows], bytes(cols // 8 * rows * 4))
        made[module + ".qzeros"] = ("I32", [cols // 8, rows // 8], bytes(cols // 8 * (rows // 8) * 4))
        made[module + ".scales"] = ("F16", [cols // 8, rows], bytes(cols // 8 * rows * 2))
        made[module + ".g_idx"] = ("I32", [cols], struct.pack(f"<{cols}i", *(k // 8 for k in range(cols))))
    return made


def gptq(change=lambda made: None, **changes):
    """`change` may alter the packed tensors; the other arguments change the config's "quantization_config"."""

    def make(directory):
        made = gptq_tensors()
        change(made)
        write_sound(directory, {**CONFIG, "quantization_config": {**GPTQ, **changes}}, made)

    return make


def packed(quantization, pack):
    """A maker of models whose matrices `pack(rows, cols)` cuts into parts; it takes what `gptq` takes."""

    def made_with(change=lambda made: None, **changes):
        def make(directory):
            made = {}
            for name, (dtype, shape, data) in sound_tensors().items():
                if len(shape) == 1 or "embed" in name:
                    made[name] = (dtype, shape, data)
                    continue
                for part, (dtype, shape, bytes_each) in pack(*shape).items():
                    made[f"{name.removesuffix('.weight')}.{part}"] = (dtype, shape, bytes(shape[0] * shape[1] * bytes_each))
            change(made)
            write_sound(directory, {**CONFIG, "quantization_config": {**quantization, **changes}}, made)

        return make

    return made_with


awq = packed(
    {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True},
    lambda rows, cols: {
        "qweight": ("I32", [cols, rows // 8], 4),
        "qzeros": ("I32", [cols // 8, rows // 8], 4),
        "scales": ("F16", [cols // 8, rows], 2),
    },
)
fp8 = packed(
    {"quant_method": "fp8", "weight_block_size": [8, 8]},
    lambda rows, cols: {"weight": ("F8_E4M3", [rows, cols], 1), "weight_scale_inv": ("F32", [rows // 8, cols // 8], 4)},
)


def part_of(part, dtype, shape):
    """That part of one matrix has another type or shape."""
    size = {"I32": 4, "F32": 4, "F16": 2, "I8": 1, "F8_E4M3": 1}[dtype]

    def change(made):
        count = 1
        for width in shape:
            count *= width
        made[f"model.decoder.layers.1.fc1.{part}"] = (dtype, shape, bytes(count * size))

    return change


def without(part):
    return lambda made: made.pop(f"model.decoder.layers.1.fc1.{part}")


def group_of_an_input(group):
    def change(made):
        name = "model.decoder.layers.1.fc1.g_idx"
        made[name] = ("I32", [HIDDEN], struct.pack(f"<{HIDDEN}i", *[0] * (HIDDEN - 1), group))

    return change


def wrong_words(made):
    made["model.decoder.layers.1.fc1.qweight"] = ("I32", [4, FFN], bytes(4 * FFN * 4))


def compressed(form="pack-quantized", weights=None, **others):
    """A config that asks for compressed-tensors; it is refused before the tensors are looked at."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, **(weights or {})}}
    asked = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **others}
    return config(quantization_config=asked)


REMOVED = object()
SOME = "model.decoder.layers.1.fc1.weight"
SINKS = "model.decoder.layers.1.self_attn.sinks"


def edit(name, **fields):
    def change(made):
        entry = made[name]
        entry.update(fields)
        for field in [field for field, value in entry.items() if value is REMOVED]:
            del entry[field]

    return change


def duplicate_key(made):
    text = json.dumps(made)
    entry = json.dumps(made[SOME])
    return f'{text[:-1]}, "{SOME}": {entry}}}'.encode()


def shifted(by):
    def change(made):
        begin, end = made[SOME]["data_offsets"]
        made[SOME]["data_offsets"] = [begin + by, end + by]

    return change


def listen(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def in_both(files, weight_map):
    for contents in files.values():
        contents[FIRST] = sound_tensors()[FIRST]


def without_weights(directory):
    write_sound(directory)
    (directory / "model.safetensors").unlink()


def pickles_only(directory):
    without_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"x")


def broken_generation_config(directory):
    write_sound(directory)
    (directory / "generation_config.json").write_text("{")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def many_tensors(count):
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return file_bytes({str(number): empty for number in range(count)})


FIRST = next(shapes())[0]

HOSTILE = [
    # config.json
    ("config: empty", config_text(b""), "not valid JSON"),
    ("config: cut short", config_text(b'{"model_type": "opt", '), "not valid JSON"),
    ("config: a list", config_text(b"[]"), "a JSON object is needed, not a list"),
    ("config: NaN", config_text(b'{"model_type": "opt", "hidden_size": NaN}'), "not valid JSON"),
    ("config: a name twice", config_text(b'{"vocab_size": 1, "vocab_size": 2}'), "appears twice"),
    ("config: invalid UTF-8", config_text(b'{"model_type": "\xff"}'), "ill-formed UTF-8"),
    ("config: a million deep", config_text(b"[" * 1_000_000), "more than 32 deep"),
    ("config: too large", config_text(b" " * (5 << 20)), "at most 4194304 are read"),
    ("config: no architecture", config_text(b"{}"), 'neither "architectures" nor "model_type"'),
    ("config: another family", config(architectures=["BloomForCausalLM"], model_type="bloom"), "BloomForCausalLM is not"),
    ("config: the family of other weights", config(architectures=["LlamaForCausalLM"], model_type="llama"), "not those of a model of type llama"),
    ("config: another class", config(architectures=["OPTForQuestionAnswering"]), "OPTForQuestionAnswering is not"),
    ("config: family without class", config(architectures=REMOVED, model_type="bloom"), "model_type bloom is not"),
    ("config: remote code of another family", config(architectures=["X"], model_type="x", auto_map={}), "X is not"),
    ("config: layers 0", config(num_hidden_layers=0), '"num_hidden_layers" must be an integer from 1'),
    ("config: layers a billion", config(num_hidden_layers=10**9), "not 1000000000"),
    ("config: layers -1", config(num_hidden_layers=-1), "not -1"),
    ("config: layers 1.5", config(num_hidden_layers=1.5), "not 1.5"),
    ("config: layers a string", config(num_hidden_layers="2"), 'not "2"'),
    ("config: layers true", config(num_hidden_layers=True), "not true"),
    ("config: layers 2**64", config(num_hidden_layers=2**64), '"num_hidden_layers" must be'),
    ("config: heads do not divide", config(num_attention_heads=3), "3 attention heads"),
    ("config: heads 0", config(num_attention_heads=0), '"num_attention_heads" must be'),
    ("config: hidden huge", config(hidden_size=2**31), '"hidden_size" must be'),
    ("config: ffn 0", config(ffn_dim=0), '"ffn_dim" must be'),
    ("config: vocabulary 0", config(vocab_size=0), '"vocab_size" must be'),
    ("config: vocabulary not the table's", config(vocab_size=VOCAB + 1), "config.json asks for [32, 16]"),
    ("config: positions negative", config(max_position_embeddings=-5), '"max_position_embeddings" must be'),
    ("config: positions not the table's", config(max_position_embeddings=64), "asks for [66, 16]"),
    ("config: unknown activation", config(activation_function="swiglu"), 'is "swiglu"; supported are relu'),
    ("config: a switch as number", config(do_layer_norm_before=1), "must be true or false, not 1"),
    ("config: unknown dtype", config(torch_dtype="int4"), 'not "int4"'),
    ("config: quantised by a method without a name", config(quantization_config={"bits": 4}), "supported are gptq, awq"),
    ("quantised: by bitsandbytes", config(quantization_config={"quant_method": "bitsandbytes"}), 'is "bitsandbytes": supported'),
    ("quantised: 3 bits", gptq(bits=3), "is 3: 4 and 8 bits are supported"),
    ("quantised: codes that contradict the bits", gptq(bits=8), "has shape [2, 16], but config.json asks for [4, 16]"),
    ("quantised: another group size", gptq(group_size=16), "scales has shape [2, 16], but config.json asks for [1, 16]"),
    ("quantised: group size 3", gptq(group_size=3), "must be -1 or 8 to"),
    ("quantised: scales missing", gptq(without("scales")), "fc1.scales is missing"),
    ("quantised: zero points missing", gptq(without("qzeros")), "fc1.qzeros is missing"),
    ("quantised: a group beyond the last", gptq(group_of_an_input(2)), "names group 2 for input 15: there are 2"),
    ("quantised: a negative group", gptq(group_of_an_input(-1)), "names group -1 for input 15"),
    ("quantised: act-order that the config does not know", gptq(group_of_an_input(0), desc_act=False), '"desc_act" is not true'),
    ("quantised: rotated weights", compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config\" is there"),
    ("quantised: sparse weights", compressed(sparsity_config={"format": "sparse-24-bitmask"}), "only dense is supported"),
    ("quantised: act-order of codes in bytes",
     compressed("float-quantized", {"num_bits": 8, "type": "float", "actorder": "group"}), "only pack-quantized has it"),
    ("AWQ: another group size", awq(group_size=16), "scales has shape [2, 16], but config.json asks for [1, 16]"),
    ("AWQ: scales missing", awq(without("scales")), "fc1.scales is missing"),
    ("AWQ: zero points missing", awq(without("qzeros")), "fc1.qzeros is missing"),
    ("AWQ: codes packed as GPTQ's", awq(part_of("qweight", "I32", [2, FFN])), "has shape [2, 24], but config.json asks for [16, 3]"),
    ("AWQ: zero points of too few groups", awq(part_of("qzeros", "I32", [1, 3])), "has shape [1, 3], but config.json asks for [2, 3]"),
    ("AWQ: codes of another type", awq(part_of("qweight", "F32", [16, 3])), "is stored as F32, which is not supported there"),
    ("AWQ: scales that are whole numbers", awq(part_of("scales", "I32", [2, FFN])), "is stored as I32, which is not supported there"),
    ("fp8: other blocks", fp8(weight_block_size=[16, 8]), "weight_scale_inv has shape [2, 2], but config.json asks for [1, 2]"),
    ("fp8: a block of one size", fp8(weight_block_size=[8]), "must be a list of two sizes"),
    ("fp8: scales missing", fp8(without("weight_scale_inv")), "fc1.weight_scale is missing"),
    ("fp8: codes of other sizes", fp8(part_of("weight", "F8_E4M3", [FFN, 8])), "has shape [24, 8], but config.json asks for [24, 16]"),
    ("fp8: codes of integers", fp8(part_of("weight", "I8", [FFN, HIDDEN])), "is stored as I8, which is not supported there"),
    ("quantised: words for more inputs", gptq(wrong_words), "has shape [4, 24], but config.json asks for [2, 24]"),
    ("config: eos negative", config(eos_token_id=-1), '"eos_token_id" must be'),
    ("config: eos of words", config(eos_token_id=["</s>"]), '"eos_token_id" must be'),
    ("config: more layers than weights", config(num_hidden_layers=3), "layers.2.self_attn.k_proj.weight is missing"),
    ("config: projection without weights", config(word_embed_proj_dim=8), "embed_tokens.weight has shape [31, 16]"),
    ("config: untied without a head", config(tie_word_embeddings=False), "lm_head.weight is missing"),
    # the safetensors file as a whole
    ("file: empty", weights(b""), "0 bytes are no safetensors file"),
    ("file: seven bytes", weights(b"1234567"), "7 bytes are no safetensors file"),
    ("file: header of 0 bytes", weights(struct.pack("<Q", 0)), "does not begin with {"),
    ("file: header longer than the file", weights(struct.pack("<Q", 1000) + b"{}"), "cut short"),
    ("file: header of 2**63 bytes", weights(struct.pack("<Q", 1 << 63) + b"{}"), "at most 100000000"),
    ("file: header of 2**64 - 1 bytes", weights(struct.pack("<Q", 2**64 - 1) + b"{}"), "at most 100000000"),
    ("file: a zip", weights(b"PK\x03\x04" * 100), "at most 100000000"),
    ("file: text", weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "is it a safetensors file?"),
    ("file: no tensors", weights(file_bytes({})), "no tensor is named"),
    ("file: header is a list", weights(file_bytes([])), "does not begin with {"),
    ("file: header begins with a space", weights(file_bytes(b" {}")), "does not begin with {"),
    ("file: header ends with a newline", weights(file_bytes(b"{}\n")), "does not end with }"),
    ("file: two documents", weights(file_bytes(b"{}{}")), "not valid JSON"),
    ("file: deep header", weights(file_bytes(b'{"a":' * 400_000 + b"1" + b"}" * 400_000)), "more than 3 deep"),
    ("file: a hundred thousand tensors", weights(many_tensors(100_000)), "values in one document"),
    ("file: forty thousand tensors", weights(many_tensors(40_000)), "at most 32768 are read"),
    ("file: cut within the header", cut(lambda size: 100), "cut short"),
    ("file: cut within the tensors", cut(lambda size: size - 1), "cut short"),
    ("file: trailing bytes", weights(safetensors(sound_tensors()) + b"\0"), "1 byte after its last tensor"),
    ("file: sparse terabyte", special("model.safetensors", sparse), "does not begin with {"),
    ("file: a directory", special("model.safetensors", Path.mkdir), "is a directory"),
    ("file: a pipe", special("model.safetensors", os.mkfifo), "is a pipe"),
    ("file: a socket", special("model.safetensors", listen), "is a socket"),
    ("file: a link to a device", special("model.safetensors", lambda p: p.symlink_to("/dev/zero")), "is a device"),
    ("file: a link to itself", special("model.safetensors", lambda p: p.symlink_to(p.name)), "leads back to itself"),
    ("file: a broken link", special("model.safetensors", lambda p: p.symlink_to("../blobs/x")), "that is not there"),
    # what the header says
    ("header: a name twice", header(duplicate_key), "appears twice"),
    ("header: metadata not strings", header(lambda h: h["__metadata__"].update(a=1)), "must hold strings"),
    ("header: metadata a list", header(lambda h: h.update(__metadata__=[])), '"__metadata__" must be an object'),
    ("header: an entry a number", header(lambda h: h.update({SOME: 1})), "must be described by an object"),
    ("header: no dtype", header(edit(SOME, dtype=REMOVED)), 'has no "dtype"'),
    ("header: no shape", header(edit(SOME, shape=REMOVED)), 'has no "shape"'),
    ("header: no offsets", header(edit(SOME, data_offsets=REMOVED)), 'has no "data_offsets"'),
    ("header: an unknown field", header(edit(SOME, stride=[1])), 'unknown field "stride"'),
    ("header: unknown dtype", header(edit(SOME, dtype="F31")), 'unknown dtype "F31"'),
    ("header: dtype of another size", header(edit(SOME, dtype="F16")), "does not take the"),
    ("header: shape of another size", header(edit(SOME, shape=[HIDDEN, FFN + 1])), "does not take the"),
    ("header: shape transposed", header(edit(SOME, shape=[HIDDEN, FFN])), f"{SOME} has shape [16, 24], but config.json"),
    ("header: shape overflows", header(edit(SOME, shape=[2**32, 2**32, 2**32])), "does not take the"),
    ("header: shape negative", header(edit(SOME, shape=[-24, -16])), 'has -24 in "shape"'),
    ("header: shape a float", header(edit(SOME, shape=[24.0, 16])), 'has 24.0 in "shape"'),
    ("header: shape of nine sizes", header(edit(SOME, shape=[1] * 9)), "at most 8 sizes"),
    ("header: shape a string", header(edit(SOME, shape="24, 16")), "at most 8 sizes"),
    ("header: offsets backwards", header(edit(SOME, data_offsets=[8, 4])), "run backwards"),
    ("header: offsets negative", header(edit(SOME, data_offsets=[-4, 4])), 'has -4 in "data_offsets"'),
    ("header: three offsets", header(edit(SOME, data_offsets=[0, 4, 8])), "no list of two numbers"),
    ("header: offsets beyond 2**62", header(edit(SOME, data_offsets=[2**63, 2**63])), "is no size"),
    ("header: tensors overlap", header(shifted(-4)), "overlaps the one before it"),
    ("header: a hole", header(shifted(4)), "leaves a hole before it"),
    ("header: two tensors share bytes", header(lambda h: h.update(extra=dict(h[SOME]))), "overlaps the one before it"),
    ("header: control characters in a name", header(lambda h: h.update({"a\n\x1b[31m": 1})), "a\\x0a\\x1b[31m must"),
    # what the tensors are
    ("tensors: one is missing", tensors(lambda t: t.pop(SOME)), f"{SOME} is missing"),
    ("tensors: none is known", tensors(lambda t: (t.clear(), t.update(x=("F32", [], b"1234")))), "no tensor is named"),
    ("tensors: stored as integers", tensors(lambda t: t.update({SOME: ("I32", *t[SOME][1:])})), "is stored as I32"),
    ("tensors: a head of another shape", tensors(lambda t: t.update({"lm_head.weight": ("F32", [1], b"1234")})), "lm_head"),
    ("tensors: two models in one", tensors(lambda t: t.update({FIRST[6:]: t[FIRST]})), "which model is meant"),
    ("tensors: attention sinks", tensors(lambda t: t.update({SINKS: ("F32", [2], b"12345678")})), f"{SINKS}: attention sinks are not"),
    # the index
    ("index: empty", sharded(index=b""), "not valid JSON"),
    ("index: no weight map", sharded(index=b"{}"), '"weight_map" is missing or empty'),
    ("index: weight map a list", sharded(index=b'{"weight_map": []}'), '"weight_map" must be an object'),
    ("index: a file that is a number", sharded(lambda f, w: w.update({SOME: 7})), "must be a string, not 7"),
    ("index: parent directory", sharded(lambda f, w: w.update({SOME: "../a.safetensors"})), "only names of files beside"),
    ("index: absolute path", sharded(lambda f, w: w.update({SOME: "/etc/a.safetensors"})), "only names of files beside"),
    ("index: subdirectory", sharded(lambda f, w: w.update({SOME: "x/a.safetensors"})), "only names of files beside"),
    ("index: NUL in a name", sharded(lambda f, w: w.update({SOME: "a.safetensors\0"})), "only names of files beside"),
    ("index: not a safetensors file", sharded(lambda f, w: w.update({SOME: "config.json"})), "is no *.safetensors"),
    ("index: a missing shard", sharded(lambda f, w: w.update({SOME: "c.safetensors"})), "c.safetensors is not there"),
    ("index: the wrong shard", sharded(lambda f, w: w.update(dict.fromkeys((SOME, FIRST), "b.safetensors"))), "does not hold"),
    ("index: a tensor that no file has", sharded(lambda f, w: w.update({"ghost": "a.safetensors"})), "ghost is said to lie in"),
    ("index: a tensor not named", sharded(lambda f, w: w.pop(SOME)), "the index does not name it"),
    ("index: a tensor in two shards", sharded(in_both), "too; each must be there once"),
    ("index: a name twice", sharded(index=b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'), "appears twice"),
    # the directory
    ("directory: not there", lambda directory: directory.rmdir(), "is not there"),
    ("directory: empty", lambda directory: None, "has no config.json"),
    ("directory: no weights", without_weights, "has no *.safetensors"),
    ("directory: config is a directory", special("config.json", Path.mkdir), "is a directory"),
    ("directory: config is a pipe", special("config.json", os.mkfifo), "is a pipe"),
    ("directory: config links to itself", special("config.json", lambda p: p.symlink_to(p.name)), "leads back to itself"),
    ("directory: config is a socket", special("config.json", listen), "is a socket"),
    ("directory: config links to a device", special("config.json", lambda p: p.symlink_to("/dev/zero")), "is a device"),
    ("directory: config is a broken link", special("config.json", lambda p: p.symlink_to("../blobs/x")), "that is not there"),
    ("directory: pickles only", pickles_only, "pickles are not read"),
    ("directory: generation config broken", broken_generation_config, "generation_config.json"),
]


def hub_cache(directory):
    """As huggingface_hub lays it out: files are links into ../../blobs."""
    blobs = directory.parent / (directory.name + "-blobs")
    blobs.mkdir()
    write_sound(directory)
    for number, file in enumerate(sorted(directory.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../{blobs.name}/{number}")


def with_generation_config(directory):
    write_sound(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')


SOUND = [
    ("sound: one file", write_sound),
    ("sound: shards", sharded()),
    ("sound: eos in generation_config.json", with_generation_config),
    ("sound: links as in the hub's cache", hub_cache),
    ("sound: without the model. prefix", tensors(lambda t: [t.update({n[6:]: t.pop(n)}) for n in list(t)])),
    ("sound: packed by GPTQ", gptq()),
    ("sound: packed by AWQ", awq()),
    ("sound: in float8 with a scale for each block", fp8()),
    ("sound: the tied head repeated", tensors(lambda t: t.update({"lm_head.weight": t[FIRST]}))),
]


# ---- running them


def taken(name, default):
    """The value of an option of ours, taken off the command line before the harness reads it."""
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    value = sys.argv[at + 1 : at + 2]
    del sys.argv[at : at + 2]
    return value[0] if value else default


# What the supervisor, which looks first, says in its own words.
SUPERVISORS = {"is not there": "not there: a directory is wanted", "has no config.json": "no config.json in it"}
WITHIN = float(taken("--within", 2.0))
_REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], "max_tokens": 2}}


def validate(directory):
    """What `poise-loader --validate-only` says of a directory: exit code, stderr, seconds on a core."""
    before = harness.cpu_of_children()
    ended = subprocess.run(
        [harness.bin_folder() / "poise-loader", "--validate-only", "--model", directory],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60 + WITHIN,
    )
    expect(not ended.stdout, f"something was printed on stdout: {ended.stdout[:500]!r}")
    return ended.returncode, ended.stderr, harness.cpu_of_children() - before


def refused(workspace, make, words):
    directory = workspace / "model"
    directory.mkdir()
    make(directory)
    code, said, seconds = validate(directory)
    expect(code == 2, f"exit code {code}, 2 was expected: {said[:500]!r}")
    expect(said.count("\n") == 1 and said.endswith("\n") and len(said) < 1200, f"one line was expected: {said[:2000]!r}")
    expect(words in said, f"{words!r} was expected: {said!r}")
    expect(seconds <= WITHIN, f"it took {seconds:.1f} s of a core")

    output = workspace / "out.jsonl"
    ended = workspace.run(workspace.write_requests("in.jsonl", [_REQUEST]), output, "--skip-tokenizer-init", model=directory)
    ended.expect(2)
    expect(words in ended.err or SUPERVISORS.get(words, words) in ended.err, f"{words!r} was expected:\n{ended.err}")
    expect(1 <= len(ended.lines()) <= 2, f"one line was expected on stderr:\n{ended.err}")
    expect(not output.exists(), "an output was written")


def accepted(workspace, make):
    directory = workspace / "model"
    directory.mkdir()
    make(directory)
    code, said, _ = validate(directory)
    expect(code == 0 and not said, f"exit code {code}: {said[:500]!r}")


def named(name, body):
    body.__name__ = name
    body.__module__ = "__main__"
    return harness.test(body)


for case, maker, fragment in HOSTILE:
    named(case, lambda workspace, maker=maker, fragment=fragment: refused(workspace, maker, fragment))
for case, maker in SOUND:
    named(case, lambda workspace, maker=maker: accepted(workspace, maker))

if __name__ == "__main__":
    sys.exit(harness.main())

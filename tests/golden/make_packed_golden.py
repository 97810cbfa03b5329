#!/usr/bin/env python3
"""Makes tests/golden/models/packed_*: tiny checkpoints whose matrices are quantised in each format, and what transformers makes of
the numbers that their codes mean.

    python3 tests/golden/make_packed_golden.py [NAME ...]     (needs torch and transformers)

A model is made as by make_family_golden.py. Its matrices are rounded to codes, and packed here by the rules of each format's own
library (AutoGPTQ, AutoAWQ, compressed-tensors, transformers' fp8). The golden is that of a plain checkpoint with the dequantised
weights, scale · (code - zero), computed in float32 and rounded to the model's type. `int8` and `int4` are plain checkpoints that
`--quantization` packs (golden.json's "options").
"""

import json
import math
import pathlib
import shutil
import sys
import tempfile

import torch
from make_family_golden import HERE, cases_of, config_of, fit, fresh, golden_of, random_weights, rotary
from make_model_golden import write_golden
from safetensors.torch import save_file
from transformers.utils import logging

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output a word's n-th four bits are


def sizes(**more):
    return {"hidden_size": 64, "intermediate_size": 96} | more


def signed(words):
    """Unsigned numbers of 32 bits as int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def words_of(codes, bits, dim):
    """Codes from 0 on, 32 / bits neighbours along `dim` in a word, the first in its low bits."""
    each = 32 // bits
    rest = -codes.shape[dim] % each
    shape = list(codes.shape)
    shape[dim] = rest
    codes = torch.cat([codes, codes.new_zeros(shape)], dim).movedim(dim, -1).to(torch.int64)
    parts = codes.reshape(*codes.shape[:-1], -1, each)
    return signed((parts << (bits * torch.arange(each))).sum(-1)).movedim(-1, dim).contiguous()


def integers(weight, bits, group, asymmetric, order, stored):
    """(codes, scales, zeros, group of each input) of integers from 0 on; scales in the type `stored`."""
    rows, cols = weight.shape
    groups = math.ceil(cols / group)
    index = torch.arange(cols) // group
    if order:
        index = index[torch.randperm(cols)]
    most, scales, zeros = 2**bits - 1, torch.empty(rows, groups), torch.empty(rows, groups)
    for g in range(groups):
        part = weight[:, index == g]
        if asymmetric:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = ((high - low) / most).to(stored).float()
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, most)
        else:
            scales[:, g] = (part.abs().amax(1) / (most // 2)).to(stored).float()
            zeros[:, g] = 2 ** (bits - 1)
    codes = (weight / scales[:, index] + zeros[:, index]).round().clamp(0, most)
    return codes, scales, zeros, index


def numbers(codes, scales, zeros, index):
    return scales[:, index] * (codes - zeros[:, index])


def gptq(weight, stored, bits, group, asymmetric=False, order=False, version="gptq"):
    codes, scales, zeros, index = integers(weight, bits, group, asymmetric, order, torch.float16)
    kept = zeros - 1 if version == "gptq" else zeros
    return numbers(codes, scales, zeros, index), {
        "qweight": words_of(codes, bits, 1).T.contiguous(),
        "qzeros": words_of(kept, bits, 0).T.contiguous(),
        "scales": scales.T.to(torch.float16).contiguous(),
        "g_idx": index.to(torch.int32),
    }


def awq(weight, stored, group):
    codes, scales, zeros, index = integers(weight, 4, group, True, False, torch.float16)
    ordered = lambda x: x.reshape(-1, 8, x.shape[-1])[:, AWQ_ORDER, :].reshape(x.shape)  # noqa: E731
    return numbers(codes, scales, zeros, index), {
        "qweight": words_of(ordered(codes), 4, 0).T.contiguous(),
        "qzeros": words_of(ordered(zeros), 4, 0).T.contiguous(),
        "scales": scales.T.to(torch.float16).contiguous(),
    }


def compressed_integers(weight, stored, bits, group, asymmetric=False, order=False):
    group = group or weight.shape[1]
    codes, scales, zeros, index = integers(weight, bits, group, asymmetric, order, stored)
    tensors = {
        "weight_packed": words_of(codes, bits, 1),
        "weight_scale": scales.to(stored),
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        tensors["weight_zero_point"] = words_of(zeros, bits, 0)
    if order:
        tensors["weight_g_idx"] = index.to(torch.int32)
    return numbers(codes, scales, zeros, index), tensors


def float8(weight, stored, block=None, tensor=False, name="weight_scale"):
    """Scales of blocks, of the tensor or of each row."""
    rows, cols = weight.shape
    high, wide = block or ((rows, cols) if tensor else (1, cols))
    scales = torch.empty(math.ceil(rows / high), math.ceil(cols / wide))
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            scales[r, c] = weight[r * high : (r + 1) * high, c * wide : (c + 1) * wide].abs().amax() / 448
    kept = torch.float32 if name == "weight_scale_inv" else stored
    scales = scales.to(kept)
    spread = scales.float()[torch.arange(rows) // high][:, torch.arange(cols) // wide]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return spread * codes.float(), {"weight": codes, name: scales.reshape(1) if tensor else scales}


def int8_rows(weight, stored):
    codes, scales, zeros, index = integers(weight, 8, weight.shape[1], False, False, stored)
    return numbers(codes, scales, zeros, index), {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.to(stored)}


def rounded(weight, stored, bits):
    """What --quantization makes of a weight; it stays as it is in the checkpoint."""
    most, result = 127 if bits == 8 else 7, torch.empty_like(weight)
    for first in range(0, weight.shape[1], 128):
        part = weight[:, first : first + 128]
        scale = (part.abs().amax(1, keepdim=True) / most).to(stored).float()
        result[:, first : first + 128] = scale * (part / scale).round().clamp(-most, most)
    return result, {"weight": weight.to(stored)}


def compressed(form, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def ints(bits, group, symmetric=True, order=None):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": order, **strategy}


# family, stored type, sizes; how a matrix is packed; quantization_config, or the options that pack a plain checkpoint
MODELS = {
    "packed_gptq_order": (
        "llama", "float16", rotary(4, 2, **sizes()), lambda w, t: gptq(w, t, 4, GROUP, True, True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    # 88 outputs fill no whole panels: gate and up are kept as numbers
    "packed_gptq_8": (
        "qwen2", "bfloat16", rotary(4, 2, **sizes(intermediate_size=88)), lambda w, t: gptq(w, t, 8, 64, version="gptq_v2"),
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False, "sym": True, "checkpoint_format": "gptq_v2"}),
    "packed_awq": (
        "mistral", "float16", rotary(4, 2, **sizes(sliding_window=None)), lambda w, t: awq(w, t, GROUP),
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}),
    "packed_compressed_4": (
        "llama", "bfloat16", rotary(4, 4, **sizes()), lambda w, t: compressed_integers(w, t, 4, GROUP, True, True),
        compressed("pack-quantized", ints(4, GROUP, False, "group"))),
    "packed_compressed_8": (
        "qwen3", "float16", rotary(4, 2, **sizes()), int8_rows,
        compressed("int-quantized", ints(8, None), {"num_bits": 8, "type": "int", "dynamic": True})),
    "packed_compressed_float8": (
        "llama", "bfloat16", rotary(2, 1, 32, **sizes()), float8,
        compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"})),
    "packed_fp8_blocks": (
        "qwen3", "bfloat16", rotary(4, 2, **sizes()), lambda w, t: float8(w, t, (48, 40), name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}),
    "packed_fp8_one_scale": (
        "llama", "float16", rotary(4, 2, **sizes()), lambda w, t: float8(w, t, tensor=True),
        {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "packed_int4": ("llama", "bfloat16", rotary(4, 2, **sizes(intermediate_size=144)), lambda w, t: rounded(w, t, 4), ["--quantization", "int4"]),
    "packed_int8": ("qwen2", "float16", rotary(4, 2, **sizes(intermediate_size=144)), lambda w, t: rounded(w, t, 8), ["--quantization", "int8"]),
}  # fmt: skip


def is_packed(name):
    return name.endswith("proj.weight")


@torch.no_grad()
def write_both(model, dtype, pack, how, plain, directory):
    """The dequantised checkpoint and the packed one."""
    stored = getattr(torch, dtype)
    tensors, dequantised = {}, {}
    for name, weight in model.state_dict().items():
        weight = weight.to(stored)
        dequantised[name] = tensors[name] = weight
        if is_packed(name):
            means, parts = pack(weight.float(), stored)
            dequantised[name] = means.to(stored)
            del tensors[name]
            tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    shutil.rmtree(directory, ignore_errors=True)
    model.config.dtype = stored
    for folder in (plain, directory):
        model.config.save_pretrained(folder)
    save_file(dequantised, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if isinstance(how, dict):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}, indent=2) + "\n")


def make(name):
    print(name)
    family, dtype, fields, pack, how = MODELS[name]
    directory = HERE / name
    for attempt in range(6):
        generator = torch.Generator().manual_seed(1000 * attempt + sum(map(ord, name)))
        torch.manual_seed(attempt)
        model = fresh(config_of(family, fields)).train()
        random_weights(model, generator)
        cases = cases_of(model.config.vocab_size, generator)
        for _ in range(10):
            fit(model, cases, 40)
            with tempfile.TemporaryDirectory() as plain:
                torch.manual_seed(attempt)  # the groups of act-order
                write_both(model, dtype, pack, how, pathlib.Path(plain), directory)
                golden, trouble = golden_of(pathlib.Path(plain), dtype, cases)
            if golden:
                golden = golden | {"model": name} | ({} if isinstance(how, dict) else {"options": how})
                write_golden(directory, golden)
                return
        print(f"  another seed: {trouble}")
    sys.exit(f"{name}: {trouble}")


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        make(name)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""poise on the CPU device beside HuggingFace transformers on the same cores, same shape, same work.

The shape of OPT-125m, or of a Llama of its size, with random weights, 32 requests of 128 prompt tokens, 64 new tokens each, greedy.
Each system runs alone, in turn, several times; the time is that of prefill and decode, without loading. A dtype with `+int8` or
`+int4` is poise alone with packed weights (`--quantization`). Needs a Python with torch and transformers:

    ninja -C build/release poise-kernels-bench     # for the cores' own limit
    build/venv-reference/bin/python bench/transformers_cpu.py [--threads 2] [--repeats 3] [--json FILE]
    … bench/transformers_cpu.py --shape llama --variants float32,bfloat16,bfloat16+int8,bfloat16+int4
"""

import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = {
    "opt": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt",
        "hidden_size": 768, "word_embed_proj_dim": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 50272, "max_position_embeddings": 2048, "do_layer_norm_before": True, "activation_function": "relu",
        "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 32000, "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
}  # fmt: skip


def prompts(count, length):
    draw = random.Random(0)
    return [[draw.randrange(4, 30000) for _ in range(length)] for _ in range(count)]


def poise_command(work, variant, folder, threads, turn):
    """Writes a run's files to `folder`. Returns its command and its run directory."""
    dtype, _, codes = variant.partition("+")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(work["shape"] | {"torch_dtype": dtype}))
    requests = folder / "requests.jsonl"
    with requests.open("w") as out:
        for number, ids in enumerate(work["prompts"]):
            body = {"prompt": ids, "max_tokens": work["output_len"], "temperature": 0, "ignore_eos": True}
            out.write(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    run = folder / f"run-{variant}-{turn}"
    command = [ROOT / "launch" / "poise", "run", "--model", model, "-i", requests, "-o", folder / f"out-{variant}-{turn}.jsonl",
               "--run-dir", run, "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", dtype, "--device", "cpu",
               "--threads", threads, "--policy", work["policy"], "--quantization", codes or "auto"]
    return [str(word) for word in command], run


def poise_status(work, variant, folder, threads, turn):
    command, run = poise_command(work, variant, folder, threads, turn)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"poise ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads((run / "status.json").read_text())


def transformers_seconds(work, model):
    import torch
    ids = torch.tensor(work["prompts"])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=work["output_len"],
                             min_new_tokens=work["output_len"])
    seconds = time.perf_counter() - began
    assert out.shape[1] == len(work["prompts"][0]) + work["output_len"], out.shape
    return seconds


def register_peak(threads):
    """The cores' rate of multiply-adds from registers, the upper bound; None if the bench is not built. GFLOP/s."""
    program = ROOT / "build" / "release" / "bin" / "poise-kernels-bench"
    if not program.exists():
        return None
    told = subprocess.run([program, "ceilings", str(threads)], capture_output=True, text=True, check=True).stdout
    return float(re.search(r"([0-9.]+) GFLOP/s from registers", told).group(1))


def torch_product():
    """The rate of torch's own large matrix product, float32. GFLOP/s."""
    import torch
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * 2048**3 / (time.perf_counter() - began) / 1e9)
    return best


def shape_flops(work):
    """Multiply-adds that must happen: each row through every layer matrix, each sampled row through the head, and attention."""
    shape, prompts_, new = work["shape"], len(work["prompts"]), work["output_len"]
    h, layers, length = shape["hidden_size"], shape["num_hidden_layers"], len(work["prompts"][0]) + new
    if work["shape"]["model_type"] == "opt":
        layer = 4 * h * h + 2 * h * shape["ffn_dim"]
    else:
        layer = 2 * h * h * (1 + shape["num_key_value_heads"] / shape["num_attention_heads"]) + 3 * h * shape["intermediate_size"]
    rows = prompts_ * (length - 1)
    return 2 * rows * layers * layer + 2 * prompts_ * new * shape["vocab_size"] * h + 4 * h * layers * prompts_ * length * length / 2


def transformers_model(shape, dtype):
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape))
    return made.to(getattr(torch, dtype)).eval()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--num-prompts", type=int, default=32)
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=64)
    options.add_argument("--policy", default="kv-only")
    options.add_argument("--shape", choices=tuple(SHAPES), default="opt")
    options.add_argument("--variants", default="float32", help="with commas: float32, bfloat16, float16; +int8, +int4")
    options.add_argument("--without-transformers", action="store_true", help="poise's variants alone")
    options.add_argument("--json", type=pathlib.Path)
    options = options.parse_args()

    variants = options.variants.split(",")
    dtypes = [] if options.without_transformers else [v for v in variants if "+" not in v]
    work = {"prompts": prompts(options.num_prompts, options.input_len), "output_len": options.output_len,
            "policy": options.policy, "shape": SHAPES[options.shape]}
    new_tokens = options.num_prompts * options.output_len
    models = {}
    if dtypes:
        import torch

        torch.set_num_threads(options.threads)
        models = {dtype: transformers_model(work["shape"], dtype) for dtype in dtypes}

    ours, theirs, shares = {v: [] for v in variants}, {d: [] for d in dtypes}, []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats):
            told = []
            for variant in variants:
                status = poise_status(work, variant, pathlib.Path(folder), options.threads, turn)
                ours[variant].append(status["elapsed_seconds"])  # from the first order to the last answer
                shares.append(status["planner"]["planning_share"] + status["planner"]["messages_share"])
                told.append(f"poise {variant} {new_tokens / ours[variant][-1]:.1f}")
            for dtype, model in models.items():
                theirs[dtype].append(transformers_seconds(work, model))
                told.append(f"transformers {dtype} {new_tokens / theirs[dtype][-1]:.1f}")
            print(f"turn {turn}, tokens/s: " + ", ".join(told), flush=True)

    peak, flops = register_peak(options.threads), shape_flops(work)

    def figures(seconds):
        best = min(seconds)
        return {"tokens_per_s": new_tokens / statistics.median(seconds), "best_tokens_per_s": new_tokens / best,
                "best_gflops": flops / best / 1e9, "best_share_of_peak": flops / best / 1e9 / peak if peak else None}

    result = {
        "work": f"{options.shape} shape of 125M, {options.num_prompts} x ({options.input_len} + {options.output_len}), {options.policy}",
        "threads": options.threads,
        "poise": {variant: figures(seconds) for variant, seconds in ours.items()},
        "transformers": {dtype: figures(seconds) for dtype, seconds in theirs.items()},
        "ratio": {dtype: statistics.median(theirs[dtype]) / statistics.median(ours[dtype]) for dtype in dtypes},
        "peak_gflops": peak,
        "poise_orders_and_messages_share": statistics.median(shares),
    }
    if dtypes:
        import transformers

        result |= {"torch_product_gflops": torch_product(), "torch": torch.__version__, "transformers_version": transformers.__version__}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

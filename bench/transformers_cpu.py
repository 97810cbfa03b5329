#!/usr/bin/env python3
"""poise on the CPU device beside HuggingFace transformers on the same cores, same shape, same work.

OPT-125m's shape with random weights in float32, 32 requests of 128 prompt tokens, 64 new tokens each, greedy. Each system runs
alone, in turn, several times; the time is that of prefill and decode, without loading. Needs a Python with torch and transformers:

    ninja -C build/release poise-kernels-bench     # for the cores' own limit
    build/venv-reference/bin/python bench/transformers_cpu.py [--threads 2] [--repeats 3] [--json FILE]
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
SHAPE = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float32",
    "hidden_size": 768, "word_embed_proj_dim": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "vocab_size": 50272, "max_position_embeddings": 2048, "do_layer_norm_before": True, "activation_function": "relu",
    "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}


def prompts(count, length):
    draw = random.Random(0)
    return [[draw.randrange(4, 50000) for _ in range(length)] for _ in range(count)]


def poise_seconds(work, folder, threads, turn):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPE))
    requests = folder / "requests.jsonl"
    with requests.open("w") as out:
        for number, ids in enumerate(work["prompts"]):
            body = {"prompt": ids, "max_tokens": work["output_len"], "temperature": 0, "ignore_eos": True}
            out.write(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    run = folder / f"run{turn}"
    command = [ROOT / "launch" / "poise", "run", "--model", model, "-i", requests, "-o", folder / f"out{turn}.jsonl",
               "--run-dir", run, "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32", "--device", "cpu",
               "--threads", str(threads), "--policy", work["policy"]]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
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


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--num-prompts", type=int, default=32)
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=64)
    options.add_argument("--policy", default="kv-only")
    options.add_argument("--json", type=pathlib.Path)
    options = options.parse_args()

    import torch
    import transformers
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**{k: v for k, v in SHAPE.items() if k != "torch_dtype"})).eval()
    work = {"prompts": prompts(options.num_prompts, options.input_len), "output_len": options.output_len,
            "policy": options.policy}
    new_tokens = options.num_prompts * options.output_len

    ours, theirs, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats):
            status = poise_seconds(work, pathlib.Path(folder), options.threads, turn)
            ours.append(status["elapsed_seconds"])  # from the first order to the last answer
            shares.append(status["planner"]["planning_share"] + status["planner"]["messages_share"])
            theirs.append(transformers_seconds(work, model))
            print(f"turn {turn}: poise {new_tokens / ours[-1]:.1f} tokens/s, transformers {new_tokens / theirs[-1]:.1f}", flush=True)

    # Multiply-adds that must happen: each row through every layer matrix, each sampled row through the head, and attention.
    h, f, layers, vocab = SHAPE["hidden_size"], SHAPE["ffn_dim"], SHAPE["num_hidden_layers"], SHAPE["vocab_size"]
    rows = options.num_prompts * (options.input_len + options.output_len - 1)
    length = options.input_len + options.output_len
    flops = (2 * rows * layers * (4 * h * h + 2 * h * f) + 2 * new_tokens * vocab * h
             + 4 * h * layers * options.num_prompts * length * length / 2)
    peak = register_peak(options.threads)
    ours_s, theirs_s = statistics.median(ours), statistics.median(theirs)
    result = {
        "work": f"OPT-125m shape, float32, {options.num_prompts} x ({options.input_len} + {options.output_len}), {options.policy}",
        "threads": options.threads,
        "poise_tokens_per_s": new_tokens / ours_s, "transformers_tokens_per_s": new_tokens / theirs_s,
        "ratio": theirs_s / ours_s,
        "peak_gflops": peak, "torch_product_gflops": torch_product(),
        "poise_gflops": flops / ours_s / 1e9, "transformers_gflops": flops / theirs_s / 1e9,
        "poise_share_of_peak": flops / ours_s / 1e9 / peak if peak else None,
        "transformers_share_of_peak": flops / theirs_s / 1e9 / peak if peak else None,
        "poise_orders_and_messages_share": statistics.median(shares),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""HuggingFace transformers with its offloaded cache on random weights: figures as one JSON object. Needs torch with CUDA,
transformers and accelerate.

    transformers_run.py --config FILE --gpu-memory BYTES --host-memory BYTES --num-prompts 128 --input-len 1024 --output-len 32
        --batches 128 64 32 16 --seconds 300 --json FILE

Weights that do not fit beside a batch are offloaded by accelerate. The largest of `--batches` that runs in the memory is used;
batches are worked off until all prompts are done or the time is over, and the figures count those that were (`num_requests`).
"""

import argparse
import gc
import json
import random
import time


def build(config, gpu_memory, host_memory):
    """The model with fp16 weights: all on the GPU if they leave room for a batch, otherwise as many as fit into half of it."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.to_empty(device="cpu")
    model.tie_weights()
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()
    for weight in {id(one): one for one in [*model.parameters(), *model.buffers()]}.values():
        flat = weight.data.view(-1)
        for begin in range(0, flat.numel(), noise.numel()):
            piece = flat[begin : begin + noise.numel()]
            piece.copy_(noise[: piece.numel()])
    model.eval()
    if sum(one.numel() * 2 for one in model.parameters()) <= gpu_memory * 0.7:
        return model.to("cuda"), "all weights on the GPU"
    from accelerate import dispatch_model, infer_auto_device_map

    kinds = [type(model.model.decoder.layers[0]).__name__]
    where = infer_auto_device_map(model, {0: gpu_memory // 2, "cpu": host_memory}, no_split_module_classes=kinds, dtype=torch.float16)
    layers = sum(1 for name, place in where.items() if place == "cpu" and ".layers." in name)
    return dispatch_model(model, where, main_device=0), f"{layers} layers offloaded by accelerate"


class Clock:
    """Called with the logits of each step: the first ends the prefill."""

    def __init__(self):
        self.times = []

    def __call__(self, ids, scores):
        import torch

        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def one_batch(model, prompts, output_len, cache):
    """(seconds until the first logits, seconds from there to the end)."""
    import torch
    from transformers import LogitsProcessorList

    ids = torch.tensor(prompts, device="cuda")
    clock = Clock()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output_len, min_new_tokens=output_len,
            cache_implementation=cache, logits_processor=LogitsProcessorList([clock]),
        )
    torch.cuda.synchronize()
    ended = time.perf_counter()
    if out.shape != (len(prompts), len(prompts[0]) + output_len) or len(clock.times) != output_len:
        raise RuntimeError(f"generate made {tuple(out.shape)} in {len(clock.times)} steps")
    return clock.times[0] - began, ended - clock.times[0]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--config", required=True)
    for name in ("gpu-memory", "host-memory", "num-prompts", "input-len", "output-len"):
        options.add_argument(f"--{name}", type=int, required=True)
    options.add_argument("--batches", type=int, nargs="+", required=True)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--cache", default="offloaded")
    options.add_argument("--json", required=True)
    given = options.parse_args()

    import torch
    import transformers

    torch.cuda.set_per_process_memory_fraction(
        min(1.0, given.gpu_memory / torch.cuda.get_device_properties(0).total_memory), 0
    )
    config = transformers.OPTConfig.from_json_file(given.config)
    draw = random.Random(0)
    prompts = [[draw.randrange(4, config.vocab_size) for _ in range(given.input_len)] for _ in range(given.num_prompts)]
    model, placing = build(config, given.gpu_memory, given.host_memory)

    batch, tried = None, []
    for size in sorted(given.batches, reverse=True):
        try:
            one_batch(model, prompts[:size], 2, given.cache)
            batch = size
            break
        except torch.cuda.OutOfMemoryError:
            tried.append(size)
        gc.collect()
        torch.cuda.empty_cache()
    if batch is None:
        raise SystemExit(f"no batch of {tried} fits")

    torch.cuda.reset_peak_memory_stats()
    times, began = [], time.perf_counter()
    for begin in range(0, given.num_prompts - batch + 1, batch):
        times.append(one_batch(model, prompts[begin : begin + batch], given.output_len, given.cache))
        if time.perf_counter() - began > given.seconds:
            break
    prefill, decode = (sum(one[part] for one in times) for part in (0, 1))
    done = batch * len(times)
    figures = {
        "num_requests": done,
        "asked_requests": given.num_prompts,
        "batch": batch,
        "out_of_memory_at": tried,
        "placing": placing,
        "cache": given.cache,
        "input_len": given.input_len,
        "output_len": given.output_len,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "seconds": prefill + decode,
        "prefill_per_second": done * given.input_len / prefill,
        "decode_tokens_per_second": done * (given.output_len - 1) / decode,
        "output_tokens_per_second": done * given.output_len / (prefill + decode),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(0),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name(0),
    }
    with open(given.json, "w") as file:
        json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""FlexGen 0.1.8, as it is, on dummy weights; its own figures as one JSON object. Needs torch with CUDA, numpy, attrs, tqdm.

    flexgen_run.py --wheel flexgen-0.1.8-py3-none-any.whl --gpu-memory 25769803776 --json FILE -- --model facebook/opt-6.7b
        --percent 100 0 0 100 100 0 --gpu-batch-size 16 --num-gpu-batches 8 --prompt-len 1024 --gen-len 32

What stands behind `--` goes to flexgen.flex_opt. Three things are given to it from outside, nothing in it is changed: a stand-in
for transformers.AutoTokenizer, which would ask the hub for OPT's; a cap on torch's memory of the GPU (FlexGen has none of its
own); and an ear at write_benchmark_log, which is where its figures leave it.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import types


class Tokenizer:
    """The parts of a tokenizer that flex_opt uses: prompts of `max_length` ids, without padding."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def __call__(self, prompts, padding, max_length):
        draw = random.Random(max_length)
        ids = [[draw.randrange(4, 50000) for _ in range(max_length)] for _ in prompts]
        return types.SimpleNamespace(input_ids=ids)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--wheel", help="path of flexgen's wheel, where it is not installed")
    options.add_argument("--gpu-memory", type=int, help="bytes that torch may take of the GPU")
    options.add_argument("--json", required=True)
    options.add_argument("theirs", nargs="+")
    given = options.parse_args()
    if given.wheel:
        sys.path.insert(0, os.path.abspath(given.wheel))  # pure Python, so it is imported as it is packed

    import torch
    import transformers

    transformers.AutoTokenizer = Tokenizer
    if given.gpu_memory:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.gpu_memory / total), 0)

    from flexgen import flex_opt
    from flexgen.timer import timers

    figures = {}

    def note(filename, model_size, cache_size, hidden_size, gpu_peak, projected, *speeds):
        names = ("prefill_seconds", "prefill_per_second", "decode_seconds", "decode_tokens_per_second", "seconds")
        figures.update(zip((*names, "output_tokens_per_second"), map(float, speeds)))
        figures.update(model_bytes=model_size, cache_bytes=cache_size, gpu_peak_bytes=gpu_peak, projected=projected)
        figures["step_seconds"] = list(timers("generate").costs)
        return ""

    flex_opt.write_benchmark_log = note
    parser = argparse.ArgumentParser()
    flex_opt.add_parser_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        theirs = parser.parse_args([*given.theirs, "--path", flex_opt.DUMMY_WEIGHT, "--offload-dir", folder])
        flex_opt.run_flexgen(theirs)
    figures |= {
        "num_requests": theirs.gpu_batch_size * theirs.num_gpu_batches,
        "input_len": theirs.prompt_len,
        "output_len": theirs.gen_len,
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(0),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
    }
    with open(given.json, "w") as file:
        json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()

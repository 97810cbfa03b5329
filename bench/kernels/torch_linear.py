#!/usr/bin/env python3
"""torch's linear layer on the shapes that poise-kernels-bench times: out = in · weightᵀ, float32.

    python3 bench/kernels/torch_linear.py [threads]      (needs torch)

Weights are taken in turn from 192 MiB of them, as a model's layers are; the time is that of the fastest run:
one thread's own time on a core, or the wall's with several.
"""

import sys
import time

import torch

SHAPES = [("K, V", 1536, 768), ("Q or O", 768, 768), ("fc1", 3072, 768), ("fc2", 768, 3072), ("head", 50272, 768)]


def best_seconds(run, clock, for_seconds=0.4):
    run()
    best, start = float("inf"), clock()
    while clock() - start < for_seconds:
        before = clock()
        run()
        best = min(best, clock() - before)
    return best


def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter  # as the other bench has it
    for rows in (1, 4, 8, 32, 256, 4096):
        for name, outputs, inputs in SHAPES:
            if rows == 4096 and outputs > 50000:
                continue
            copies = max(1, (192 << 20) // (4 * outputs * inputs))
            weights = [torch.full((outputs, inputs), 0.5) for _ in range(copies)]
            rows_in, turn = torch.full((rows, inputs), 0.5), 0

            def run():
                nonlocal turn
                turn = (turn + 1) % copies
                torch.nn.functional.linear(rows_in, weights[turn])

            with torch.inference_mode():
                seconds = best_seconds(run, clock)
            print(f"linear {name:<6} M={rows:<5} {seconds * 1e6:10.1f} us {2e-9 * rows * outputs * inputs / seconds:8.1f} GFLOP/s "
                  f"{4e-9 * outputs * inputs / seconds:6.1f} GB/s")


if __name__ == "__main__":
    main()

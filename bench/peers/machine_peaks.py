#!/usr/bin/env python3
"""What this GPU and its link reach at best, measured through torch: a large fp16 matrix product, for a moment (the best of several
means) and without rest (one mean of 500, where the card's power bounds it), and one large copy from pinned host memory (the best
of several means). As JSON: {"tflops", "tflops_without_rest", "link_gbps", …}.

    machine_peaks.py --json FILE
"""

import argparse
import json


def best_seconds(work, times, rounds=6):
    """Seconds of one `work()`: the least of `rounds` means over `times` calls."""
    import torch

    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3 / times)
    return best


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", required=True)
    given = options.parse_args()
    import torch

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    tflops = 2 * size**3 / best_seconds(lambda: torch.mm(a, b), 10) * 1e-12
    best_seconds(lambda: torch.mm(a, b), 500, rounds=1)  # it is warm then
    unrested = 2 * size**3 / best_seconds(lambda: torch.mm(a, b), 500, rounds=1) * 1e-12
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    link = host.numel() / best_seconds(lambda: there.copy_(host, non_blocking=True), 4) * 1e-9
    facts = {"tflops": tflops, "tflops_without_rest": unrested, "size": size, "link_gbps": link, "torch": torch.__version__}
    with open(given.json, "w") as file:
        json.dump(facts | {"gpu": torch.cuda.get_device_name(0)}, file)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the GPU's own library reaches on a large matrix product in fp16, through torch: TFLOP/s, the best of several means of ten.

    gemm_peak.py --json FILE
"""

import argparse
import json


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", required=True)
    given = options.parse_args()
    import torch

    size, times = 8192, 10
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    best = 0.0
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            torch.mm(a, b)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * size**3 * times / (begin.elapsed_time(end) * 1e-3) * 1e-12)
    with open(given.json, "w") as file:
        json.dump({"tflops": best, "size": size, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}, file)


if __name__ == "__main__":
    main()

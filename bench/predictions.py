#!/usr/bin/env python3
"""Compares predicted with measured times of a decoding iteration on the CPU device at set speeds, over works and policies.

    bench/predictions.py [--model DIR] [--speeds 0.2,8 0.1,0 …] [--policies NAME …] [--times 3] [--whole]

A speed is GB/s of the link and GFLOP/s of computation, 0: as fast as it goes; a third number is GB/s that host cores attend, for
host-kv and three-way (0.1,3,0.05). At each one the device is profiled once. Of
`--times` runs of a cell the fastest is shown, since what else a machine does makes a run slower and never faster. Each cell
is milliseconds measured, and how far the prediction is off. With `--whole` it is tokens/s of whole runs in which requests take
each other's places: with as many rows of prompts as fit, then as the planner chooses. Beside other work on two cores streams wait for a core, which no
prediction knows of: `chrt -r 1 bench/predictions.py` (as root) measures the device and not its neighbours.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKS = {  # tokens of prompts and answers
    "long": [(150, 6)] * 10,
    "short": [(4 + 36 * i // 24, 4 + 7 * i % 28) for i in range(24)],
}
WAVES = [(120, 24)] * 64
AT_A_TIME = 16


def poise(folder, *words):
    ended = subprocess.run(
        [ROOT / "launch" / "poise", *map(str, words)],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}, capture_output=True, text=True,
    )  # fmt: skip
    if ended.returncode != 0:
        sys.exit(f"poise {' '.join(map(str, words))}: {ended.returncode}\n{ended.stderr}")


def write_requests(path, works, seed=1):
    ids = random.Random(seed)
    lines = []
    for number, (prompt, answer) in enumerate(works):
        body = {"prompt": [ids.randrange(4, 1300) for _ in range(prompt)], "max_tokens": answer, "ignore_eos": True, "temperature": 0}
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_once(folder, words, figure="decode_iteration_seconds"):
    """Measured and predicted."""
    shutil.rmtree(folder / "out.jsonl.poise", ignore_errors=True)
    poise(folder, "run", *words, "-o", folder / "out.jsonl", "--overwrite")
    status = json.loads((folder / "out.jsonl.poise" / "status.json").read_text(encoding="utf-8"))
    return tuple(status[clock][figure] for clock in ("measured", "predicted"))


def whole_runs(folder, words, times):
    """A cell, and how far it is off."""
    write_requests(folder / "in.jsonl", WAVES)
    parts, worst = [], 0.0
    for rows in ("8192", "auto"):
        asked = [*words, "--max-num-seqs", AT_A_TIME, "--prompt-rows", rows]
        measured, predicted = max(run_once(folder, asked, "tokens_per_second") for _ in range(times))
        off = predicted / measured - 1
        worst = max(worst, abs(off))
        parts.append(f"{rows} {measured:.1f} {off:+.1%}")
    return ", ".join(parts), worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "launch" / "demo" / "model")
    parser.add_argument("--speeds", nargs="+", default=["0.1,3", "0.2,8", "0.5,20", "0.1,0", "0.3,0"])
    parser.add_argument("--policies", nargs="+", default=["kv-only", "act-only", "hybrid", "kvpr", "optimal"])
    parser.add_argument("--gpu-memory", default="6MiB")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="poise-predictions-") as name:
        folder = Path(name)
        for speeds in given.speeds:
            link, compute, *host = speeds.split(",")
            device = ["--device", "cpu", "--threads", "1", "--link-gbps", link]
            device += ["--compute-gflops", compute] if float(compute) > 0 else []
            device += ["--host-threads", "1", "--host-gbps", host[0]] if host else []
            poise(folder, "profile", "--model", given.model, *device, "-o", folder / "profile.json")
            common = ["--model", given.model, "-i", folder / "in.jsonl", *device, "--gpu-memory", given.gpu_memory, "--profile", folder / "profile.json"]
            if given.whole:
                cells = []
                for policy in given.policies:
                    cell, off = whole_runs(folder, [*common, "--policy", policy], given.times)
                    worst = max(worst, off)
                    cells.append(f"{policy} {cell}")
                print(f"{link} GB/s, {compute} GFLOP/s, whole runs: {'; '.join(cells)}", flush=True)
                continue
            for work, sizes in WORKS.items():
                write_requests(folder / "in.jsonl", sizes)
                cells = []
                for policy in given.policies:
                    words = [*common, "--policy", policy]
                    measured, predicted = min(run_once(folder, words) for _ in range(given.times))
                    off = predicted / measured - 1
                    worst = max(worst, abs(off))
                    cells.append(f"{policy} {measured * 1e3:.2f} {off:+.1%}")
                on_host = f", host cores {host[0]} GB/s" if host else ""
                print(f"{link} GB/s, {compute} GFLOP/s{on_host}, {work}: {'; '.join(cells)}", flush=True)
    print(f"furthest off: {worst:.1%}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Draws the picture in the repository's README from measured results.

    bench/draw_results.py            # bench/results/h200-decode.json -> bench/results/h200-decode.svg
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))

from supervisor.measure.svg import Figure  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "h200-decode.json"
SYSTEMS = ("transformers 5.17", "FlexGen 0.1.8", "poise", "limit of the link")


def drawing(results):
    figure = Figure(results["title"], x="model, tokens of prompt", y=results["unit"], width=720, height=360)
    for system in SYSTEMS:
        figure.bars(system, {work["work"]: work[system] for work in results["works"]})
    return figure.svg()


if __name__ == "__main__":
    RESULTS.with_suffix(".svg").write_text(drawing(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")

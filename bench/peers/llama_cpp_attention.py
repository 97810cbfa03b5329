#!/usr/bin/env python3
"""Attention on host cores beside llama.cpp's on the CPU: the same shapes, the same number of threads, one after the other.

llama.cpp's sources come with PyPI's `llama-cpp-python`, in vendor/llama.cpp. Built for the machine at hand:

    cmake -S vendor/llama.cpp -B BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON
    ninja -C BUILD ggml ggml-cpu
    bench/peers/llama_cpp_attention.py --sources vendor/llama.cpp --build BUILD --threads 2

It needs `ninja -C build/release poise-kernels-bench`. 8 sequences of 1,024 tokens decode one token each, 32 query heads of 128. Both read
memory that no cache holds; the fastest run of 0.4 s counts, of as many rounds as asked for; the share of what the cores read of the same memory is the median of the rounds. llama.cpp has codes of 8 and 4 bits with a
scale for each 32 numbers (Q8_0, Q4_0), poise with a scale and an offset for each 64. poise has queries of the type that a GPU would have, llama.cpp of float32.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = HERE.parents[1] / "build" / "release" / "bin" / "poise-kernels-bench"
NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4"}
SEQUENCES = 8


def of_llama_cpp(program, libraries, threads):
    """{(key heads, type): (seconds, GB/s)}"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    lines = subprocess.run([program, str(threads)], env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    found = {}
    for heads, name, seconds, size in map(str.split, lines):
        found[int(heads), NAMES[name]] = float(seconds), int(size) / float(seconds) / 1e9
    return found


def of_poise(threads):
    text = subprocess.run([OURS, str(threads), "host"], check=True, capture_output=True, text=True).stdout
    found = {}
    for heads, name, time, speed, share in re.findall(r"(\d+) of 32 keys, (\w+) +([\d.]+) us +([\d.]+) GB/s +([\d.]+) %", text):
        found[int(heads), name] = float(time) / 1e6, float(speed), float(share)
    return found


def main():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sources", required=True, type=Path, help="vendor/llama.cpp")
    made.add_argument("--build", required=True, type=Path, help="where it was built")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--rounds", type=int, default=3)
    given = made.parse_args()
    libraries = given.build.resolve() / "bin"
    with tempfile.TemporaryDirectory(prefix="poise-peer-") as folder:
        program = Path(folder) / "attention"
        subprocess.run(
            ["g++", "-std=c++20", "-O2", f"-I{given.sources / 'ggml' / 'include'}", str(HERE / "llama_cpp_attention.cpp"), "-o", str(program),
             f"-L{libraries}", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath-link,{libraries}"],
            check=True,
        )  # fmt: skip
        rounds = [(of_poise(given.threads), of_llama_cpp(program, libraries, given.threads)) for _ in range(given.rounds)]
    print(f"{given.threads} threads, {SEQUENCES} x 1,024 tokens; tokens/s of one layer's attention, and GB/s")
    print("| key heads | context | poise | of what the cores read | llama.cpp | faster by |")
    print("|---|---|---|---|---|---|")
    for key in rounds[0][0]:
        seconds, speed, _ = min(ours[key] for ours, _ in rounds)
        share = statistics.median(ours[key][2] for ours, _ in rounds)
        theirs, their_speed = min(peers[key] for _, peers in rounds)
        print(
            f"| {key[0]} | {key[1]} | {SEQUENCES / seconds:,.0f} ({speed:.1f}) | {share:.0f} % | "
            f"{SEQUENCES / theirs:,.0f} ({their_speed:.1f}) | {theirs / seconds:.2f} |"
        )


if __name__ == "__main__":
    main()

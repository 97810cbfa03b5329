#!/usr/bin/env python3
"""Runs fuzz targets: run.py [TARGET...] [--seconds N] [--executions N]. The last line is `N passed, N failed`.

Each target begins from tests/fuzz/seeds.py with the seed 1. With --keep it begins from build/fuzz/corpus/NAME, too, and leaves
there what it found to lead somewhere new. An input that shows a defect is kept in build/fuzz/findings/NAME: run.py --input FILE
TARGET runs it again. build/fuzz/logs has what each target said. The programs of the preset `fuzz` are taken if they are built,
else those of `dev`. With --parts N each target runs N times, with the seeds 1 to N, and its executions are divided among these
runs: a machine with many cores does in minutes what takes one core hours.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import seeds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FUZZ = ROOT / "build" / "fuzz"  # also of the preset
# What one input may take at most. Time is the wall's, and other processes may be at work.
LIMITS = ("-timeout=60", "-rss_limit_mb=1024")
ORDER_TARGETS = ("control", "message", "order_log")  # as in CMakeLists.txt
JSON_TARGETS = ("safetensors", "index", "config", "tokenizer", "request")
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=66:malloc_context_size=1:quarantine_size_mb=4:max_malloc_fill_size=64",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(seeds.TARGETS))
    parser.add_argument("--seconds", type=int, help="each run at most (default: 10, without --executions)")
    parser.add_argument("--executions", type=int, help="of each target")
    parser.add_argument("--parts", type=int, default=1, help="runs of each target, each with a seed of its own (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="targets that run at a time (default: 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="begin from build/fuzz/corpus, and leave it larger")
    parser.add_argument("--input", type=Path, help="run this input alone")
    fast = FUZZ / "bin" if (FUZZ / "bin").is_dir() else ROOT / "build" / "dev" / "bin"
    parser.add_argument("--bin", type=Path, default=fast, help="where the programs are")
    given = parser.parse_args()
    unknown = set(given.targets) - set(seeds.TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(seeds.TARGETS)}")
    targets = given.targets or seeds.TARGETS
    built = {path.stem.removesuffix("_fuzz") for path in HERE.glob("*_fuzz.cpp")}
    if built != set(seeds.TARGETS):
        parser.error(f"seeds.py and *_fuzz.cpp name different targets: {', '.join(sorted(built ^ set(seeds.TARGETS)))}")
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        parts = [(target, part) for part in range(given.parts) for target in targets]
        ended = list(pool.map(lambda target_and_part: run(*target_and_part, given), parts))
    print(f"{sum(ended)} passed, {len(ended) - sum(ended)} failed")
    return 0 if all(ended) else 1


def run(target, part, given):
    """Whether it found nothing. `part`: of `given.parts`, from 0 on."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        return _run_in(folder, target, part, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder, target, part, given):
    found = _made(FUZZ / "findings" / target)
    program = "poise_fuzz_orders" if target in ORDER_TARGETS else "poise_fuzz_files"
    words = [given.bin.resolve() / program, f"-artifact_prefix={found}/", *LIMITS]
    if given.input:
        words.append(given.input.resolve())
    else:
        words += [f"-runs={-(-given.executions // given.parts)}"] if given.executions else []
        words += [f"-max_total_time={given.seconds or 10}"] if given.seconds or not given.executions else []
        words += [f"-seed={given.seed + part}", "-print_final_stats=1", "-print_funcs=0", "-reload=0", "-entropic=0", f"-max_len={seeds.LARGEST}"]
        words += [f"-dict={HERE / 'json.dict'}"] if target in JSON_TARGETS else []
        words += corpora(folder, target, given.keep)
    environment = {**os.environ, **SANITIZERS, "TMPDIR": str(folder), "POISE_FUZZ_TARGET": target}
    if given.input:  # slower, and tells where memory came from
        environment["ASAN_OPTIONS"] += ":malloc_context_size=12"
    log = _made(FUZZ / "logs") / (f"{target}.log" if given.parts == 1 else f"{target}-{part + 1}.log")
    with open(log, "wb") as out:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        process.wait()
    said = log.read_text(errors="replace")
    for left in Path("/dev/shm").glob(f"poise-{os.geteuid()}-f{process.pid:x}-*"):
        left.unlink(missing_ok=True)
    tell(target, said, process.returncode)
    return process.returncode == 0


def corpora(folder, target, keep):
    """The folder that grows, then the one with the seeds."""
    start = folder / "seeds"
    start.mkdir()
    for name, content in seeds.of(target).items():
        (start / re.sub(r"\W", "_", name)).write_bytes(content)
    return [_made(FUZZ / "corpus" / target if keep else folder / "grown"), start]


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tell(target, said, code):
    figures = {name: int(value) for name, value in re.findall(r"^stat::(\w+): +(\d+)", said, re.MULTILINE)}
    covered = re.findall(r"cov: (\d+)", said)
    line = f"{target}: {figures.get('number_of_executed_units', 0):,} executions, {figures.get('average_exec_per_sec', 0):,} a second"
    line += f", {covered[-1]} edges, {figures.get('peak_rss_mb', 0)} MiB" if covered else ""
    print(line if code == 0 else f"{line}: FAILED with {code}\n{_end_of(said)}", flush=True)


def _end_of(said):
    """The report without what libFuzzer told of its progress."""
    lines = [line for line in said.splitlines() if not re.match(r"#\d+\s|INFO:|stat::|MS: |0x[0-9a-f]{2},|\[2|.*(libFuzzer|NOTE:|fuzzer::|__libc_start|Dictionary:)", line)]
    return "\n".join("  " + line for line in lines[-60:])


if __name__ == "__main__":
    sys.exit(main())

"""The sections of gpu_check.py. Each records its results, and reports nothing as passed that it did not check."""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_SIDE_BY_SIDE = 4  # golden models
_POLICIES = (
    ("kv-only", ("--policy", "kv-only")),
    ("act-only, small mini-batches", ("--policy", "act-only", "--mini-batch-tokens", "256")),
    ("mixed", ("--policy", "hybrid", "--act-share", "0.5")),
    ("mixed, few at a time", ("--policy", "hybrid", "--act-share", "0.3", "--max-num-seqs", "7")),
)


def _last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def tests(bench):
    programs = sorted(bench.bin.glob("poise_*cuda*_tests"))
    if not programs:
        bench.note("CUDA tests", False, f"no CUDA test program in {bench.bin}: build them, or bundle --with-tests")
    for program in programs:
        code, text = bench.run([program, "--gtest_brief=1"])
        count = {
            name: sum(map(int, re.findall(rf"^\[  {name} *\] (\d+) test", text, re.MULTILINE)))
            for name in ("PASSED", "SKIPPED", "FAILED")
        }
        told = f"{count['PASSED']} passed, {count['FAILED']} failed, {count['SKIPPED']} skipped"
        good = code == 0 and count["PASSED"] > 0 and not count["FAILED"]
        # Skipped are tests that found no GPU.
        ok = None if code is None else good and not (bench.given.device == "cuda" and count["SKIPPED"])
        bench.note(program.name, ok, told if code is not None else f"ran out of time; {told}", **count)


def goldens(bench):
    script = bench.root / "tests" / "e2e" / "goldens.py"
    if not script.exists():
        bench.note("goldens", None, "not in this bundle: bundle --with-tests")
        return
    _, text = bench.run([sys.executable, "-s", script, "--list"])
    names = [line for line in text.splitlines() if line.endswith("_equals_huggingface")]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:  # most of each is the start of its processes
        ended = list(pool.map(lambda name: bench.run([sys.executable, "-s", script, name]), names))
    passed = sum(code == 0 and bool(re.search(r"^1 passed, 0 failed$", text, re.MULTILINE)) for code, text in ended)
    late = sum(code is None for code, _ in ended)
    told = f"{passed} of {len(names)} passed" + (f", {late} ran out of time" if late else "")
    bench.note("models equal HuggingFace", None if late else 0 < passed == len(names), told, passed=passed)


# Decoding rows that blocks share, products of few rows, and rotated heads.
_SANITIZED = ":".join(
    (
        "CudaAttentionBits.OfAFewRowsThatBlocksShare",
        "CudaGemm.OurKernelMultipliesAFewRows",
        "CudaRotate.OfARowHasTheSameBitsAloneAndAmongOthers",
    )
)


def demo(bench):
    """The demo model's questions: right answers, and the same ones under every policy."""
    folder, first = bench.root / "launch" / "demo", None
    for number, (name, options) in enumerate(_POLICIES):
        output = bench.folder / f"demo-{number}.jsonl"
        words = ["run", "--model", folder / "model", "-i", folder / "questions.jsonl", "-o", output]
        code, text = bench.poise(*words, "--device", bench.given.device, *options)
        if code != 0:
            bench.note(name, None if code is None else False, _last_line(text))
            continue
        code, text = bench.run([sys.executable, "-s", folder / "score.py", output, "--at-least", "100"])
        answers = _answers(output)
        first = first or answers
        same = answers == first
        told = _last_line(text) + (", all as with the first policy" if same else ", and NOT as with the first policy")
        bench.note(name, code == 0 and same, told)
        code, text = bench.poise("replay", f"{output}.poise", "--device", bench.given.device)
        bench.note(f"{name}, replayed", None if code is None else code == 0, _last_line(text))


def _answers(path):
    found = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        found[result["custom_id"]] = result["response"]["body"]["choices"][0]["text"]
    return found


def sanitizer(bench):
    """The executor under compute-sanitizer, on the demo model, with KV and ACT blocks and several mini-batches; and the
    kernels that such short contexts and small weights do not reach.

    Without the supervisor, which would not wait for a tool: the planner itself then tells the executor to end."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    for check in ("memcheck", "racecheck"):
        if tool is None:
            bench.note(check, None, "there is no compute-sanitizer here")
            continue
        prefix = [tool, "--tool", check, "--error-exitcode", "86"]
        _note_sanitized(bench, check, *_sanitized_run(bench, prefix))
        if bench.given.device == "cuda":
            command = [*prefix, bench.bin / "poise_kernels_cuda_tests", "--gtest_brief=1", f"--gtest_filter={_SANITIZED}"]
            code, text = bench.run(command)
            if code == 0 and f"[  PASSED  ] {_SANITIZED.count(':') + 1} tests" not in text:
                code, text = 1, "not all of its tests ran"
            _note_sanitized(bench, f"{check}, kernels", code, text)


def _note_sanitized(bench, name, code, text):
    errors = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    if re.search(r"Device not supported", text):
        bench.note(name, None, "compute-sanitizer does not support this device")
    elif errors is None:
        bench.note(name, None if code is None else False, f"no summary; ended with {code}: {_last_line(text)}")
    else:
        count = int(errors.group(1) or errors.group(2))
        bench.note(name, code == 0 and count == 0, f"{errors.group(0)}, ended with {code}", errors=count)


def _sanitized_run(bench, prefix):
    run_id, folder = secrets.token_hex(8), bench.folder / f"sanitized-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    model = bench.root / "launch" / "demo" / "model"
    lines = (bench.root / "launch" / "demo" / "questions.jsonl").read_text().splitlines()[:24]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run").mkdir(mode=0o700)
    loader_words = ["--model", model, "--home", folder, "--run-id", run_id]
    planner_words = ["--run-dir", folder / "run", "--run-id", run_id, "--loader-socket", folder / "loader.sock"]
    planner_words += ["--executor-socket", folder / "run" / "executor.sock", "--model", model, "-i", folder / "in.jsonl"]
    planner_words += ["-o", folder / "out.jsonl", "--policy", "hybrid", "--act-share", "0.5", "--mini-batch-tokens", "128"]
    others, said = [], open(folder / "others.log", "w+")
    try:
        others.append(_start(bench, "poise-loader", loader_words, said))
        until = time.monotonic() + 60
        while not (folder / "loader.sock").exists() and time.monotonic() < until and others[0].poll() is None:
            time.sleep(0.05)
        others.append(_start(bench, "poise-planner", planner_words, said))
        executor = [bench.bin / "poise-gpu-executor", "--run-id", run_id]
        executor += ["--planner-socket", folder / "run" / "executor.sock", "--device", bench.given.device]
        code, text = bench.run([*prefix, *executor])
        finished = others[1].wait(60) if code == 0 else None
        answers = (folder / "out.jsonl").read_text().count("\n") if finished == 0 else 0
        said.seek(0)
        if code == 0 and answers != len(lines):
            return 1, f"{text}\n{said.read()}\nthe run gave {answers} answers of {len(lines)}"
        return code, text
    except subprocess.TimeoutExpired:
        return 1, "the planner did not end"
    finally:
        for process in others:
            process.send_signal(signal.SIGTERM) if process.poll() is None else None
        for process in others:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        said.close()
        from supervisor.lifecycle import segments

        segments.unlink_all(run_id)


def _start(bench, name, words, said):
    command = [str(word) for word in (bench.bin / name, *words)]
    return subprocess.Popen(command, env=bench.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


def _works(bench):
    wanted = bench.given.works.split(",") if bench.given.works else list(bench.works["works"])
    for name in wanted:
        if name not in bench.works["works"]:
            sys.exit(f"there is no work {name}; there are: {', '.join(bench.works['works'])}")
    return [(name, bench.works["works"][name]) for name in wanted]


def speed(bench):
    """`poise bench` on each work; the loader of a model stays for its policies."""
    given = bench.given
    peaks = _peaks(bench)
    for name, work in _works(bench):
        model = bench.folder / name
        model.mkdir(exist_ok=True)
        shutil.copy(bench.root / "bench" / work["config"], model / "config.json")
        profile = _profile(bench, name, model)
        for variant in work["poise"]:
            if given.variants and not variant["name"].startswith(tuple(given.variants.split(","))):
                continue
            title = f"{name} {variant['name']}"
            output = bench.folder / "figures.json"
            words = ["bench", "--model", model, "--load-format", "dummy", "--served-model-name", name, "--device", given.device]
            words += ["--num-prompts", variant.get("num_prompts", work["num_prompts"]), "--input-len", work["input_len"]]
            answers = given.output_len or variant.get("output_len", work["output_len"])
            words += ["--output-len", answers, "--max-num-seqs", variant.get("num_prompts", work["num_prompts"])]
            words += ["--gpu-memory", bench.works["gpu_memory"], "--host-memory", bench.works["host_memory"], "--keep-loader"]
            words += ["--output-json", output, "--runs", given.runs, *variant["options"], *shlex.split(given.options)]
            words += ["--profile", profile] if profile else []
            for option, peak in (("--link-peak", "link_gbps"), ("--compute-peak", "tflops")):
                words += [option, peaks[peak]] if peak in peaks else []
            if given.trace:
                words += ["--trace", bench.results / f"{title.replace(', ', '-').replace(' ', '-')}.trace.json.gz"]
            output.unlink(missing_ok=True)
            code, text = bench.poise(*words)
            if code == 0 and output.exists():
                figures = json.loads(output.read_text())
                decode = figures["phases"]["decode"]
                told = f"{decode['sampled_tokens_per_second']:.1f} tokens/s in decode" if decode else "no iteration without prompts"
                bench.note(title, True, told, work=name, system=f"poise {variant['name']}", figures=figures)
            else:
                bench.note(title, None if code is None else False, _last_line(text), work=name)
        bench.poise("stop")


def _profile(bench, name, model):
    """What everything costs with this model here: policies decide by it, and runs show their times beside its predictions."""
    given, kept = bench.given, bench.results / f"profile-{name}.json"
    common = ["--model", model, "--load-format", "dummy", "--host-memory", bench.works["host_memory"]]
    bench.poise("load", *common)
    if kept.exists():  # of an earlier call, whose results these are gathered with
        return kept
    memory = ["--gpu-memory", bench.works["gpu_memory"]]
    code, text = bench.poise("profile", *common, *memory, "--device", given.device, "-o", kept)
    if code != 0 or not kept.exists():
        bench.note(f"{name} profile", None if code is None else False, _last_line(text))
        return None
    lines = {key: value for key, value in json.loads(kept.read_text()).items() if isinstance(value, dict) and "r2" in value}
    worst = min(lines, key=lambda line: lines[line]["r2"], default=None)
    told = f"{len(lines)} lines" + (f", R² of {worst} {lines[worst]['r2']:.3f}, of the others more" if worst else "")
    bench.note(f"{name} profile", bool(lines), told)
    return kept


def _peaks(bench):
    """The machine's peaks: the given ones, otherwise torch's; {} if there are neither."""
    given, output = bench.given, bench.folder / "peaks.json"
    told = {"link_gbps": given.link_peak} if given.link_peak else {}
    if given.device != "cuda":
        return told
    code, text = bench.run([given.peer_python, bench.root / "bench" / "peers" / "machine_peaks.py", "--json", output])
    if code != 0 or not output.exists():
        bench.note("peaks", None, f"ended with {code}: {_last_line(text)}")
        return told
    peaks = json.loads(output.read_text())
    told = f"{peaks['tflops']:.0f} TFLOP/s, fp16, {peaks['size']}^3, {peaks['tflops_without_rest']:.0f} without rest; {peaks['link_gbps']:.2f} GB/s from pinned memory; through torch"
    bench.note("peaks", True, told, peaks=peaks)
    return peaks | ({"link_gbps": given.link_peak} if given.link_peak else {})


def peers(bench):
    """The same works, one system after the other, under the same cap on the GPU's memory."""
    from supervisor.shared import quantities

    given, here = bench.given, bench.root / "bench" / "peers"
    cap, host = (quantities.size(bench.works[name]) for name in ("gpu_memory", "host_memory"))
    for name, work in _works(bench):
        answers = given.output_len or work["output_len"]
        shape = ["--input-len", work["input_len"], "--output-len", answers]
        if "flexgen" in given.peers.split(","):
            for settings in work["flexgen"]:
                percent = [str(number) for number in settings["percent"]]
                batch = f"{settings['gpu_batch_size']}x{settings['num_gpu_batches']}"
                words = [here / "flexgen_run.py", "--gpu-memory", cap]
                words += ["--wheel", given.flexgen_wheel] if given.flexgen_wheel else []
                theirs = ["--model", f"facebook/{name}", "--percent", *percent, "--gpu-batch-size", settings["gpu_batch_size"]]
                theirs += ["--num-gpu-batches", settings["num_gpu_batches"]]
                theirs += ["--prompt-len", work["input_len"], "--gen-len", answers]
                told = f"FlexGen {batch}, {percent[0]} % of weights resident"
                _peer(bench, name, told, words, ["--", *theirs])
        if "transformers" in given.peers.split(","):
            words = [here / "transformers_run.py", "--config", bench.root / "bench" / work["config"], "--gpu-memory", cap]
            words += ["--host-memory", host, "--num-prompts", work["num_prompts"], *shape]
            words += ["--batches", *work["transformers"]["batches"], "--seconds", work["transformers"]["seconds"]]
            _peer(bench, name, "transformers, offloaded cache", words, [])


def _peer(bench, work, system, words, behind):
    output = bench.folder / "peer.json"
    output.unlink(missing_ok=True)
    from supervisor.measure.memory_watch import MemoryWatch

    with MemoryWatch() as watch:
        code, text = bench.run([bench.given.peer_python, *words, "--json", output, *behind])
    title = f"{work} {system}"
    if code == 0 and output.exists():
        figures = json.loads(output.read_text()) | {"host_peak_bytes": watch.host, "gpu_peak_by_driver_bytes": watch.device}
        told = f"{figures['decode_tokens_per_second']:.1f} tokens/s in decode"
        bench.note(title, True, told, work=work, system=system, peer=figures)
    else:  # a peer that cannot is no failure of ours
        bench.note(title, None, f"ended with {code}: {_last_line(text)}", work=work)

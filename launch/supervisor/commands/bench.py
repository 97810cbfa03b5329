"""`poise bench`: makes requests, runs them as `poise run` does, and reads the speed from the run's record.

Flags and JSON keys are those of vLLM's throughput benchmark where the meaning is the same. Figures: measure/figures.py.
"""

import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from ..lifecycle import inputs, loaders, scratch
from ..measure import bench_table, figures, stages
from ..measure.bench_options import bench_parser, run_words
from ..measure.bench_requests import make_requests, write_requests
from ..measure.memory_watch import MemoryWatch
from ..measure.record import Record, keeps_every_order, read_record
from ..shared import build_facts, machine
from ..shared.decoder_shape import decoder_shape
from ..shared.files import read_json
from ..shared.options import normalised
from ..shared.paths import ROOT, command_name
from ..shared.quantities import counted
from ..shared.trouble import DONE, INTERRUPTED, Refusal, brief, naming, nothing_kept, say, shown, tell

_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def bench(words):
    given = bench_parser().parse_args(normalised(words))
    given.output_len_given = given.output_len is not None
    given.output_len = given.output_len or 128
    for option, path in (("--output-json", given.output_json), ("--trace", given.trace)):
        if path:
            inputs.check_written(option, path)
    _check_what(given)
    with scratch.folder("bench") as folder:
        if given.stage is not None:
            return _stage(given, folder)
        _choose_model(given, folder)
        requests = make_requests(given, *_sizes_of(given))
        where = _where_runs_go(given, folder)
        write_requests(folder / "requests.jsonl", requests)
        runs = []
        for number in range(given.runs):
            run = _Run(given, folder / "requests.jsonl", requests, where / f"run-{number + 1}")
            code = run.go(folder / f"results-{number + 1}.jsonl", last=number + 1 == given.runs)
            if code != DONE:
                if given.run_dir is None:
                    nothing_kept("bench")
                return code
            runs.append(run.figures())
            tell(bench_table.throughput_line(runs[-1]))
        _conclude(given, requests, runs)
    return DONE


def _check_what(given):
    """RUN is for --stage; all else needs a model."""
    if given.stage is not None:
        return stages.take_run(given)
    if given.run is not None:
        raise Refusal(f"bench: {shown(given.run)}: a run is named for --stage alone (options: {command_name()} help bench)")
    if given.model is None and given.config is None:
        raise Refusal(f"bench: missing: --model DIR, or --config FILE (options: {command_name()} help bench)")


def _stage(given, folder):
    if given.model is not None or given.config is not None:
        _choose_model(given, folder)
    if given.stage == "planner":
        found, table = stages.planner(given, folder, _sizes_of)
    else:
        found, table = {"loader": stages.loader, "gpu_executor": stages.gpu_executor}[given.stage](given, folder)
    tell(table)
    _write_figures(given, {"stage": given.stage, **found, "machine": _machine()})
    return DONE


def _choose_model(given, folder):
    """--config FILE: a model of that shape, with dummy weights."""
    if given.config is not None:
        if not os.path.isfile(given.config):
            raise Refusal(f"--config {shown(given.config)}: no such file")
        # A kept loader outlives this command, and the next one is to find it by its model.
        made = loaders.folder_of_config(given.config) if given.keep_loader else folder / "model"
        if not (made / "config.json").exists():
            made.mkdir(exist_ok=True)
            shutil.copyfile(given.config, made / "config.json")
        given.model_name = given.served_model_name or Path(given.config).stem
        given.model, given.load_format = str(made), "dummy"
    else:
        given.model_name = given.served_model_name or given.model
    inputs.check_model(given.model)
    there = set(os.listdir(given.model))
    if not any(there.issuperset(files) for files in _TOKENIZERS):
        given.skip_tokenizer_init = True


def _sizes_of(given):
    """(tokens of the vocabulary, positions)."""
    config = read_json(Path(given.model) / "config.json")
    try:
        positions = config["max_position_embeddings"] if "max_position_embeddings" in config else config["n_positions"]
        vocabulary, positions = int(config["vocab_size"]), int(positions)
    except (KeyError, TypeError, ValueError):
        name = shown(given.config or Path(given.model) / "config.json")
        raise Refusal(f"{name}: no JSON object, or vocab_size and max_position_embeddings are missing in it") from None
    return vocabulary, min(positions, given.max_model_len or positions)


def _matrix_entries(model):
    """Entries of all layers' matrices."""
    shape = decoder_shape(read_json(Path(model) / "config.json"))
    return shape.layers * shape.layer_entries()


def _where_runs_go(given, folder):
    if given.run_dir is None:
        return folder
    os.makedirs(given.run_dir, exist_ok=True)
    return Path(os.path.abspath(given.run_dir))


class _Run:
    """One run of the requests, and its record."""

    def __init__(self, given, requests_file, requests, directory):
        self._given, self._requests = given, requests
        self._file, self._directory = requests_file, directory
        self._watch = MemoryWatch(directory)

    def go(self, output, last):
        given = self._given
        command = [sys.executable, "-s", str(ROOT / "launch" / "start.py"), "run"]
        command += run_words(given, given.model, self._file, output, self._directory, self._trace_file(last))
        with self._watch, subprocess.Popen(command) as process:
            before = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the run got the signal, too, and ends in order
                process.wait()
                return INTERRUPTED
            finally:
                signal.signal(signal.SIGTERM, before)
        if code != DONE:
            return code
        self._status = read_json(self._directory / "status.json")
        self._record = self._read_record(self._directory / "orders.log")
        return DONE

    def _read_record(self, log):
        """Without the iterations where the log does not have all of them: figures of a part would pass for those of the whole."""
        if keeps_every_order(log):
            return read_record(log)
        say("no figures by phase: --orders-log and --orders-log-size leave out what they are made of")
        return Record({}, {}, {}, [])

    def _trace_file(self, last):
        """Every run is traced, so that all are measured alike; the last one's timeline goes to --trace FILE."""
        if self._given.trace is None:
            return None
        if last and self._given.trace:
            return self._given.trace
        return "trace.json.gz" if last and self._given.run_dir is None else self._directory / "trace.json"

    def figures(self):
        status, record, watch = self._status, self._record, self._watch
        wanted = sum(answer for _, answer in self._requests)
        if status.get("errors") or status.get("generated_tokens") != wanted:
            raise Refusal(
                f"the run cannot be used as a measurement: {counted(status.get('errors'), 'error')}, "
                f"{counted(status.get('generated_tokens'), 'token')} generated of {wanted}",
                INTERRUPTED,
            )
        seconds, total = status["elapsed_seconds"], status["generated_tokens"] + sum(len(p) for p, _ in self._requests)
        peak, source = self._link_peak()
        return {
            "elapsed_time": seconds,
            "num_requests": len(self._requests),
            "total_num_tokens": total,
            "requests_per_second": len(self._requests) / seconds,
            "tokens_per_second": total / seconds,
            "output_tokens": wanted,
            "output_tokens_per_second": wanted / seconds,
            "prompt_tokens": sum(len(prompt) for prompt, _ in self._requests),
            "preemptions": status["preemptions"],
            "policy": status["policy"],
            "device": status["device"],
            "layers": status["layers"],
            "resident_layers": status["resident_layers"],
            "blocks": status["blocks"],
            "link_peak_bytes_per_second": peak,
            "link_peak_source": source,
            "compute_peak_flops_per_second": self._given.compute_peak and self._given.compute_peak * 1e12,
            "phases": figures.phases(record, peak, _matrix_entries(self._given.model)),
            "planner_shares": status["planner"],
            **{name: status.get(name) for name in ("predicted", "measured")},  # if there is a profile
            "device_memory_bytes": record.ready.get("device_bytes"),
            "device_memory_cap_bytes": record.configure.get("gpu_memory"),
            "device_memory_peak_by_driver_bytes": watch.device,
            "host_memory_peak_bytes": watch.host,
            "host_pool_bytes": status["host_pool_bytes"],
        }

    def _link_peak(self):
        """(bytes/s, where the figure comes from)."""
        if self._given.link_peak is not None:
            return self._given.link_peak * 1e9, "--link-peak"
        told = self._record.link_bytes_per_s
        if told and self._given.link_gbps is not None:
            return told, "--link-gbps"
        return (told, "measured by the device") if told else (None, "unknown")


def _conclude(given, requests, runs):
    """Reports the median run; the others are listed after it."""
    middle = sorted(runs, key=lambda run: run["elapsed_time"])[(len(runs) - 1) // 2]
    result = {
        **middle,
        "work": _work(given, requests),
        "machine": _machine(),
        "runs": [_brief(run) for run in runs],
    }
    if len(runs) > 1:
        rates = [run["output_tokens_per_second"] for run in runs]
        result["output_tokens_per_second_spread"] = (max(rates) - min(rates)) / statistics.median(rates)
    tell(bench_table.table(result))
    _write_figures(given, result)


def _write_figures(given, result):
    if given.output_json:
        with naming(given.output_json), open(given.output_json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
        say(f"{brief(given.output_json)} is written")


def _brief(run):
    decode = run["phases"]["decode"] or {}
    return {
        "elapsed_time": run["elapsed_time"],
        "output_tokens_per_second": run["output_tokens_per_second"],
        "decode_tokens_per_second": decode.get("sampled_tokens_per_second"),
        "decode_efficiency": decode.get("efficiency"),
    }


def _work(given, requests):
    prompts, answers = [len(prompt) for prompt, _ in requests], [answer for _, answer in requests]
    asked = ("dtype", "kv_cache_dtype", "load_format", "quantization", "pack_weights", "seed", "max_num_seqs", "min_num_seqs", "mini_batch_tokens", "prefill_tokens", "prompt_rows", "act_share")
    placing = ("schedule", "resident_layers", "percent", "gpu_blocks", "host_attention", "absorption")
    return {
        "model": given.model_name,
        "dataset": given.dataset_name,
        "num_prompts": len(requests),
        "input_len": [min(prompts), statistics.mean(prompts), max(prompts)],
        "output_len": [min(answers), statistics.mean(answers), max(answers)],
        "gpu_memory": given.gpu_memory,
        "host_memory": given.host_memory,
        **{name: getattr(given, name) for name in (*asked, "recompute_share", "machine", "profile", *placing)},
    }


def _machine():
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": build_facts.commit(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": machine.cores(),
        "memory_bytes": machine.total_memory(),
        "gpus": machine.gpus(),
    }


def _processor():
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()

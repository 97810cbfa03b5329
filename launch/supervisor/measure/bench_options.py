"""The options of `poise bench`, and the arguments of each `poise run` that it starts."""

from ..shared import quantities
from ..shared.options import add_loading, add_model, add_planning, add_running, orders_log_arguments, parser, planner_arguments
from .bench_requests import DATASETS
from .stages import STAGES


def bench_parser():
    made = parser(
        "bench",
        "Makes requests, runs them, and reports the speed beside the link's limit.\n\n"
        "Datasets as in vLLM's benchmark; prompts are token ids, answers have exactly the length asked for.",
    )
    made.add_argument("--stage", choices=STAGES, help="one process's work alone: reading, planning, or a run's orders replayed (--runs times)")
    made.add_argument("run", metavar="RUN", nargs="?", help="for --stage: the run whose model, requests or orders it works on")
    model = made.add_mutually_exclusive_group()
    add_model(model, required=False)
    model.add_argument("--config", metavar="FILE", help="a config.json: that shape with seeded random weights")
    made.add_argument("--dataset-name", choices=DATASETS, default="fixed", help="where prompts come from")
    made.add_argument("--dataset-path", metavar="FILE", help="for sharegpt: a JSON file in ShareGPT's format")
    made.add_argument("--num-prompts", type=quantities.count, default=128, metavar="N", help="requests (default: 128)")
    made.add_argument("--input-len", type=quantities.count, default=512, metavar="N", help="for fixed, random (default: 512)")
    made.add_argument("--output-len", type=quantities.count, metavar="N", help="default: 128; for sharegpt: as in the file")
    made.add_argument("--random-range-ratio", type=quantities.share, default=0.0, metavar="0..1", help="spread of lengths")
    for name, value in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        option = f"--prefix-repetition-{name}"
        made.add_argument(option, type=quantities.count, default=value, metavar="N", help=f"default: {value}")
    made.add_argument("--runs", type=quantities.count, default=1, metavar="N", help="how many runs; the median one is reported (default: 1)")
    made.add_argument("--output-json", metavar="FILE", help="all figures")
    made.add_argument("--link-peak", type=quantities.positive, metavar="GB/s", help="peak of the link, for the roofline")
    made.add_argument("--compute-peak", type=quantities.positive, metavar="TFLOP/s", help="peak of the device, printed beside prefill's rate")
    made.add_argument("--run-dir", metavar="DIR", help="keep the runs' directories there")
    add_planning(made)
    add_loading(made)
    add_running(made)
    return made


def run_words(given, model, requests, output, directory, trace):
    """The arguments of `run` with the same options; `trace`: the file, or None."""
    words = ["--model", model, "-i", requests, "-o", output, "--run-dir", directory]
    words += [*planner_arguments(given), "--device", given.device]
    for name in ("dtype", "load_format", "quantization", "pack_weights", "threads", "link_gbps", "compute_gflops", "host_threads", "host_gbps", "stall_timeout", "restarts"):
        if getattr(given, name):
            words += ["--" + name.replace("_", "-"), getattr(given, name)]
    words += orders_log_arguments(given)
    words += ["--keep-loader"] if given.keep_loader else []
    words += ["--trace", trace] if trace else []
    return [str(word) for word in words]

"""Options, each defined once: name, meaning, check. `_` may stand for `-`, `--name=value` for `--name value`."""

import argparse

from . import quantities
from .hub import model_folder
from .paths import command_name
from .trouble import RUN_ENDS, Refusal, shown, tell

_OF_THE_PLANNER = (
    *("policy", "act_share", "recompute_share", "machine", "profile"),
    *("schedule", "resident_layers", "percent", "gpu_blocks", "host_attention", "absorption"),
    *("max_num_seqs", "min_num_seqs", "mini_batch_tokens", "prefill_tokens", "prompt_rows", "prefix_sharing", "kv_cache_dtype"),
    *("max_model_len", "served_model_name", "gpu_memory", "host_memory"),
)
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "int4")
QUANTIZATIONS = ("auto", "none", "int8", "int4")


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence and exit code 2, also when the help text cannot be written."""

    only_made = False  # see parser_made_by

    def print_help(self, file=None):
        tell(self.format_help().rstrip("\n"))

    def error(self, message):
        message = message.replace("unrecognized arguments: ", "there is no option or argument ")
        message = message.replace("the following arguments are required: ", "missing: ")
        raise Refusal(f"{self.topic}: {message} (options: {command_name()} help {self.topic})")

    def parse_args(self, words):
        """Reports an unknown option before a missing one."""
        if self.only_made:
            raise _Made(self)
        self._check_options(words)
        return super().parse_args(words)

    def parse_mixed(self, words):
        """As parse_args, but arguments may stand on both sides of an option."""
        if self.only_made:
            raise _Made(self)
        self._check_options(words)
        return self.parse_intermixed_args(words)

    def _check_options(self, words):
        known = self._option_string_actions
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                import difflib  # pylint: disable=import-outside-toplevel

                near = difflib.get_close_matches(name, known, n=1)
                self.error(f"there is no option {shown(name)}{f'; did you mean {near[0]}?' if near else ''}")


def parser(command, description):
    made = _Parser(
        prog=f"poise {command}", description=description, allow_abbrev=False, formatter_class=_Formatter
    )
    made.topic = command
    return made


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=110)


def add_json(to):
    to.add_argument("--json", action="store_true", help="one JSON object on stdout")


def normalised(arguments):
    """vLLM's users write --host_memory as well as --host-memory."""
    result = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return result + arguments[index:]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def add_model(to, required=True):
    to.add_argument("--model", type=model_folder, required=required, metavar="DIR|NAME", help="a HuggingFace model directory, or a name on its hub: NAME/MODEL")


def add_loading(to):
    to.add_argument("--dtype", choices=DTYPES, default="auto", help="how weights and context are kept (auto: as stored)")
    to.add_argument(
        "--quantization", choices=QUANTIZATIONS, default="auto", help="int8 or int4: pack the layers' matrices while loading (auto: as the checkpoint has them)"
    )
    to.add_argument(
        "--pack-weights", choices=("auto", "off"), default="off", help="auto: bfloat16 weights of the layers in three quarters of their bytes, without loss, for models whose layers cross the link (default: off)"
    )
    to.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: seeded random weights, only config.json"
    )
    to.add_argument("--seed", type=quantities.seed, default=0, metavar="N", help="for sampling and for dummy weights")
    to.add_argument("--host-memory", type=quantities.size, metavar="SIZE", help="cap on host memory: 100GiB, 64GB")


def add_device(to):
    to.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    to.add_argument("--gpu-memory", type=quantities.size, metavar="SIZE", help="cap on the device's memory: 24GiB")
    to.add_argument("--threads", type=quantities.count, metavar="N", help="threads of the CPU device")
    to.add_argument("--link-gbps", type=quantities.positive, metavar="X", help="pace the CPU device's link: GB/s")
    to.add_argument("--compute-gflops", type=quantities.positive, metavar="X", help="pace the CPU device's computation")
    to.add_argument("--host-threads", type=quantities.count, metavar="N", help="threads that attend on host cores (default: as --threads; beside a GPU, as many as may be used but for one)")
    to.add_argument("--host-gbps", type=quantities.positive, metavar="X", help="pace those: GB/s of keys and values that they read")


def add_kv_cache(to):
    to.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="how keys and values are kept (auto: as --dtype says); changes answers"
    )


def add_planning(to):
    add_device(to)
    add_kv_cache(to)
    to.add_argument("--policy", metavar="NAME", help="how context is kept, one of `poise policies` (default: optimal, by costs that are measured once; on the CPU device kv-only)")
    to.add_argument("--act-share", type=quantities.share, metavar="0..1", help="share of ACT blocks, for hybrid and kvpr")
    to.add_argument(
        "--recompute-share", type=quantities.share, metavar="0..1", help="share of context kept as ids alone, for token-recompute"
    )
    to.add_argument("--schedule", metavar="NAME", help="column-by-column (default), or row-by-row, for kvpr: one mini-batch at a time")
    to.add_argument("--resident-layers", metavar="N", help="layers whose weights stay on the device (default: as many as fit)")
    to.add_argument(
        "--percent", metavar="W,W,C,C,A,A", help="FlexGen's shares of weights, context and activations, each on device and host: 20,80,0,100,100,0"
    )
    to.add_argument("--gpu-blocks", metavar="KINDS", help="of context, what the device may keep: all (default), act or none")
    to.add_argument(
        "--host-attention", choices=("auto", "off"), help="auto (default): host cores attend where the policy says so, as host-kv does; off: never"
    )
    to.add_argument("--absorption", choices=("off", "on"), help="on: rows of answers attend activations as they are; off (default): never")
    to.add_argument("--machine", metavar="NAME|FILE", help="whose costs optimal, hybrid and kvpr decide by: h200-pcie5, rtx4090-pcie4, …, or a file (launch/README.md)")
    to.add_argument("--profile", metavar="FILE", help="costs measured by `poise profile` (default: those it kept)")
    to.add_argument("--max-num-seqs", type=quantities.count, metavar="N", help="at most N requests at a time")
    to.add_argument("--min-num-seqs", type=quantities.count, metavar="N", help="at least N requests at a time, where `optimal` would take fewer")
    to.add_argument("--mini-batch-tokens", type=quantities.count, metavar="N", help="at most N tokens of context in a mini-batch")
    to.add_argument("--prefill-tokens", type=quantities.count, metavar="N", help="at most N rows of prompts in an iteration")
    to.add_argument(
        "--prompt-rows", metavar="N|auto", help="at most N of these rows beside requests that generate; auto (default): by costs, so that answers hide prompts"
    )
    to.add_argument("--prefix-sharing", choices=("on", "off"), help="whether prompts that begin alike are computed once, mostly in blocks of 16 tokens (default: off)")
    to.add_argument("--max-model-len", type=quantities.count, metavar="N", help="at most N tokens of prompt and answer together")
    to.add_argument("--served-model-name", metavar="NAME", help="`model` in results (default: as --model says); requests for others are errors")
    to.add_argument("--skip-tokenizer-init", action="store_true", help="prompts are token ids; `text` stays empty")


def add_files(to, output_required=True):
    to.add_argument(
        "-i", "--input-file", dest="input", required=True, nargs="+", action="extend", metavar="FILE", help="OpenAI batch lines: files, patterns, also .gz and .zst; - is standard input"
    )
    to.add_argument(
        "-o", "--output-file", dest="output", required=output_required, metavar="FILE", help="one result line for each; packed if it ends in .gz or .zst; - is standard output"
    )
    to.add_argument("--run-dir", metavar="DIR", help="state, logs, partial results (default: OUTPUT.poise)")
    to.add_argument("--resume", action="store_true", help="do only what is missing")
    to.add_argument("--overwrite", action="store_true", help="replace an existing output")
    to.add_argument("--verify", action="store_true", help="check the weights in shared memory against their digests, again and again")


def run_parser():
    made = parser(
        "run",
        "Answers every line of a file of requests.\n\nExit codes: " + ";\n".join(f"{code} {how}" for code, how in RUN_ENDS.items()) + ".",
    )
    add_model(made)
    add_files(made)
    add_planning(made)
    add_loading(made)
    add_running(made)
    made.add_argument(
        "--metrics-port", type=lambda text: quantities.count(text, 0, 65535), metavar="N", help="a page with curves at http://127.0.0.1:N/, and metrics for Prometheus at /metrics there; 0: any port that is free"
    )
    made.add_argument(
        "--metrics-linger", type=quantities.positive, default=None, metavar="SECONDS", help="with --metrics-port: after the end wait as long for the last counts to be read"
    )
    made.add_argument("--notify", metavar="CMD", help="a shell command for the end of the run; its environment says how that was (launch/README.md)")
    made.add_argument("--json", action="store_true", help="at the end one JSON object on stdout: how the run ended")
    return made


def serve_parser():
    made = parser(
        "serve",
        "Answers requests over HTTP until it is interrupted: OpenAI's completions and chat completions, whole or as streams.\n"
        "Its state lies in RUN; started again with the same one, it goes on with what it had accepted.",
    )
    add_model(made)
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where it listens (default: 127.0.0.1, this machine alone)")
    made.add_argument("--port", type=lambda text: quantities.count(text, 0, 65535), default=8000, metavar="N", help="default: 8000; 0: any that is free")
    made.add_argument("--api-key", metavar="KEY", help="clients must send it (default: POISE_API_KEY of the environment, or none)")
    made.add_argument("--run-dir", default="serve.poise", metavar="DIR", help="state and logs (default: serve.poise)")
    made.add_argument("--front", metavar="SOCKET", help="no HTTP: requests come from the program that holds stdin, over this ZeroMQ socket (python/README.md)")
    made.add_argument("--max-open-requests", type=quantities.count, default=4096, metavar="N", help="accepted at a time; more get 429 (default: 4096)")
    made.add_argument("--max-body", type=quantities.size, default=32 << 20, metavar="SIZE", help="of a request (default: 32MiB); larger ones get 413")
    made.add_argument("--max-file", type=quantities.size, default=512 << 20, metavar="SIZE", help="of an upload (default: 512MiB); larger ones get 413")
    made.add_argument("--client-timeout", type=quantities.positive, default=20.0, metavar="SECONDS", help="for the head of a request, and until its body must come at 64 KiB/s (default: 20)")
    made.add_argument("--drain-timeout", type=quantities.positive, default=30.0, metavar="SECONDS", help="for open requests when it is asked to end (default: 30)")
    add_planning(made)
    add_loading(made)
    add_running(made, restarts=1000, orders_log="off")
    return made


def add_running(to, restarts=0, orders_log=None):
    to.add_argument(
        "--restarts",
        type=quantities.count,
        default=restarts,
        metavar="N",
        help="processes replaced if they die; from 2 on a request that kills the gpu_executor becomes an error line",
    )
    to.add_argument("--keep-loader", action="store_true", help="keep the model in memory for later runs")
    to.add_argument(
        "--stall-timeout", type=quantities.positive, default=30.0, metavar="SECONDS", help="without progress: give up"
    )
    default = "full, which replays" if orders_log is None else orders_log
    to.add_argument("--orders-log", choices=("off", "tables", "full"), default=orders_log, help=f"what the log of orders keeps (default: {default})")
    to.add_argument("--orders-log-size", type=quantities.size, metavar="SIZE", help="limit of that log: the oldest orders are removed")
    if orders_log is not None:
        return
    to.add_argument(
        "--trace", nargs="?", const="", metavar="FILE", help="a timeline for ui.perfetto.dev (default: trace.json in RUN)"
    )


def orders_log_arguments(given):
    words = []
    for name in ("orders_log", "orders_log_size"):
        if getattr(given, name) is not None:
            words += ["--" + name.replace("_", "-"), str(getattr(given, name))]
    return words


def planner_arguments(given):
    """The options that are passed to the planner unchanged."""
    words = ["--seed", str(given.seed)]
    for name in _OF_THE_PLANNER:
        value = getattr(given, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    if given.skip_tokenizer_init:
        words.append("--skip-tokenizer-init")
    prompts = getattr(given, "chat_prompts", None)  # lifecycle/chat_prompts.py
    return words if prompts is None else [*words, "--chat-prompts", str(prompts)]


def loader_arguments(given):
    words = ["--model", given.model, "--dtype", given.dtype, "--load-format", given.load_format]
    words += ["--seed", str(given.seed), "--quantization", given.quantization, "--pack-weights", given.pack_weights]
    if given.host_memory is not None:
        words += ["--host-memory", str(given.host_memory)]
    return words


def executor_arguments(given):
    words = ["--device", given.device]
    for name in ("gpu_memory", "threads", "link_gbps", "compute_gflops", "host_threads", "host_gbps"):
        value = getattr(given, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


class _Made(Exception):
    """Carries a command's parser out of the command, which has done nothing yet."""

    def __init__(self, made):
        super().__init__()
        self.made = made


def parser_made_by(command):
    """The parser of a command, which every command makes first of all."""
    _Parser.only_made = True
    try:
        command()
    except _Made as caught:
        return caught.made
    finally:
        _Parser.only_made = False
    return None

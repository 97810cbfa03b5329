"""`poise plan`: what a run with the same arguments would do. poise-planner computes it; we print it as a table."""

import json

from ..lifecycle import ask_planner, chat_prompts, inputs, scratch
from ..lifecycle.sources import Sources
from ..shared import machine
from ..shared.options import add_files, add_loading, add_model, add_planning, add_running, normalised, parser
from ..shared.paths import profile_folder
from ..shared.quantities import bytes_text, counted, duration, rate_text
from ..shared.trouble import DONE, tell


def plan(words):
    made = parser(
        "plan",
        "What `run` with the same arguments would do, and how fast: needs config.json and the requests, no weights and no GPU.\n"
        "Costs are those of --machine NAME|FILE, of --profile FILE, or what `poise profile` kept of the model.",
    )
    add_model(made)
    add_files(made, output_required=False)
    add_planning(made)
    add_loading(made)
    add_running(made)
    made.add_argument("--json", action="store_true", help="one JSON object, in bytes and seconds")
    given = made.parse_args(normalised(words))
    inputs.check_model(given.model)
    sources = Sources(given.input)
    if given.device == "auto" and machine.gpus():
        given.device = "cuda"
    with scratch.folder("plan") as folder:
        given.input = sources.prepare(folder)
        given.chat_prompts = chat_prompts.prepare(given, folder)
        answer = ask_planner.ask(*ask_planner.plan_words(given), "--profile-dir", profile_folder())
    tell(answer.rstrip("\n") if given.json else text(json.loads(answer)))
    return DONE


def text(found):
    costs = "measured" if found["measured"] else "by a machine's constants"
    about = " (prompts' tokens estimated)" if found["estimated"] else ""
    blocks, memory = found["blocks"], found["memory"]
    weights = "" if found["weights"] == found["dtype"] else f" with {found['weights']} weights"
    kept = "" if found["kv_cache_dtype"] == "auto" else f", keys and values {found['kv_cache_dtype']}"
    lines = [
        f"{counted(found['requests'], 'request')}, {found['prompt_tokens']} prompt and up to {found['answer_tokens']} new tokens{about}",
        f"on {found['machine']}, costs {costs}; {found['dtype']}{weights}{kept}, policy {found['policy']}",
    ]
    if found["refused_lines"]:
        become = "becomes an error" if found["refused_lines"] == 1 else "become errors"
        lines.insert(1, f"{counted(found['refused_lines'], 'line')} {become} (of those that were checked)")
    lines += found["notes"]
    host, gpu = memory["host"], memory["gpu"]
    lines += _table("host memory", [
        ("weights", host["weights"], ""),
        ("ACT blocks", host["act_blocks"], _in_each(blocks["act"], found)),
        ("KV blocks", host["kv_blocks"], _in_each(blocks["kv"], found)),
    ], host["allowed"])  # fmt: skip
    lines += _table("GPU memory", [(one["name"], one["bytes"], one["what"]) for one in gpu["lines"]], gpu["allowed"])
    each, whole = found["decode_iteration_bytes"], found["bytes"]
    lines.append("predicted")
    if found["decoding_at_a_time"]:  # else every answer is one token, which the prefill computes
        lines.append(
            f"  {'decoding iteration':22} {rate_text(found['decode_iteration_seconds'] * 1e3):>10} ms, {counted(found['decoding_at_a_time'], 'request')} at a "
            f"time: {rate_text(found['decode_tokens_per_second'])} tokens/s; over the link {_bytes(each)}"
        )
    lines += [
        f"  {'prefill':22} {rate_text(found['prefill_tokens_per_second']):>10} tokens/s, {duration(found['prefill_seconds'])} in all",
        f"  {'whole run':22} {rate_text(found['tokens_per_second']):>10} tokens/s, {duration(found['seconds'])}; over the link "
        f"{_bytes(whole)}",
    ]
    return "\n".join(lines)


def _in_each(count, found):
    return f"{counted(count, 'block')} in each of {counted(found['layers'], 'layer')}"


def _bytes(by_class):
    return ", ".join(f"{name} {bytes_text(count)}" for name, count in by_class.items() if count) or "nothing"


def _table(title, rows, allowed):
    total = sum(size for _, size, _ in rows)
    lines = [f"  {name:22} {bytes_text(size):>12}  {what}".rstrip() for name, size, what in rows if size]
    return [title, *lines, f"  {'total':22} {bytes_text(total):>12}  of {bytes_text(allowed)}"]

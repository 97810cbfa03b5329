"""`poise plan`: what a run of the same arguments would do, told as a table. The planner reckons; here it is read."""

import json
import subprocess

from . import inputs
from .options import add_files, add_loading, add_model, add_planning, add_running, normalised, parser, planner_arguments
from .places import PLANNER, profile_folder, program
from .quantities import bytes_text, duration
from .trouble import DONE, Refusal, tell


def plan(words):
    made = parser(
        "plan",
        "What `run` with the same arguments would do, and how fast: needs config.json and the requests, no weights and no GPU.\n"
        "Costs are those of --machine NAME, of --profile FILE, or what `poise profile` kept of the model.",
    )
    add_model(made)
    add_files(made, output_required=False)
    add_planning(made)
    add_loading(made)
    add_running(made)
    made.add_argument("--json", action="store_true", help="one JSON object, in bytes and seconds")
    given = made.parse_args(normalised(words))
    inputs.check_model(given.model)
    inputs.check_input(given.input)
    command = [str(program(PLANNER)), "plan", "--model", given.model, "-i", given.input, "--dtype", given.dtype]
    command += [*planner_arguments(given), "--profile-dir", str(profile_folder())]
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        sentence = said[-1].removeprefix("poise-planner: ") if said else f"poise-planner ended with {asked.returncode}"
        raise Refusal(sentence, asked.returncode if asked.returncode > 0 else 70)
    tell(asked.stdout.rstrip("\n") if given.json else text(json.loads(asked.stdout)))
    return DONE


def text(found):
    costs = "measured" if found["measured"] else "by a machine's constants"
    about = " (prompts' tokens estimated)" if found["estimated"] else ""
    blocks, memory = found["blocks"], found["memory"]
    lines = [
        f"{found['requests']} requests, {found['prompt_tokens']} prompt and up to {found['answer_tokens']} new tokens{about}",
        f"on {found['machine']}, costs {costs}; {found['dtype']}, policy {found['policy']}",
    ]
    if found["refused_lines"]:
        lines.insert(1, f"{found['refused_lines']} lines become errors, as far as that was looked at")
    host, gpu = memory["host"], memory["gpu"]
    lines += _table("host memory", [
        ("weights", host["weights"], ""),
        ("ACT blocks", host["act_blocks"], f"{blocks['act']} blocks in each of {found['layers']} layers"),
        ("KV blocks", host["kv_blocks"], f"{blocks['kv']} blocks in each of {found['layers']} layers"),
    ], host["allowed"])  # fmt: skip
    lines += _table("GPU memory", [(one["name"], one["bytes"], one["what"]) for one in gpu["lines"]], gpu["allowed"])
    each, whole = found["decode_iteration_bytes"], found["bytes"]
    lines.append("predicted")
    if found["at_a_time"]:  # else every answer is one token, which its prompt brings
        lines.append(
            f"  {'decoding iteration':22} {found['decode_iteration_seconds'] * 1e3:10.4g} ms, {found['at_a_time']} requests at a "
            f"time: {found['decode_tokens_per_second']:.4g} tokens/s; over the link {_bytes(each)}"
        )
    lines += [
        f"  {'prefill':22} {found['prefill_tokens_per_second']:10.4g} tokens/s, {duration(found['prefill_seconds'])} in all",
        f"  {'whole run':22} {found['tokens_per_second']:10.4g} tokens/s, {duration(found['seconds'])}; over the link "
        f"{_bytes(whole)}",
    ]
    return "\n".join(lines)


def _bytes(by_class):
    return ", ".join(f"{name} {bytes_text(count)}" for name, count in by_class.items() if count) or "nothing"


def _table(title, rows, allowed):
    total = sum(size for _, size, _ in rows)
    lines = [f"  {name:22} {bytes_text(size):>12}  {what}".rstrip() for name, size, what in rows if size]
    return [title, *lines, f"  {'total':22} {bytes_text(total):>12}  of {bytes_text(allowed)}"]

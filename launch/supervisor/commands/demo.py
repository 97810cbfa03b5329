"""`poise demo`: set-up, build, and a few prompts answered by the bundled model as `poise run` does it."""

import json
import os

from ..development.setup import add_install_option, build_programs
from ..lifecycle import scratch
from ..shared.options import normalised, parser
from ..shared.paths import ROOT, command_line, is_bundle
from ..shared.trouble import DONE, Refusal, brief, nothing_kept, say, shown, tell
from . import run

_MODEL = ROOT / "launch" / "demo" / "model"
_PROMPTS = ROOT / "launch" / "demo" / "show.jsonl"


def demo(words):
    made = parser("demo", "Sets up, builds, and answers a few prompts with the bundled tiny model.")
    add_install_option(made)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    given = made.parse_args(normalised(words))
    if not os.environ.get("POISE_BIN") and not is_bundle():
        build_programs()
    with scratch.folder("demo") as folder:
        output = os.path.join(folder, "answers.jsonl")
        code = run.run(["--model", str(_MODEL), "-i", str(_PROMPTS), "-o", output, "--device", given.device])
        if code != DONE:
            nothing_kept("demo")
            return code
        _print_answers(output)
    model, prompts = (brief(path) for path in (_MODEL, _PROMPTS))
    tell("\nNext, your own requests (OpenAI batch lines) and your own model:")
    tell("  " + command_line("run", "--model", model, "-i", prompts, "-o", "results.jsonl"))
    tell("What was ordered, layer by layer:")
    tell("  " + command_line("inspect", "results.jsonl.poise"))
    return DONE


def _print_answers(output):
    with open(output, encoding="utf-8") as file:
        results = {result["custom_id"]: result for result in map(json.loads, file)}
    with open(_PROMPTS, encoding="utf-8") as file:
        requests = [json.loads(line) for line in file if line.strip()]
    for request in requests:
        body = results[request["custom_id"]]["response"]["body"]
        if "error" in body:
            raise Refusal(f"the demo's request {shown(request['custom_id'])} was refused: {body['error']['message']}")
        tell("")
        for line in (request["body"]["prompt"] + body["choices"][0]["text"]).splitlines():
            tell("  " + line)
    say(f"{len(requests)} prompts answered")

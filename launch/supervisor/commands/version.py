"""`poise version`."""

import json

from ..shared import build_facts
from ..shared.options import add_json, parser
from ..shared.trouble import DONE, tell


def version(words):
    made = parser("version", "Prints the version.")
    add_json(made)
    given = made.parse_args(words)
    commit = build_facts.commit()
    if given.json:
        tell(json.dumps({"version": build_facts.version(), "commit": commit or None}))
    else:
        tell(f"poise {build_facts.version()}{f' ({commit})' if commit else ''}")
    return DONE

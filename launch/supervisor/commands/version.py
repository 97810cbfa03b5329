"""`poise version`."""

from ..shared import build_facts
from ..shared.options import parser
from ..shared.trouble import DONE, tell


def version(words):
    parser("version", "Prints the version.").parse_args(words)
    commit = build_facts.commit()
    tell(f"poise {build_facts.version()}{f' ({commit})' if commit else ''}")
    return DONE

"""Models by their name on HuggingFace's hub: found in its local cache, or fetched by `huggingface_hub` where Python has it.

The cache is laid out as huggingface_hub does it: models--ORG--NAME/ with refs/main, which holds a commit, and snapshots/COMMIT/.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from .trouble import Refusal, shown

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What poise reads of a model. A repository may have the same weights in other forms, too.
_WANTED = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*", "merges.txt", "vocab.txt")
_LACKS = 86  # the exit code of a Python without huggingface_hub
_FETCH = f"""
import sys
try:
    from huggingface_hub import snapshot_download
except ImportError:
    sys.exit({_LACKS})
snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])
"""


class ModelFolder(str):
    """The folder of a model that was named otherwise."""

    def __new__(cls, folder, hub_name):
        made = super().__new__(cls, folder)
        made.hub_name = hub_name
        return made


def model_folder(given):
    """The folder that `--model` means. What is no name on the hub stays as it is: later checks say what is wrong with it."""
    if os.path.lexists(given) or not _NAME.fullmatch(given):
        return given
    folder = cached(given)
    if folder is None:
        _fetch(given)
        folder = cached(given)
        if folder is None:
            raise Refusal(f"--model {shown(given)}: what the hub has of it is no model in safetensors files, the format that poise reads")
    return ModelFolder(folder, given)


def cache():
    """Where huggingface_hub keeps what it fetched."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def cached(name):
    """The snapshot of `name` that is in the cache with all of its weights, or None."""
    repository = cache() / f"models--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        index = snapshot / "model.safetensors.index.json"
        whole = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    if not (snapshot / "config.json").exists() or not all((snapshot / file).exists() for file in whole):
        return None
    return str(snapshot) if whole or any(snapshot.glob("*.safetensors")) else None


def _fetch(name):
    """By a process of its own: the library brings threads, and prints its progress."""
    begin = f"--model {shown(name)}: there is no folder of that name, and HuggingFace's cache ({shown(cache())}) does not have it whole"
    remedy = f"fetch it where there is a network (hf download {shown(name)}), and name its folder"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise Refusal(f"{begin}; HF_HUB_OFFLINE forbids fetching it: {remedy}")
    words = [sys.executable, "-s", "-c", _FETCH, name, *_WANTED]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if ended.returncode == _LACKS:
        raise Refusal(f"{begin}; to fetch it {shown(sys.executable)} needs huggingface_hub (pip install huggingface_hub), or {remedy}")
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()] or [f"it ended with {ended.returncode}"]
        raise Refusal(f"{begin}; fetching it fails ({shown(said[-1])[:300]}): {remedy}")

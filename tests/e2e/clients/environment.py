"""The environment of the scripts in this folder, build/python-venv: made the first time, by the script that comes first."""

import fcntl
import os
import subprocess
import sys

from harness import ROOT

FOLDER = ROOT / "build" / "python-venv"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_PACKAGES = (
    *("jinja2>=3.1.6", "pyzmq>=25", "tqdm>=4.60"),  # the package's own; transformers renders chats with no older jinja2
    *("scikit-build-core>=0.10", "pandas>=2", "pyarrow>=14", "pyyaml", "requests", "attrs", "packaging", "typing_extensions"),
)
# lm-evaluation-harness and what it imports for the tasks here. It names twice as much (scikit-learn, nltk …), which takes as long again.
_HARNESS = (
    *("lm-eval==0.4.13", "datasets==5.2.0", "dill", "multiprocess", "xxhash", "fsspec", "filelock"),
    *("pytablewriter", "DataProperty", "mbstrdecoder", "pathvalidate", "tabledata", "tcolorpy", "typepy", "chardet"),
    *("sacrebleu", "portalocker", "tabulate", "regex", "lxml", "colorama"),
    *("transformers==5.24.0", "tokenizers==0.23.3", "safetensors"),
    *("huggingface_hub==2.4.0", "httpx2", "httpcore2", "h11", "anyio", "sniffio", "truststore", "click", "typer", "shellingham", "hf-xet"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl", "tenacity"),
)


def with_packages():
    """Starts this script again with an interpreter that has the packages."""
    python = FOLDER / "bin" / "python"
    if sys.prefix == str(FOLDER):
        return
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark, wanted = FOLDER / "installed", " ".join((*_PACKAGES, *_HARNESS))
        if not mark.exists() or mark.read_text() != wanted:
            for words in (
                [sys.executable, "-m", "venv", "--clear", "--system-site-packages", FOLDER],
                [python, *PIP, "install", "--no-compile", *_PACKAGES],
                [python, *PIP, "install", "--no-compile", "--no-deps", *_HARNESS],
            ):
                made = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
                if made.returncode:
                    raise SystemExit(f"{made.stdout}{made.stderr}the packages cannot be installed")
            mark.write_text(wanted)
    os.execv(python, [python, *sys.argv])

"""`poise bundle`: a directory of programs, their libraries, launcher and demo models, for a machine where nothing can be
installed: any Linux of x86-64 with a C library as new as ours and Python 3.11.

    bundle.json   version, commit   bin/     programs, stripped     lib/   their libraries, found through the programs' RPATH
    launch/       as in a checkout  bench/   models' shapes, peers, gpu_check.sh               licenses/   of the libraries
    tests/        with --with-tests: golden models and the scripts that use them; test programs are in bin/
"""

import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from ..shared import build_facts
from ..shared.options import normalised, parser
from ..shared.paths import PROGRAMS, ROOT, binary_folder, is_bundle, program
from ..shared.quantities import bytes_text
from ..shared.trouble import DONE, Refusal, brief, say, shown, tell
from .setup import add_install_option, build, build_programs

_MOST = 62 << 20
# Not bundled: the C library, which has to match the machine's dynamic loader, and the GPU driver's libraries.
_OF_THE_MACHINE = re.compile(
    r"(ld-linux.*|linux-vdso|lib(c|m|mvec|pthread|dl|rt|resolv|util|anl|nsl|nss_\w+|thread_db))\.so.*"
    r"|lib(cuda|nvidia-.*|nvcuvid)\.so.*"
)
_KEPT = {
    "launch": ("poise", "start.py", "bytecode_cache.py", "supervisor/*.py", "supervisor/*/*.py", "server/*", "report/*", "demo/*model/*", "demo/*.jsonl", "demo/*answers.json", "demo/score.py"),
    "bench": ("*.sh", "*.py", "works.json", "README.md", "models/*", "peers/*.py"),
    "tests": (
        *("golden/models/*", "golden/models/*/*", "golden/tokenizer/*", "golden/tokenizer/*/*"),
        *("e2e/harness.py", "e2e/goldens.py", "e2e/hostile_requests.json"),
    ),
}


def bundle(words):
    made = parser("bundle", "Makes a directory (or a .tar.gz) that runs where nothing can be installed.")
    add_install_option(made)
    made.add_argument("-o", "--output", default="poise-bundle", metavar="DIR|FILE.tar.gz", help="default: ./poise-bundle")
    made.add_argument("--with-tests", action="store_true", help="CUDA test programs and goldens, to check a GPU machine")
    given = made.parse_args(normalised(words))
    if is_bundle():
        raise Refusal("this is a bundle already: copy its directory")
    output = Path(os.path.abspath(given.output))
    packed = output.name.endswith((".tar.gz", ".tgz"))
    _check_place(output, packed)
    if not os.environ.get("POISE_BIN"):
        build("release") if given.with_tests else build_programs()
    with tempfile.TemporaryDirectory(prefix=".poise-bundle-", dir=output.parent) as folder:
        name = output.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
        fresh = Path(folder) / name
        _fill(fresh, given.with_tests)
        size = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
        if size > _MOST:
            raise Refusal(f"the bundle would have {bytes_text(size)}; the limit is {bytes_text(_MOST)}")
        if packed:
            _pack(fresh, output)
        else:
            if output.exists():
                shutil.rmtree(output)
            os.replace(fresh, output)
    packed_size = f", {bytes_text(output.stat().st_size)} packed" if packed else ""
    say(f"{brief(output)} is written: {bytes_text(size)}{packed_size}")
    tell(f"on the other machine: {f'tar xf {output.name} && ' if packed else ''}{name}/launch/poise demo")
    return DONE


def _check_place(output, packed):
    if not output.parent.is_dir():
        raise Refusal(f"-o {shown(output)}: the directory {shown(output.parent)} is not there: make it first")
    if packed and output.is_dir():
        raise Refusal(f"-o {shown(output)} is a directory: name a file")
    if not packed and output.exists() and not (output / "bundle.json").exists():
        raise Refusal(f"-o {shown(output)} exists and is no bundle: name another directory")


def _fill(folder, with_tests):
    parts = ("launch", "bench", "tests") if with_tests else ("launch", "bench")
    for part in parts:
        for pattern in _KEPT[part]:
            for path in (ROOT / part).glob(pattern):
                if path.is_file():
                    _copy(path, folder / path.relative_to(ROOT))
    _copy(ROOT / "LICENSE", folder / "LICENSE")
    programs = [program(name) for name in PROGRAMS]
    if with_tests:
        programs += sorted(path for path in binary_folder().glob("poise_*cuda*_tests") if os.access(path, os.X_OK))
    for path in programs:
        _copy(path, folder / "bin" / path.name)
    libraries = _libraries(programs)
    for name, path in libraries.items():
        _copy(path, folder / "lib" / name)
    _strip([*(folder / "bin").iterdir(), *(folder / "lib").iterdir()])
    _add_licences(libraries.values(), folder / "licenses")
    facts = {
        "version": build_facts.version(),
        "commit": build_facts.commit(),
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "c_library": " ".join(platform.libc_ver()),
        "programs": [path.name for path in programs],
        "libraries": sorted(libraries),
    }
    (folder / "bundle.json").write_text(json.dumps(facts, indent=2) + "\n")


def _copy(source, to):
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, to)


def _libraries(programs):
    """{name: path here} of the shared libraries that the programs need and another machine may not have."""
    found = {}
    for path in programs:
        done = subprocess.run(["ldd", str(path)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        if done.returncode:
            raise Refusal(f"ldd fails on {shown(path)}: {done.stderr.strip()}")
        for name, where in re.findall(r"^\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", done.stdout, re.MULTILINE):
            if _OF_THE_MACHINE.fullmatch(name):
                continue
            if not os.path.isabs(where):
                raise Refusal(f"{path.name} needs {name}, which is not on this machine")
            found[name] = Path(where)
    return found


def _strip(paths):
    """Removes debug information and symbols, which are most of a program's size."""
    tool = shutil.which("strip")
    if tool is None:
        say("`strip` is not installed: the bundle will be larger")
        return
    for path in paths:
        os.chmod(path, 0o755)
        done = subprocess.run([tool, "--strip-unneeded", str(path)], capture_output=True, text=True)
        if done.returncode:
            raise Refusal(f"strip fails on {shown(path.name)}: {done.stderr.strip()}")


def _add_licences(libraries, folder):
    """Copies the packages' licences from where Debian keeps them; on other systems there are none to copy."""
    if not shutil.which("dpkg"):
        return
    paths = {str(known) for path in libraries for known in (path, os.path.realpath(path))}
    found = subprocess.run(["dpkg", "-S", *paths], capture_output=True, text=True, check=False).stdout
    for package in sorted({line.partition(":")[0] for line in found.splitlines()}):
        licence = Path("/usr/share/doc") / package / "copyright"
        if licence.is_file():
            _copy(licence, folder / f"{package}.txt")


def _pack(folder, output):
    fresh = output.with_name(output.name + ".new")
    with tarfile.open(fresh, "w:gz", compresslevel=6) as archive:
        archive.add(folder, arcname=folder.name)
    os.replace(fresh, output)

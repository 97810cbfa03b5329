#!/usr/bin/env python3
"""The wheel on a bare Debian 12: nothing is there but Python, and no network.

    tests/e2e/by_hand/bare_debian.py [--root DIR] [--wheel FILE] [--mirror URL]

Needs root's rights and debootstrap; no part of `poise test`. It makes a wheel (of the programs that POISE_BIN names, or of those in
build/release, which it builds first), and a Debian of `minbase` with python3 and python3-venv (--root: one that is there, or is made
there and kept). The wheel and what it depends on are copied there. Then, in namespaces of its own (mounts, processes, network), an
ordinary user of that Debian makes a virtual environment, installs the wheel from the copies, asks it from Python and by its command, and
removes it. Each program and library must find all libraries that it needs, and only the C library's outside of the wheel.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = ("python3", "python3-venv")
USER, HOME = 1000, "/home/user"
_SCRIPT = "asked.sh"
_C_LIBRARY = tuple(f"lib{name}.so" for name in ("c", "m", "dl", "rt", "pthread", "resolv"))

# Of the folder $1; then runs the rest there.
_MOUNTS = """
set -eu
cd "$1"
shift
mount -t proc proc proc
mount -t tmpfs -o mode=755 dev dev
for one in null zero full random urandom tty; do
  touch dev/$one
  mount --bind /dev/$one dev/$one
done
mkdir dev/shm
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s /proc/self/fd dev/fd
exec "$@"
"""

# In the Debian, as root: what the user finds there, and which of our libraries' packages are.
_BARE = """
for package in libzmq5 libspdlog1.10 libfmt9 libsodium23 libstdc++6 libnorm1; do
  dpkg-query -W -f '${Package}\\n' "$package" 2>/dev/null || true
done
"""

_ASK = r"""
import poise
from poise import LLM, SamplingParams
with LLM(model=poise.__path__[0] + "/programs/launch/demo/model", device="cpu") as llm:
    print(llm.generate("Q: 47 + 38 = ?\nA:", SamplingParams(temperature=0, max_tokens=8, stop="\n"))[0].outputs[0].text)
"""

# As the user, in an empty folder.
_USE = f"""
set -eu
began() {{ echo "== $1"; }}
began 'an environment'
python3 -m venv venv
find venv | sort > before
began 'installed'
venv/bin/pip install --quiet --disable-pip-version-check --no-index --find-links /wheels poise
began 'libraries'
for file in venv/lib/python{PYTHON}/site-packages/poise/programs/bin/*; do
  ldd "$file" | sed "s|^|$(basename "$file") |"
done
began 'answer'
venv/bin/python - <<'ASK'{_ASK}ASK
began 'command'
venv/bin/poise version
venv/bin/poise run --model venv/lib/python{PYTHON}/site-packages/poise/programs/launch/demo/model --device cpu \\
  -i venv/lib/python{PYTHON}/site-packages/poise/programs/launch/demo/show.jsonl -o out.jsonl
rm -r out.jsonl out.jsonl.poise
began 'removed'
venv/bin/pip uninstall --quiet --yes poise
find venv | sort > after
comm -13 before after | grep -i poise || true
began 'left'
ls -A /dev/shm
grep -ls poise /proc/[0-9]*/comm || true
"""


def refuse(sentence):
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def step(what, *words):
    print(f"{what} …", end=" ", flush=True)
    began = time.monotonic()
    ended = subprocess.run([*map(str, words)], capture_output=True, text=True, errors="replace", check=False, timeout=1800)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if ended.returncode:
        print(f"{ended.stdout}{ended.stderr}{words[0]} ended with {ended.returncode}", file=sys.stderr)
        raise SystemExit(1)
    return ended.stdout


def make_debian(root, mirror):
    words = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root, *([mirror] if mirror else [])]
    step(f"a Debian ({SUITE}, minbase, {', '.join(PACKAGES)})", *words)


def make_wheels(folder, wheel):
    """The wheel and what it depends on, for the Debian's Python."""
    if wheel is None:
        step("the wheel", sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("poise-*.whl")
    elif wheel.parent != folder:
        shutil.copy(wheel, folder)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, "--python-version", PYTHON, "--only-binary=:all:"]
    step("what it depends on", *words, wheel)
    for path in folder.iterdir():
        path.chmod(0o644)


def within(root, script, user=None):
    """Runs `script` in the Debian: its own processes, mounts and (no) network, which all end with it."""
    (root / _SCRIPT).write_text(script)
    enter = ["chroot", *([f"--userspec={user}:{user}"] if user else []), str(root)]
    enter += ["/usr/bin/env", "-i", "-C", HOME if user else "/root", "PATH=/usr/bin:/bin", f"HOME={HOME if user else '/root'}", "LC_ALL=C.UTF-8"]
    words = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "sh", "-c", _MOUNTS, "sh", root, *enter]
    return step("used" if user else "looked at", *words, "sh", f"/{_SCRIPT}")


def parts(told):
    """What each part of _USE said."""
    found = {}
    for line in told.splitlines():
        if line.startswith("== "):
            lines = found.setdefault(line[3:], [])
        else:
            lines.append(line)
    return found


def complaints(told):
    libraries = [line.split() for line in told["libraries"]]
    for program, name, *found in libraries:
        if found[:2] == ["=>", "not"]:
            yield f"{program} lacks {name}"
        elif found[:1] == ["=>"] and "/poise/programs/" not in found[1] and not name.startswith(_C_LIBRARY):
            yield f"{program} takes {name} from {found[1]}, not from the wheel"
    if len({program for program, *_ in libraries}) < 3 or not any(name.startswith("libzmq.so") for _, name, *_ in libraries):
        yield f"the programs and their libraries: {told['libraries']}"
    if [line.strip() for line in told["answer"]] != ["85"]:
        yield f"the answer: {told['answer']}"
    if not told["command"][0].startswith("poise "):
        yield f"the command: {told['command']}"
    yield from (f"stays behind `pip uninstall`: {line}" for line in told["removed"])
    yield from (f"stays behind the processes: {line}" for line in told["left"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the Debian's folder; without it one is made, and removed")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already")
    parser.add_argument("--mirror", help="debootstrap's (its own default otherwise)")
    given = parser.parse_args()
    if os.geteuid() != 0:
        refuse("root's rights are needed, for debootstrap and chroot")
    if not (given.root and given.root.exists()) and shutil.which("debootstrap") is None:
        refuse("debootstrap is missing: apt-get install debootstrap")
    with tempfile.TemporaryDirectory(prefix="poise-bare-debian-") as folder:
        root = given.root.absolute() if given.root else Path(folder) / "root"
        if not root.exists():
            make_debian(root, given.mirror)
        wheels = root / "wheels"
        home = root / HOME.lstrip("/")
        for path in (wheels, home):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        os.chown(home, USER, USER)
        make_wheels(wheels, given.wheel and given.wheel.absolute())
        there = within(root, _BARE).split()
        print(f"of the wheel's libraries the Debian has: {' '.join(there) or 'none'}")
        told = parts(within(root, _USE, USER))
    wrong = list(complaints(told))
    print("\n".join(wrong) if wrong else f"the wheel runs on a bare Debian {SUITE}, answers, and leaves nothing")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

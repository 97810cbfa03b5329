#!/usr/bin/env python3
"""The supervisor's parts by themselves: sizes, options, environments, what is measured and delivered."""

import argparse
import concurrent.futures
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import expect, expect_equal, refuses, test, wait_until  # noqa: E402
from server.planner_protocol import OpenRequest, PlannerProtocol  # noqa: E402
from supervisor.commands import profile  # noqa: E402
from supervisor.development import setup  # noqa: E402
from supervisor.lifecycle import cublas, grammars, live_changes, locks, own_packages, processes  # noqa: E402
from supervisor.shared import options, paths, quantities  # noqa: E402
from supervisor.shared.decoder_shape import decoder_shape  # noqa: E402
from supervisor.shared.trouble import OUTPUT, brief, naming, of_system, shown  # noqa: E402


@test
def a_configs_matrices_are_those_of_its_family(_):
    """Beside the published sizes: 124 million parameters of GPT-2, 6.7 billion of OPT-6.7B, 8.03 billion of Llama-3-8B, 32.8 of Qwen3-32B."""
    for name, layer, words, all_of_it in (
        ("gpt2", 12 * 768 * 768, 1, 124e6),
        ("opt-6.7b", 12 * 4096 * 4096, 1, 6.66e9),
        ("llama-3-8b", 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2, 8.03e9),
        ("qwen3-32b", 5120 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 25600), 2, 32.76e9),
    ):
        shape = decoder_shape(json.loads((harness.ROOT / "bench" / "models" / f"{name}.json").read_text()))
        expect_equal(shape.layer_entries(), layer, name)
        entries = shape.layers * layer + words * shape.head_entries() + shape.positions * shape.hidden
        expect(abs(entries / all_of_it - 1) < 0.005, f"{name}: {entries} entries in all")


@test
def a_config_without_a_model_type_is_of_its_classs_family_and_an_unknown_family_is_of_none(_):
    config = json.loads((harness.ROOT / "bench" / "models" / "llama-3-8b.json").read_text())
    known = decoder_shape(config)
    named = {name: value for name, value in config.items() if name != "model_type"}
    expect_equal(decoder_shape({**named, "architectures": ["LlamaForCausalLM"]}), known, "the shape by its class")
    for unknown in ({**config, "model_type": "gemma2"}, {**named, "architectures": ["Gemma2ForCausalLM"]}, {**named, "architectures": None}):
        expect("supported are llama" in refuses(decoder_shape, unknown), "the refusal does not say what is supported")


@test
def each_wish_for_a_policy_has_the_answer_that_is_its_own(_):
    granted = {"serial": 3, "policy": "kvpr", "since": 7, "refusal": ""}
    refused = {"serial": 5, "policy": "kvpr", "since": 7, "refusal": "it is too large"}
    later = {"serial": 9, "policy": "hybrid", "since": 8, "refusal": ""}
    status = {"policy": "hybrid", "policy_answers": [granted, refused, later]}
    stays, replaced = "it is too large; kvpr stays in force", "a later request replaced this one; hybrid is in force"
    for serial, wanted in {3: (granted, ""), 5: (None, stays), 7: (None, replaced), 9: (later, ""), 11: (None, "")}.items():
        expect_equal(live_changes.answer_to(serial, status), wanted, f"the answer to {serial}")
    expect_equal(live_changes.answer_to(1, {}), (None, ""), "the answer of a planner that has just begun")


@test
def a_write_that_fails_is_told_with_its_file(_):
    def write():
        with naming("/dev/full"), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    try:
        write()
    except OSError as problem:
        told = of_system(problem)
    expect_equal((str(told), told.code), ("/dev/full: No space left on device", OUTPUT), "a full device")
    copy = OSError(errno.ENOSPC, "No space left on device", "from", None, "to")
    expect_equal(str(of_system(copy)), "to: No space left on device", "a copy")


@test
def speeds_are_never_written_with_an_exponent(_):
    for number, wanted in {0.0123: "0.0123", 255.25: "255.2", 9999.4: "9999", 34620000.3: "34620000"}.items():
        expect_equal(quantities.rate_text(number), wanted, str(number))


@test
def a_user_without_a_home_has_a_place_for_profiles_all_the_same(workspace):
    private = workspace / "private"
    private.mkdir(mode=0o700)
    for home in ("~", "relative"):
        with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(private), "XDG_CACHE_HOME": ""}):
            with mock.patch("os.path.expanduser", return_value=home):
                expect_equal(paths.profile_folder(), private / "poise" / "profiles", f"home {home}")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "cache")}):
        expect_equal(paths.profile_folder(), workspace / "cache" / "poise" / "profiles", "with XDG_CACHE_HOME")


@test
def what_is_measured_is_not_lost_for_want_of_a_folder(workspace):
    (workspace / "file").write_text("")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "file")}):
        told = refuses(profile._make_folder, None)
        expect("name a file (-o)" in told and "XDG_CACHE_HOME" in told, told)
        expect_equal(profile._make_folder("measured.json"), False, "with -o")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "cache")}):
        expect_equal(profile._make_folder(None), True, "with a folder")


@test
def sizes_read_as_people_write_them(_):
    table = {
        "8192": 8192,
        "1B": 1,
        "24GiB": 24 << 30,
        "100GB": 100 * 10**9,
        "1.5G": 3 << 29,
        "2g": 2 * 10**9,
        "64mib": 64 << 20,
        "7 KiB": 7 << 10,
        "0.5k": 500,
        "1TiB": 1 << 40,
    }
    for text, wanted in table.items():
        expect_equal(quantities.size(text), wanted, text)
    for text in ("", "GiB", "-1", "0", "0GiB", "1e9", "12potato", "nan", "1.2.3GiB", "9" * 30, "16777216TiB", "٣"):
        refuses(quantities.size, text, error=argparse.ArgumentTypeError)


@test
def counts_and_shares_are_strict(_):
    expect_equal(quantities.count("12"), 12, "12")
    for text in ("", "0", "-1", "1.0", "1_000", " 1", "٣", "2147483648"):
        refuses(quantities.count, text, error=argparse.ArgumentTypeError)
    for text in ("-0.1", "1.01", "nan", "inf", "half", ""):
        refuses(quantities.share, text, error=argparse.ArgumentTypeError)


@test
def cublas_is_found_among_python_packages_and_a_given_folder_stands(workspace):
    folder = workspace / "site-packages" / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    with mock.patch.object(sys, "path", [str(workspace / "site-packages")]):
        (folder / "libcublasLt.so.13").touch()
        expect_equal(cublas.environment({}), {"POISE_CUBLAS": str(folder)}, "found")
        expect_equal(cublas.environment({"POISE_CUBLAS": "/elsewhere"}), {}, "given")
    with mock.patch.object(sys, "path", ["", "site-packages"]):  # never from where somebody happens to stand
        before = os.getcwd()
        os.chdir(workspace.folder)
        try:
            expect(cublas._in_python_packages(()) is None, "found in the working directory")
        finally:
            os.chdir(before)


@test
def underscores_stand_for_hyphens_in_names_of_options_alone(_):
    given = options.normalised(["--host_memory=a_b", "--run_dir", "x_y", "-i", "in_put", "--", "--a_b"])
    expect_equal(given, ["--host-memory=a_b", "--run-dir", "x_y", "-i", "in_put", "--", "--a_b"], "normalised")


@test
def an_unknown_option_is_named_before_a_missing_one(_):
    sentence = refuses(options.run_parser().parse_args, ["--modle", "x"])
    expect("--modle" in sentence and "--model?" in sentence, sentence)


@test
def a_name_with_control_characters_stays_in_one_line(_):
    expect_equal(shown("a\nb\x1b[31mc\udcff"), "a\\nb\\x1b[31mc\\udcff", "shown")
    expect("\n" not in brief("x\ny"), "brief")


@test
def the_beginning_of_a_stream_is_handed_out_before_the_rest_of_a_message(_):
    heard = []

    class Heard(OpenRequest):
        def put(self, event):
            heard.append((self.id, event if isinstance(event, bytes) else event["text"]))

    def text(number, at, more):
        return {"id": number, "at": at, "text": more, "tokens": at + 1}

    protocol = PlannerProtocol(lambda peer, frames: None)
    protocol.take(b"peer", [b'{"planner": "first"}'])
    requests = [Heard(b"{}", None, 1, streams=True) for _ in range(3)]
    protocol.submit(requests)
    protocol.take(b"peer", [json.dumps({"events": [text(1, 0, "a"), text(2, 0, "b")]}).encode()])
    expect_equal(heard, [(1, "a"), (2, "b")], "two that begin")
    heard.clear()
    ended = {"id": 3, "frame": 1, "waited": 0.1, "prefill": 0.2, "decode": 0.3, "token_at": 4.5, "event_at": 4.5}
    steps = protocol.taken(b"peer", [json.dumps({"events": [text(1, 1, "c"), text(3, 0, "d"), text(2, 1, "e"), ended]}).encode(), b"whole"])
    next(steps)
    expect_equal(heard, [(3, "d")], "the one that begins")
    expect_equal(list(steps), [], "steps behind it")
    expect_equal(heard, [(3, "d"), (1, "c"), (2, "e"), (3, b"whole")], "all of the message")
    expect_equal((requests[2].times, requests[2].token_at, set(protocol.open)), ((0.1, 0.2, 0.3), 4.5, {1, 2}), "what is known of the third")
    expect_equal(list(protocol.taken(b"another", [json.dumps({"events": [text(1, 2, "f")]}).encode()])), [], "of another planner")
    expect_equal(len(heard), 4, "events of another planner")


@test
def an_environment_is_made_once_for_each_python_and_list_of_packages(workspace):
    made = []

    def install(words, *_):
        if "venv" in words:
            made.append(words[-1])
            time.sleep(0.2)
            os.makedirs(words[-1])
        return 0, ""

    needs = workspace / "requirements.txt"
    needs.write_text("one")

    def environment():
        return str(own_packages.environment("of-a-test", "POISE_TEST_VENV", needs, "what a test needs", "one"))

    home = {"XDG_CACHE_HOME": str(workspace.folder), "POISE_TEST_VENV": ""}
    with mock.patch.dict(os.environ, home), mock.patch.object(own_packages, "is_bundle", lambda: True), mock.patch.object(own_packages, "_installer", install):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            found = set(pool.map(lambda _: environment(), range(3)))
        expect_equal((len(found), made), (1, list(found)), "made at once")
        with mock.patch.object(sys, "version", "3.99"):
            expect(environment() not in found, "two Pythons share an environment")
        expect(environment() in found and len(made) == 2, f"made again: {made}")
        needs.write_text("two")
        expect(environment() not in found and len(made) == 3, f"another list: {made}")
        expect(not [name for name in os.listdir(workspace / "poise") if name.endswith(".lock")], "a lock is left")
        needs.write_text("three")
        with mock.patch.dict(sys.modules, {"ensurepip": None}):
            refused = refuses(environment)
        expect(f"python3.{sys.version_info.minor}-venv" in str(refused), str(refused))


@test
def an_installation_ends_with_the_command_that_wants_it(workspace):
    needs = workspace / "requirements.txt"
    needs.write_text("nothing-that-is-anywhere\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never answers
        pip = {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple", "PIP_CONFIG_FILE": os.devnull}
        own = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(harness.ROOT / "launch")!r})
from supervisor.lifecycle import own_packages
from supervisor.lifecycle.interrupts import Interrupts
from supervisor.shared.trouble import Refusal
try:
    own_packages.environment("of-a-test", "POISE_TEST_VENV", Path({str(needs)!r}), "what a test needs", "one", Interrupts())
except Refusal as refusal:
    print(refusal.sentence)
    sys.exit(refusal.code)
"""
        for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
            folder = workspace / f"venv-{number}"
            environment = os.environ | pip | {"POISE_TEST_VENV": str(folder), "TMPDIR": str(workspace.folder)}
            command = subprocess.Popen([sys.executable, "-s", "-c", own], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            wait_until(lambda: _with_word(f"{folder}/bin/python"), "pip", 60)
            time.sleep(1)
            began = time.monotonic()
            command.send_signal(number)
            said = command.communicate(timeout=20)[0]
            wait_until(lambda: not _with_word(f"{folder}/bin/python"), "pip to end", 12)
            expect(time.monotonic() - began < 12, "it took its time")
            expect_equal(command.returncode, code, said)
            expect(code < 0 or "interrupted before what a test needs was installed" in said, said)
            lock = locks.Lock.take(folder.with_name(f"{folder.name}.lock"))
            expect(lock is not None, "the lock is held")
            lock.give_back()


def _with_word(word):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and word in processes.command_line_of(pid)]


@test
def only_a_line_that_wants_a_form_asks_for_what_forms_need(workspace):
    path = workspace / "in.jsonl"
    for text, wants in (
        ('{"response_format": {"type": "json_object"}}', True),
        ('{"response_format":{"type":"text"}}', False),
        ('{"response_format": { "type" : "text" }, "structured_outputs": null}', False),
        ('{"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}', True),
        ('{"response_format": {"type": "text"}}\n{"response_format": {"type": "json_object"}}', True),
        ('{"prompt": "x"}', False),
    ):
        for before in (0, *range((1 << 20) - 130, (1 << 20) + 3, 9)):
            path.write_text(" " * before + text)
            expect_equal(grammars._wants_one(path), wants, f"{text} behind {before}")


@test
def the_shell_part_says_what_is_missing_and_installs_nothing_unasked(workspace):
    """With a PATH and include folders of a bare system: no compiler, no apt-get to be called by mistake."""
    bare = workspace / "bin"
    bare.mkdir()
    for tool in ("readlink", "dirname", "cat", "mktemp", "tail", "rm", "id", "env"):
        os.symlink(f"/usr/bin/{tool}", bare / tool)
    calls = workspace / "calls"
    (bare / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexit 1\n')
    (bare / "apt-get").chmod(0o755)
    environment = {"PATH": str(bare), "HOME": "/nonexistent"}
    command = ["/bin/sh", str(harness.POISE), "setup", "--no-install"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expect_equal(ended.returncode, 2, f"exit code ({ended.stderr})")
    for word in ("cmake", "ninja-build", "flatbuffers-compiler", "--no-install", "apt-get install"):
        expect(word in ended.stderr, f"{word!r} is not in {ended.stderr!r}")
    expect(not calls.exists(), "apt-get was called in spite of --no-install")
    expect_equal(ended.stderr.count("\n"), 1, "lines")


@test
def gpu_code_of_a_test_without_a_gpu_is_compiled_anew_for_use(workspace):
    """… and code that was compiled for use stays what it is."""

    def configured(checked):
        commands = setup.build_commands("release", ["poise-loader"], checked)
        expect_equal(commands.pop()[-1], "poise-loader", "the last command builds")
        return [words[-1] for words in commands]

    folder = workspace / "build" / "release"
    folder.mkdir(parents=True)
    with mock.patch.object(setup, "ROOT", workspace.folder):
        expect_equal(configured(False), ["release"], "a build for use")
        expect_equal(configured(True), ["-DPOISE_CUDA:STRING=CHECKED"], "a build for tests")
        (folder / "build.ninja").touch()
        for kind, for_use in (("CHECKED", ["-DPOISE_CUDA:STRING=AUTO"]), ("AUTO", []), ("OFF", [])):
            (folder / "CMakeCache.txt").write_text(f"A:STRING=b\nPOISE_CUDA:STRING={kind}\n")
            expect_equal(configured(True), [], f"tests of what is {kind}")
            expect_equal(configured(False), for_use, f"use of what is {kind}")


if __name__ == "__main__":
    raise SystemExit(harness.main())

#!/usr/bin/env python3
"""The rules of the house, read from the sources: who may include whom, and where one door leads to each danger."""

import ast
import graphlib
import re
import sys

import harness
from harness import ROOT, expect, test

sys.path.insert(0, str(ROOT / "tests" / "support"))
import class_sizes
import included_names

# What each folder may include beside itself, the standard library and third parties.
MAY_INCLUDE = {
    "common": set(),
    "kernels": {"common"},
    "loader": {"common"},
    "planner": {"common"},
    "gpu_executor": {"common", "kernels"},
}
FOLDERS = set(MAY_INCLUDE)
# The planner's, each behind those that it includes.
ROOMS = (
    "tokenizer", "requests", "costs", "record", "policies", "schedule", "results", "virtual_time", "memory", "links", "profile",
    "replay", "forecast", "process",
)  # fmt: skip
# The supervisor's, in the same order.
SUPERVISOR = ROOT / "launch" / "supervisor"
SUPERVISOR_ROOMS = ("shared", "lifecycle", "measure", "development", "commands")
MAX_SOURCES = 36
MAX_PRIVATE = 25
CUDA_HEADER = re.compile(r"(cuda|cublas|cub/|cutlass|cute/|nvtx|cupti|mma\.h|cooperative_groups)")


def sources(folder):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            yield path, path.read_text(encoding="utf-8")


def includes(text):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def nothing_wrong(complaints):
    expect(not complaints, "\n".join(complaints))


@test
def each_folder_includes_only_what_the_design_allows(_):
    complaints, seen = [], 0
    for folder, allowed in MAY_INCLUDE.items():
        for path, text in sources(folder):
            seen += 1
            for name in includes(text):
                target = name.split("/")[0]
                if target in FOLDERS - allowed - {folder}:
                    complaints.append(f"{path.relative_to(ROOT)} includes {name}")
                if ".." in name.split("/"):
                    complaints.append(f"{path.relative_to(ROOT)} includes {name}: paths are from the root")
    nothing_wrong(complaints)
    expect(seen > 50, f"only {seen} sources found")


@test
def files_include_what_they_name(_):
    texts = {
        path.relative_to(ROOT).as_posix(): text
        for folder in (*FOLDERS, "bench", "tests")
        for path, text in sources(folder)
        if path.suffix in (".h", ".cpp")
    }
    nothing_wrong([f"{path} names {name} and includes no <{header}>" for path, name, header in included_names.without(texts)])
    expect(len(texts) > 300, f"only {len(texts)} sources found")


@test
def what_a_file_includes_is_found_behind_its_headers(_):
    texts = {
        "a.h": '#include <vector>\n#include "b.h"\nstd::span<int> a(std::vector<int>);  // not std::map',
        "b.h": "#include <span>\n#include <fmt/core.h>",
        "a.cpp": '#include "a.h"\nstd::string a() { return fmt::to_string(std::vector<int>().size()); }',
    }
    found = list(included_names.without(texts))
    expect(found == [("a.cpp", "std::string", "string")], f"{found}")


@test
def cuda_stays_below_cuda_folders(_):
    complaints = []
    for folder in FOLDERS:
        for path, text in sources(folder):
            if "cuda" in path.relative_to(ROOT).parts:
                continue
            if path.suffix in (".cu", ".cuh") or "<<<" in text:
                complaints.append(f"{path.relative_to(ROOT)} is CUDA code")
            complaints += [f"{path.relative_to(ROOT)} includes {n}" for n in includes(text) if CUDA_HEADER.match(n)]
    nothing_wrong(complaints)


@test
def zeromq_is_known_to_the_channel_alone(_):
    complaints = []
    for folder in FOLDERS:
        for path, text in sources(folder):
            if path.relative_to(ROOT).as_posix() != "common/channel.cpp":
                names = [n for n in includes(text) if n.startswith("zmq")]
                complaints += [f"{path.relative_to(ROOT)} includes {name}" for name in names]
    nothing_wrong(complaints)


@test
def shared_memory_has_one_door(_):
    complaints = []
    for folder in FOLDERS:
        for path, text in sources(folder):
            if path.relative_to(ROOT).as_posix() == "common/shared_memory.cpp":
                continue
            complaints += [f"{path.relative_to(ROOT)} includes {n}" for n in includes(text) if "interprocess/" in n]
            if re.search(r"\bshm_(open|unlink)\s*\(", text):
                complaints.append(f"{path.relative_to(ROOT)} calls shm_open or shm_unlink")
    nothing_wrong(complaints)


@test
def files_are_replaced_in_one_place(_):
    """Written beside, synced, renamed and checked by replace_file; results and damaged logs are moved, not replaced."""
    moves = {"common/files/replace_file.cpp", "planner/results/results_output.cpp", "planner/links/greeting.cpp"}
    complaints = []
    for folder in FOLDERS:
        for path, text in sources(folder):
            place = path.relative_to(ROOT).as_posix()
            if place not in moves and re.search(r"\brename(?:at2?)?\s*\(", text):
                complaints.append(f"{place} renames a file: replace_file does that")
    moves = {"launch/supervisor/shared/files.py", "launch/supervisor/development/bundle.py"}  # a bundle is a folder
    for path in (ROOT / "launch" / "supervisor").rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if place not in moves and re.search(r"\bos\.(?:replace|rename)\(", path.read_text()):
            complaints.append(f"{place} renames a file: shared/files.py does that")
    nothing_wrong(complaints)


@test
def an_iteration_is_planned_in_one_place(_):
    """Items are packed and tables built by plan_iteration alone: run, prediction and simulation order the same."""
    door = {f"planner/schedule/{name}" for name in ("iteration.cpp", "orders.h", "orders.cpp")}
    complaints = []
    for path, text in sources("planner"):
        place = path.relative_to(ROOT).as_posix()
        if place not in door and re.search(r"\bpack_items\(|(?:\.|->)pack\([^)]", text):
            complaints.append(f"{place} packs mini-batches: plan_iteration does that")
    nothing_wrong(complaints)


@test
def no_lock_or_condition_lies_in_shared_memory(_):
    text = (ROOT / "common" / "shared_layout.h").read_text()
    words = re.findall(r"\b(?:std::mutex|pthread_mutex_t|interprocess_mutex|condition_variable|std::string|std::vector)\b", text)
    expect(not words, f"shared_layout.h holds {words}")


@test
def the_supervisor_reads_the_control_segment_where_the_programs_write_it(_):
    """The offsets in launch/supervisor/lifecycle/segments.py are those static_asserted in common/shared_layout.h."""
    from supervisor.lifecycle import segments

    text = (ROOT / "common" / "shared_layout.h").read_text()

    def asserted(field):
        return int(re.search(rf"offsetof\(ControlSegment, {field}\) == (\d+)", text).group(1))

    expect(segments._LOADER_STATE == asserted("loader_state"), "loader_state moved")
    expect(segments._PROGRESS == asserted("progress"), "progress moved")
    size = int(re.search(r"sizeof\(ControlSegment\) == (\d+)", text).group(1))
    expect(segments._SIZE == size, "the control segment changed its size")
    magic = int(re.search(r"kControlMagic = (0x[0-9a-f]+)", text).group(1), 16)
    expect(segments._MAGIC == magic, "another magic")
    version = int(re.search(r"kAbiVersion = (\d+)", text).group(1))
    expect(segments._ABI_VERSION == version, "another ABI version")
    block = text[text.index("loader_state;") : text.index("fingerprint_ready;")]
    fields = re.findall(r"(?:std::atomic<)?std::(uint\d+)_t>? (\w+);", block)
    expect(
        fields[:2] == [("uint32", "loader_epoch"), ("uint64", "loaded_bytes")],
        f"the fields after loader_state are {fields}",
    )


@test
def exit_codes_are_the_same_for_programs_supervisor_and_users(_):
    from supervisor.shared import trouble

    enum = re.search(r"enum class Exit : int \{(.*?)\n\};", (ROOT / "common" / "trouble.h").read_text(), re.DOTALL).group(1)
    programs = {int(code) for code in re.findall(r"=\s*(\d+),", enum)}
    supervisor = {code for name, code in vars(trouble).items() if name.isupper() and isinstance(code, int)}
    expect(len(programs) > 8 and programs == supervisor, f"common/trouble.h has {programs}, trouble.py has {supervisor}")
    table = (ROOT / "launch" / "README.md").read_text().split("\n## How commands end\n")[1].split("\n## ")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    expect(told == supervisor - {trouble.HANDED_OVER, trouble.DEVICE_FAILED, trouble.UNPACKABLE}, f"launch/README.md has {told}")
    expect(set(trouble.RUN_ENDS) == told - {trouble.DIFFERENT, trouble.INTERNAL}, f"a run ends with {set(trouble.RUN_ENDS)}")


@test
def what_the_supervisor_knows_of_families_and_lines_is_what_the_programs_know(_):
    from supervisor.lifecycle import chat_worker
    from supervisor.shared.decoder_shape import FAMILIES

    texts = [path.read_text() for path in (ROOT / "common" / "families").glob("*.cpp")]
    names = [re.findall(r'\.(?:model_type|architecture|headless) = "(\w+)"', text) for text in texts]
    described = {found[0]: tuple(found[1:]) for found in names if found}
    expect(len(described) > 5 and described == FAMILIES, f"common/families/ has {described}, decoder_shape.py has {FAMILIES}")
    lines = (ROOT / "planner" / "requests" / "request_lines.h").read_text()
    longest = int(re.search(r"kLongestLine = kMiB \* (\d+);", lines).group(1)) << 20
    expect(chat_worker.LONGEST_LINE == longest, f"the planner reads lines of {longest}, chat_worker.py of {chat_worker.LONGEST_LINE}")


@test
def python_in_launch_needs_the_standard_library_alone(_):
    complaints, seen = [], 0
    start = ROOT / "launch" / "start.py"
    for path in [start, start.with_name("bytecode_cache.py"), *sorted(SUPERVISOR.rglob("*.py"))]:
        seen += 1
        known = sys.stdlib_module_names | ({"supervisor", "bytecode_cache"} if path == start else set())
        if path.name == "chat_worker.py":  # a process of its own, which says that it is missing
            known |= {"jinja2"}
        if path.name == "grammar_worker.py":  # likewise
            known |= {"llguidance"}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module)
            foreign = [name for name in names if name.split(".")[0] not in known]
            complaints += [f"{path.relative_to(ROOT)} imports {name}" for name in foreign]
    nothing_wrong(complaints)
    expect(seen > 40, f"only {seen} files found")


@test
def names_in_unnamed_namespaces_differ_within_a_folder(_):
    """The presets compile the sources of a folder together (CMakeLists.txt), where such names are one file's; of tests, those
    of several folders."""
    complaints, names = [], {}
    alone = re.findall(r"set_source_files_properties\((\S+\.cpp) PROPERTIES SKIP_UNITY", (ROOT / "CMakeLists.txt").read_text())
    for folder in [*FOLDERS - {"kernels"}, *(f"tests/{folder}" for folder in FOLDERS)]:
        for path, text in sources(folder):
            place = path.relative_to(ROOT).as_posix()
            if path.suffix == ".cpp" and path.name != "main.cpp" and "cuda" not in path.relative_to(ROOT).parts and place not in alone:
                for name in unnamed_names(text):
                    together = folder if folder.startswith("tests/") else path.parent
                    first = names.setdefault((together, name), path)
                    if first != path:
                        complaints.append(f"{place} and {first.name} both have {name}: share it, or compile one of them alone")
    nothing_wrong(complaints)
    expect(len(names) > 100, f"only {len(names)} names found")


def unnamed_names(text):
    """Constants, types and functions (with what they take) that a file declares for itself alone."""
    for inside in re.findall(r"^namespace {\n(.*?)^}  // namespace\n", text, re.MULTILINE | re.DOTALL):
        flat = re.sub(r"(?m)^ .*\n|^#.*\n|//.*$", "", re.sub(r",\n +", ", ", inside))
        yield from re.findall(r"^(?:inline )?constexpr [^=({;]*\b(k[A-Z]\w*)", flat, re.MULTILINE)
        yield from re.findall(r"^(?:struct|class|enum class) (\w+)", flat, re.MULTILINE)
        for name, takes in re.findall(r"^[\w:<>,&* ]*?[ &*](\w+)\(([^()]*)\)[^;]*{", flat, re.MULTILINE):
            kinds = [re.sub(r"[ ]?\w+$", "", one.strip()) for one in takes.split(",")]
            yield f"{name}({', '.join(kinds)})"


@test
def rooms_of_the_planner_include_only_rooms_before_them(_):
    """Each room stands behind all that it includes; so there is no circle. Only main and options stand above the rooms."""
    complaints, seen = [], 0
    for path, text in sources("planner"):
        parts = path.relative_to(ROOT / "planner").parts
        place = ROOMS.index(parts[0]) if len(parts) > 1 else len(ROOMS)
        for name in includes(text):
            to = name.split("/")
            if to[0] != "planner":
                continue
            seen += 1
            target = ROOMS.index(to[1]) if len(to) > 2 else len(ROOMS)
            if target > place:
                complaints.append(f"{path.relative_to(ROOT)} includes {name}: {to[1]} stands behind {parts[0]}")
    nothing_wrong(complaints)
    expect(seen > 100, f"only {seen} includes found")
    there = {path.name for path in (ROOT / "planner").iterdir() if path.is_dir()}
    expect(there == set(ROOMS), f"the rooms are {sorted(there)}")


def relative_imports(text, package):
    """What a module of `package` (a tuple: its folders below the supervisor's) imports of the supervisor: tuples of names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
            yield from ((*base, alias.name) for alias in node.names)


def supervisor_modules():
    """{names of a module: its text}."""
    found = {}
    for path in sorted(SUPERVISOR.rglob("*.py")):
        names = path.relative_to(SUPERVISOR).with_suffix("").parts
        found[names] = path.read_text(encoding="utf-8")
    return found


@test
def rooms_of_the_supervisor_import_only_rooms_before_them(_):
    """As in the planner. Only the table of commands stands above the rooms; it alone imports by a name that is computed."""
    complaints, graph, texts = [], {}, supervisor_modules()
    for module, text in texts.items():
        place = SUPERVISOR_ROOMS.index(module[0]) if len(module) > 1 else len(SUPERVISOR_ROOMS)
        if "importlib" in text and module != ("command_table",):
            complaints.append(f"{'/'.join(module)}.py uses importlib")
        graph[module] = set()
        for names in relative_imports(text, module[:-1]):
            target = next((names[:n] for n in (len(names), len(names) - 1) if names[:n] in texts), None)
            if target is None:
                complaints.append(f"{'/'.join(module)}.py imports {'.'.join(names)}, which is no module")
                continue
            graph[module].add(target)
            behind = SUPERVISOR_ROOMS.index(target[0]) if len(target) > 1 else len(SUPERVISOR_ROOMS)
            if behind > place:
                complaints.append(f"{'/'.join(module)}.py imports {'/'.join(target)}.py: {target[0]} stands behind {module[0]}")
    nothing_wrong(complaints)
    expect(sum(map(len, graph.values())) > 100, "hardly any imports found")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        raise harness.Failed(f"modules import one another in a circle: {circle.args[1]}") from None
    there = {path.name for path in SUPERVISOR.iterdir() if any(path.glob("*.py"))}
    expect(there == set(SUPERVISOR_ROOMS), f"the rooms are {sorted(there)}")


@test
def relative_imports_are_read_as_python_reads_them(_):
    text = "import os\nfrom .a import B\nfrom . import c\ndef f():\n    from ..room.d import e\nfrom json import load\n"
    got = set(relative_imports(text, ("here",)))
    expect(got == {("here", "a", "B"), ("here", "c"), ("room", "d", "e")}, f"{got}")


@test
def every_command_has_its_function_where_the_table_says(_):
    from supervisor.command_table import COMMANDS

    texts, complaints = supervisor_modules(), []
    for command, (module, function, _) in COMMANDS.items():
        if module is None:
            continue
        tree = ast.parse(texts.get(tuple(module.split(".")), ""))
        if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            complaints.append(f"`poise {command}` is {module}.{function}, which is not there")
    nothing_wrong(complaints)


@test
def folders_can_be_taken_in_at_a_glance(_):
    full = []
    for top in [*FOLDERS, "launch", "tests", "bench"]:
        for folder in [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
            count = sum(path.suffix in (".h", ".cpp", ".py", ".cu", ".cuh") for path in folder.iterdir())
            if count > MAX_SOURCES:
                full.append(f"{folder.relative_to(ROOT)} has {count} sources")
    nothing_wrong(full)
    entries = [path.name for path in (ROOT / "planner").iterdir()]
    expect(len(entries) <= 18, f"planner/ has {len(entries)} entries")


@test
def classes_stay_small(_):
    """A class that keeps more than this to itself has two meanings in it."""
    seen, large = 0, []
    for folder in FOLDERS:
        for path, text in sources(folder):
            for name, count in class_sizes.classes(text):
                seen += 1
                if count > MAX_PRIVATE:
                    large.append(f"{path.relative_to(ROOT)}: {name} has {count} private methods and members")
    nothing_wrong(large)
    expect(seen > 200, f"only {seen} classes found")


@test
def the_measure_of_a_class_counts_what_is_private(_):
    text = """
    class Three : public Base {
     public:
      void seen() { if (a_) { b_ = "}"; } }
     private:
      friend class Other;
      struct Inner { int not_counted; };
      int method(int x, int y) const;
      std::map<int, std::string> a_, b_{};  // two
    };
    """
    expect(dict(class_sizes.classes(text)) == {"Three": 3, "Inner": 0}, f"{dict(class_sizes.classes(text))}")


if __name__ == "__main__":
    raise SystemExit(harness.main())

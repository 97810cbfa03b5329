#!/usr/bin/env python3
"""The rules of the house, read from the sources: who may include whom, and where one door leads to each danger."""

import ast
import re
import sys

import harness
from harness import ROOT, expect, test

sys.path.insert(0, str(ROOT / "tests" / "support"))
import class_sizes

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
    "forecast", "process",
)  # fmt: skip
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
def no_lock_or_condition_lies_in_shared_memory(_):
    text = (ROOT / "common" / "shared_layout.h").read_text()
    words = re.findall(r"\b(?:std::mutex|pthread_mutex_t|interprocess_mutex|condition_variable|std::string|std::vector)\b", text)
    expect(not words, f"shared_layout.h holds {words}")


@test
def the_supervisor_reads_the_control_segment_where_the_programs_write_it(_):
    """The offsets in launch/supervisor/segments.py are those static_asserted in common/shared_layout.h."""
    from supervisor import segments

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
def python_in_launch_needs_the_standard_library_alone(_):
    complaints = []
    for path in sorted((ROOT / "launch" / "supervisor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module)
            foreign = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
            complaints += [f"{path.relative_to(ROOT)} imports {name}" for name in foreign]
    nothing_wrong(complaints)


@test
def names_in_unnamed_namespaces_differ_within_a_folder(_):
    """The presets compile the sources of a folder together (CMakeLists.txt), where such names are one file's."""
    complaints, names = [], {}
    alone = re.findall(r"set_source_files_properties\((\S+\.cpp) PROPERTIES SKIP_UNITY", (ROOT / "CMakeLists.txt").read_text())
    for folder in [*FOLDERS - {"kernels"}, *(f"tests/{folder}" for folder in FOLDERS)]:
        for path, text in sources(folder):
            place = path.relative_to(ROOT).as_posix()
            if path.suffix == ".cpp" and path.name != "main.cpp" and "cuda" not in path.parts and place not in alone:
                for name in unnamed_names(text):
                    first = names.setdefault((path.parent, name), path)
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


@test
def files_stay_small(_):
    """A file that grows past this has two meanings in it."""
    long = []
    for folder in [*FOLDERS, "launch/supervisor"]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".py", ".cu", ".cuh"):
                if path.stem.endswith("_tables"):
                    continue  # data
                count = len(path.read_text(encoding="utf-8").splitlines())
                if count > 450:
                    long.append(f"{path.relative_to(ROOT)}: {count} lines")
    nothing_wrong(long)


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

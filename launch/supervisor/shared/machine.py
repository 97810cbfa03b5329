"""What this machine has: memory, shared memory, cores, a GPU."""

import os
from pathlib import Path


def meminfo(key):
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


_SHARED = "/dev/shm"
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _number_in(path):
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _cgroups():
    """This process's control group and those above it (version 2)."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            group = Path(f"{_GROUPS}{line[3:]}")
            yield group
            for above in group.parents:
                if above == _GROUPS.parent:
                    break
                yield above


def cgroup_limit():
    """Bytes of memory the control groups allow, or None."""
    limits = [_number_in(group / "memory.max") for group in _cgroups()]
    limits.append(_number_in(_GROUPS / "memory" / "memory.limit_in_bytes"))
    limits = [limit for limit in limits if limit is not None and limit < 1 << 60]
    return min(limits) if limits else None


def cgroup_headroom():
    """Computed as in common/control_groups.h: the page cache of files counts as free, /dev/shm does not."""
    rooms = [_headroom(group, "memory.max", "memory.current", "") for group in _cgroups()]
    rooms.append(_headroom(_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    rooms = [room for room in rooms if room is not None and room < 1 << 60]
    return min(rooms) if rooms else None


def _headroom(group, limit, used, version1):
    limit, used = _number_in(group / limit), _number_in(group / used)
    if limit is None or used is None:
        return None
    facts = {}
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            facts[name] = int(value)
    except (OSError, ValueError):
        pass
    cache, shared = (f"{version1}{name}" for name in (("cache", "shmem") if version1 else ("file", "shmem")))
    reclaimable = max(facts.get(cache, 0) - facts.get(shared, 0), 0)
    return max(limit - max(used - reclaimable, 0), 0)


def oom_kills():
    """How many processes the kernel has killed because memory ran out. Two readings tell whether it killed one in between."""
    total = 0
    for source in [group / "memory.events" for group in _cgroups()] + [Path("/proc/vmstat")]:
        try:
            for line in source.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    total += int(value)
        except (OSError, ValueError):
            continue
    return total


def shared_memory():
    """(size, free) of /dev/shm, or (0, 0)."""
    try:
        status = os.statvfs(_SHARED)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def unnamed_shared_memory():
    """Bytes of shared memory that belong to no file in /dev/shm: mostly of removed files whose pages are not free yet."""
    named = 0
    for folder, _, names in os.walk(_SHARED):
        for name in names:
            try:
                named += os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return max(meminfo("Shmem") - named, 0)


def total_memory():
    """Host memory of this machine, or what the control groups allow of it."""
    total = meminfo("MemTotal")
    limit = cgroup_limit()
    return min(total, limit) if limit else total


def available_memory():
    """What a new run could reserve now: the least of free memory, the control group's room and the room in /dev/shm."""
    rooms = [meminfo("MemAvailable"), shared_memory()[1]]
    headroom = cgroup_headroom()
    if headroom is not None:
        rooms.append(headroom)
    return min(rooms)


def cores():
    count = len(os.sched_getaffinity(0))
    for group in _cgroups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                count = min(count, max(1, round(int(quota) / int(period))))
        except (OSError, ValueError):
            continue
    return count


def gpus():
    """Names of NVIDIA GPUs, by the driver's own files."""
    names = []
    for folder in sorted(Path("/proc/driver/nvidia/gpus").glob("*")):
        try:
            lines = (folder / "information").read_text().splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names

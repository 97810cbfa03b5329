"""The lines of a batch's files: those that come in, and the result lines that the front itself writes."""

import asyncio
import json
import os
import re

from supervisor.shared.files import remove

from .answers import Answer
from .errors import error_type

LONGEST_LINE = 64 << 20
NUMBER = re.compile(rb'\{"id":"poise-(\d+)"')
_AT_ONCE, _BYTES_AT_ONCE = 256, 4 << 20  # of lines that are read before they are sent


class Unreadable(Exception):
    """The input file cannot be read: what the system said."""


async def slices(path, look):
    """Lists of what `look(number, text)` makes of the lines of a file, without its Nones. Read and looked at in a thread: a file may
    be large, and the event loop has others to serve."""
    try:
        file = open(path, "rb")
    except OSError as problem:
        raise Unreadable(problem.strerror) from None
    with file:
        lines = _numbered(file)
        while part := await asyncio.to_thread(_part_of, lines, look):
            yield [one for one in part if one is not None]


def _part_of(lines, look):
    part, size = [], 0
    try:
        for number, text in lines:
            part.append(look(number, text))
            size += len(text or b"")
            if len(part) >= _AT_ONCE or size >= _BYTES_AT_ONCE:
                break
    except OSError as problem:
        raise Unreadable(problem.strerror) from None
    return part


def _numbered(file):
    """(number, bytes) of each line that is not blank; None where it is too long. As planner/requests/request_lines.h reads them."""
    number = 0
    while line := file.readline(LONGEST_LINE + 2):
        number += 1
        whole = line.endswith(b"\n") or len(line) < LONGEST_LINE + 2
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.rstrip(b"\r\n")
        if whole and line.strip():
            yield number, line
        elif not whole:
            yield number, None
        while not whole:
            rest = file.readline(1 << 20)
            whole = not rest or rest.endswith(b"\n")


def count_lines(path):
    try:
        with open(path, "rb") as file:
            return sum(1 for _ in _numbered(file))
    except OSError as problem:
        raise Unreadable(problem.strerror) from None


def results_in(file):
    """(number, whether it is an answer, bytes) of each result line; ends before one that a crash tore."""
    for line in file:
        found = NUMBER.match(line)
        if not line.endswith(b"\n") or found is None:
            return
        yield int(found[1]), _is_good(line), len(line)


def _is_good(line):
    """Its status stands behind custom_id, which may hold anything."""
    try:
        return Answer(line.rstrip(b"\n")).status == 200
    except ValueError:
        return False


def split(results, output, errors):
    """Writes answers and errors in the order of their lines to two files, each only if it has a line."""
    counts, expired, places, at = [0, 0], False, [], 0
    if not os.path.exists(results):
        return {"counts": counts, "expired": False}
    with open(results, "rb") as file:
        for number, good, size in results_in(file):
            places.append((number, at, good))
            at += size
        places.sort()
        for index, path in enumerate((output, errors)):
            remove(path)
            wanted = [place for _, place, good in places if good == (index == 0)]
            counts[index] = len(wanted)
            if wanted:
                expired = _copy(file, wanted, path) or expired
    return {"counts": counts, "expired": expired}


def _copy(file, places, path):
    """Copies the lines at these places. Returns whether one of them is of a line that was too late."""
    late = False
    try:
        with open(path, "xb") as to:
            os.fchmod(to.fileno(), 0o600)
            for place in places:
                file.seek(place)
                line = file.readline()
                late = late or line.endswith(_LATE_END)
                to.write(line)
    except OSError:
        remove(path)  # a full disk needs the room
        raise
    return late


def refused_line(number, custom_id, message, param, status=400):
    """An error line as the planner writes it."""
    error = {"message": message, "type": error_type(status), "param": param, "code": "invalid_value"}
    response = {"status_code": status, "request_id": f"req-{number}", "body": {"error": error}}
    return _text({"id": f"poise-{number}", "custom_id": _as_id(custom_id), "response": response, "error": None})


def late_line(number, text):
    return _text({"id": f"poise-{number}", "custom_id": _as_id(field_of(text, "custom_id")), "response": None, "error": _LATE})


def field_of(text, name):
    """What stands under this name in a line; None if there is nothing, or the line is no JSON object."""
    try:
        return json.loads(text or b"{}").get(name)
    except (ValueError, RecursionError, AttributeError):
        return None


def _as_id(value):
    return value if isinstance(value, str) else None


def _text(value):
    return json.dumps(value, separators=(",", ":")).encode()


_LATE = {"message": "the completion window was over before this line was answered", "code": "batch_expired"}
_LATE_END = b'"error":' + _text(_LATE) + b"}\n"

"""Bodies of requests, bounded in size and time, and the strict JSON in them."""

import asyncio
import json
import re

from .errors import Refused

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SLOWEST = 64 << 10  # bytes/s; below that a client keeps a connection without using it


class Patience:
    """How long a body may take before it must come at _SLOWEST; set once, when the front starts."""

    seconds = 20.0


async def read_body(request, most):
    """The body's bytes; 413 beyond `most`, 408 if they come too slowly."""
    check_length(request, most)
    receive = request.receive
    request._receive = bounded_receive(request, most)
    body = b"".join([piece async for piece in request.stream()])
    request._receive = receive  # from here on it says when the client leaves
    return body


def check_length(request, most):
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise too_large(most)


def bounded_receive(request, most):
    """ASGI's receive for a body that is at most so large, and not slower than _SLOWEST."""
    receive, loop = request.receive, asyncio.get_running_loop()
    began, size = loop.time(), 0

    async def bounded():
        nonlocal size
        left = began + Patience.seconds + size / _SLOWEST - loop.time()
        try:
            async with asyncio.timeout(max(left, 0.01)):
                message = await receive()
        except TimeoutError:
            raise too_slow() from None
        size += len(message.get("body", b""))
        if size > most:
            raise too_large(most)
        return message

    return bounded


def too_slow():
    return Refused(408, "the request's body did not come in time", code="request_timeout", headers={"Connection": "close"})


def too_large(most):
    return Refused(
        413, f"the request's body is larger than {most >> 20} MiB, this server's limit", code="request_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip


async def read_object(request, most):
    """(its bytes, the JSON object they hold)."""
    raw = await read_body(request, most)
    return raw, object_in(raw)


def object_in(raw):
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise Refused(400, f"the body is not UTF-8: byte {problem.start} is wrong", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(400, "the body nests too deeply", code="invalid_json") from None
    except ValueError as problem:
        where = f" at line {problem.lineno}, column {problem.colno}" if isinstance(problem, json.JSONDecodeError) else ""
        raise Refused(400, f"the body is no JSON{where}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object", code="invalid_json")
    if _SURROGATE.search(raw) and not is_text(value):
        raise Refused(400, "the body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character", code="invalid_json")
    return value


def is_text(value):
    """Whether every string in it can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
        return True
    except (UnicodeEncodeError, RecursionError):
        return False


def _no_constant(name):
    raise ValueError(name)

"""Files that gzip or zstd made: known by their first bytes, read and written as streams. gzip is Python's; zstd is libzstd by ctypes, which
Debian's dpkg needs too."""

import ctypes
import functools
import gzip
import zlib

from .trouble import CANNOT_START, Refusal, shown

_BLOCK = 1 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_ENDINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def kind_by_name(path):
    """"gzip" or "zstd" by the end of a name, else None."""
    return next((kind for ending, kind in _ENDINGS.items() if str(path).endswith(ending)), None)


def kind_by_content(path):
    """The same by a file's first bytes."""
    with open(path, "rb") as file:
        first = file.read(4)
    return next((kind for magic, kind in _MAGIC.items() if first.startswith(magic)), None)


def require(kind):
    """Refuses a kind that this machine can neither read nor write."""
    if kind == "zstd":
        _zstd()


def check_readable(path):
    """Refuses a file whose name and content disagree, before anything is made of it."""
    named, is_kind = kind_by_name(path), kind_by_content(path)
    if named and is_kind != named:
        raise Refusal(f"input {shown(path)} is no {named} file, as its name says: rename it, or pack it again")
    require(is_kind)


def blocks_of(path):
    """The plain bytes of a file, block by block. Refuses what is damaged or torn."""
    kind = kind_by_content(path)
    try:
        with open(path, "rb") as file:
            if kind == "gzip":
                with gzip.GzipFile(fileobj=file) as plain:
                    yield from iter(lambda: plain.read(_BLOCK), b"")
            elif kind == "zstd":
                yield from _unzstd(file, path)
            else:
                yield from iter(lambda: file.read(_BLOCK), b"")
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise Refusal(f"input {shown(path)} is damaged gzip data ({shown(problem)}): pack it again") from None


def pack(kind, source, target):
    """Writes the bytes of the open file `source` to the open file `target`, packed ("gzip", "zstd") or as they are (None)."""
    if kind == "gzip":
        with gzip.GzipFile(filename="", fileobj=target, mode="wb", compresslevel=6, mtime=0) as packed:
            for block in iter(lambda: source.read(_BLOCK), b""):
                packed.write(block)
    elif kind == "zstd":
        _to_zstd(source, target)
    else:
        for block in iter(lambda: source.read(_BLOCK), b""):
            target.write(block)


class _Buffer(ctypes.Structure):  # ZSTD_inBuffer and ZSTD_outBuffer
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("pos", ctypes.c_size_t)]


@functools.cache
def _zstd():
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        raise Refusal("libzstd.so.1 is not there, so no .zst file can be read or written: install libzstd1, or use .gz", CANNOT_START) from None
    buffers = [ctypes.POINTER(_Buffer)] * 2
    for name, result, arguments in (
        ("ZSTD_createDStream", ctypes.c_void_p, []),
        ("ZSTD_freeDStream", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ZSTD_decompressStream", ctypes.c_size_t, [ctypes.c_void_p, *buffers]),
        ("ZSTD_createCStream", ctypes.c_void_p, []),
        ("ZSTD_freeCStream", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ZSTD_compressStream2", ctypes.c_size_t, [ctypes.c_void_p, *buffers, ctypes.c_int]),
        ("ZSTD_isError", ctypes.c_uint, [ctypes.c_size_t]),
        ("ZSTD_getErrorName", ctypes.c_char_p, [ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _unzstd(file, path):
    library = _zstd()
    stream = library.ZSTD_createDStream()
    room = ctypes.create_string_buffer(_BLOCK)
    left = 0  # what the frame under way still wants; 0: none is
    try:
        for block in iter(lambda: file.read(_BLOCK), b""):
            source = ctypes.create_string_buffer(block, len(block))
            taken = _Buffer(ctypes.addressof(source), len(block), 0)
            full = False  # the room may have been too small for what was decoded
            while taken.pos < taken.size or full:
                given = _Buffer(ctypes.addressof(room), _BLOCK, 0)
                left = library.ZSTD_decompressStream(stream, ctypes.byref(given), ctypes.byref(taken))
                if library.ZSTD_isError(left):
                    why = library.ZSTD_getErrorName(left).decode()
                    raise Refusal(f"input {shown(path)} is damaged zstd data ({why}): pack it again")
                full = given.pos == given.size
                yield room.raw[: given.pos]
    finally:
        library.ZSTD_freeDStream(stream)
    if left:
        raise Refusal(f"input {shown(path)} is damaged zstd data (it ends too early): pack it again")


def _to_zstd(source, target):
    library = _zstd()
    stream = library.ZSTD_createCStream()
    room = ctypes.create_string_buffer(_BLOCK)
    try:
        while True:
            block = source.read(_BLOCK)
            text = ctypes.create_string_buffer(block, len(block)) if block else None
            taken = _Buffer(ctypes.addressof(text) if text else None, len(block), 0)
            ends = not block
            while True:
                given = _Buffer(ctypes.addressof(room), _BLOCK, 0)
                left = library.ZSTD_compressStream2(stream, ctypes.byref(given), ctypes.byref(taken), 2 if ends else 0)
                if library.ZSTD_isError(left):
                    raise OSError(0, f"zstd: {library.ZSTD_getErrorName(left).decode()}")
                target.write(room.raw[: given.pos])
                if left == 0 if ends else taken.pos == taken.size:
                    break
            if ends:
                return
    finally:
        library.ZSTD_freeCStream(stream)

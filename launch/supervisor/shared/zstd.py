"""zstd by libzstd, through ctypes: Debian's dpkg needs that library, too."""

import ctypes
import functools

from .trouble import CANNOT_START, Refusal, shown

_BLOCK = 1 << 20


class _Buffer(ctypes.Structure):  # ZSTD_inBuffer and ZSTD_outBuffer
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("pos", ctypes.c_size_t)]


@functools.cache
def library():
    """libzstd; refuses where this machine has none."""
    try:
        zstd = ctypes.CDLL("libzstd.so.1")
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
        function = getattr(zstd, name)
        function.restype, function.argtypes = result, arguments
    return zstd


def blocks_of(file, path):
    """The plain bytes of the open file `file`. Refuses what is damaged or torn; `path` is its name."""
    zstd = library()
    stream = zstd.ZSTD_createDStream()
    room = ctypes.create_string_buffer(_BLOCK)
    left = 0  # what the frame under way still wants; 0: none is
    try:
        for block in iter(lambda: file.read(_BLOCK), b""):
            source = ctypes.create_string_buffer(block, len(block))
            taken = _Buffer(ctypes.addressof(source), len(block), 0)
            full = False  # the room may have been too small for what was decoded
            while taken.pos < taken.size or full:
                given = _Buffer(ctypes.addressof(room), _BLOCK, 0)
                left = zstd.ZSTD_decompressStream(stream, ctypes.byref(given), ctypes.byref(taken))
                if zstd.ZSTD_isError(left):
                    why = zstd.ZSTD_getErrorName(left).decode()
                    raise Refusal(f"input {shown(path)} is damaged zstd data ({why}): pack it again")
                full = given.pos == given.size
                yield room.raw[: given.pos]
    finally:
        zstd.ZSTD_freeDStream(stream)
    if left:
        raise Refusal(f"input {shown(path)} is damaged zstd data (it ends too early): pack it again")


def pack(source, target):
    """Writes the bytes of the open file `source`, packed, to the open file `target`."""
    zstd = library()
    stream = zstd.ZSTD_createCStream()
    room = ctypes.create_string_buffer(_BLOCK)
    try:
        while True:
            block = source.read(_BLOCK)
            text = ctypes.create_string_buffer(block, len(block)) if block else None
            taken = _Buffer(ctypes.addressof(text) if text else None, len(block), 0)
            ends = not block
            while True:
                given = _Buffer(ctypes.addressof(room), _BLOCK, 0)
                left = zstd.ZSTD_compressStream2(stream, ctypes.byref(given), ctypes.byref(taken), 2 if ends else 0)
                if zstd.ZSTD_isError(left):
                    raise OSError(0, f"zstd: {zstd.ZSTD_getErrorName(left).decode()}")
                target.write(room.raw[: given.pos])
                if left == 0 if ends else taken.pos == taken.size:
                    break
            if ends:
                return
    finally:
        zstd.ZSTD_freeCStream(stream)

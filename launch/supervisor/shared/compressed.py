"""Files that gzip or zstd made: known by their first bytes, read and written as streams. gzip is Python's; zstd.py is loaded for its files
alone, so that commands start fast."""

import gzip
import zlib

from .trouble import Refusal, shown

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
        _zstd().library()


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
                yield from _zstd().blocks_of(file, path)
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
        _zstd().pack(source, target)
    else:
        for block in iter(lambda: source.read(_BLOCK), b""):
            target.write(block)


def _zstd():
    from . import zstd  # pylint: disable=import-outside-toplevel

    return zstd

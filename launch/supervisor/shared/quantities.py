"""Sizes, numbers and times as people write and read them."""

import argparse
import re

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    # vLLM's habit: small letters are decimal, capital letters binary.
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_FOLDED = {name.lower(): factor for name, factor in _UNITS.items() if len(name) > 1}


def size(text):
    """Bytes: 24GiB, 100GB, 1.5G, 8192."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text.strip())
    factor = None
    if match:
        unit = match.group(2)
        factor = _UNITS.get(unit, _FOLDED.get(unit.lower()))
    if factor is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: write 24GiB, 100GB or a number of bytes")
    whole, _, fraction = match.group(1).partition(".")
    count = int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)
    if count <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: it has to be above 0")
    if count >= 1 << 63:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any machine has")
    return count


def count(text, least=1, most=2**31 - 1):
    number = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
    return number


def seed(text):
    return count(text, least=0, most=2**64 - 1)


def share(text):
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share: a number from 0 to 1")
    return number


def positive(text):
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e12:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def counted(number, what):
    """'1 request', '2 requests'."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def rate_text(number):
    """Tokens a second and the like: four digits, never with an exponent."""
    return f"{number:.4g}" if number < 1e4 else f"{number:.0f}"


def bytes_text(number):
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return counted(number, "byte")


def duration(seconds):
    """'12 ms', '8.3 s', '4 min 05 s', '2 h 10 min'."""
    if 0 < seconds < 0.95:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

"""The progress line: redrawn in place on a terminal, printed as a new line every 5 s elsewhere."""

import os
import shutil
import sys
import time

from .paths import on_terminal
from .quantities import bytes_text, duration

_REDRAW = 0.1  # seconds
_PLAIN_LINE = 5.0


class ProgressLine:
    def __init__(self):
        self.terminal = on_terminal() and os.environ.get("TERM") != "dumb"
        self._last = time.monotonic() if not self.terminal else 0.0
        self._drawn = None

    def wait(self):
        """How long the caller may sleep between two calls of `show`."""
        return _REDRAW if self.terminal else 0.25

    def due(self):
        return time.monotonic() - self._last >= (_REDRAW if self.terminal else _PLAIN_LINE)

    def show(self, text):
        self._last = time.monotonic()
        if self.terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            if text != self._drawn:
                self._write("\r\x1b[K" + text)
            self._drawn = text
        else:
            self._write(f"poise: {text}\n")

    def clear(self):
        """Before any other line is written."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = None

    @staticmethod
    def _write(text):
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            pass


def bar(share, width=20):
    filled = min(width, int(share * width))
    return "[" + "=" * filled + " " * (width - filled) + "]"


def reserving_text(reserved, wanted):
    """The progress line while a segment's memory is being reserved."""
    return f"reserving memory {bar(reserved / wanted)} {bytes_text(reserved)} of {bytes_text(wanted)}"


class LoadingRate:
    """Bytes loaded, as text with a rate over the last seconds; before that, bytes reserved."""

    def __init__(self):
        self._began = None

    def text(self, loaded, reserved, total):
        now = time.monotonic()
        if loaded and self._began is None:
            self._began = (now, loaded)
        if not total:
            return "loading: reading the model's files"
        if reserved < total and not loaded:
            return reserving_text(reserved, total)
        text = f"loading {bar(loaded / total)} {bytes_text(loaded)} of {bytes_text(total)}"
        if self._began and now > self._began[0] + 0.2 and loaded > self._began[1]:
            rate = (loaded - self._began[1]) / (now - self._began[0])
            text += f", {rate / 1e9:.2f} GB/s, {duration(max(total - loaded, 0) / rate)} left"
        return text

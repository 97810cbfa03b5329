"""SIGINT, SIGTERM and SIGUSR1 for a poll loop: they are counted, and a descriptor becomes readable. SIGHUP and SIGPIPE are ignored."""

import os
import signal


class Interrupts:
    """From construction on, a signal is only counted, and makes `descriptor` readable."""

    def __init__(self):
        self.count = 0
        self._asked = False
        self.descriptor, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        signal.signal(signal.SIGUSR1, self._note_request)

    def _note(self, number, frame):
        self.count += 1

    def _note_request(self, number, frame):
        self._asked = True

    def asked(self):
        """Whether SIGUSR1 came since the last call: `poise restart` has left a request (restarts.py)."""
        asked, self._asked = self._asked, False
        return asked

    def drain(self):
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            pass

"""SIGINT, SIGTERM and SIGUSR1 as something a poll loop can see; SIGHUP and SIGPIPE do nothing."""

import os
import signal


class Interrupts:
    """From construction on, signals only count. `descriptor` becomes readable with each."""

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
        """Whether somebody left a request (restarts.py) since this was last called."""
        asked, self._asked = self._asked, False
        return asked

    def drain(self):
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            pass

"""SIGINT and SIGTERM as something a poll loop can see; SIGHUP and SIGPIPE do nothing."""

import os
import signal


class Interrupts:
    """From construction on, signals only count. `descriptor` becomes readable with each."""

    def __init__(self):
        self.count = 0
        self.descriptor, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.count += 1

    def drain(self):
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            pass

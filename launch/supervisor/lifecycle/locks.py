"""Locks kept by the kernel: `flock` on a file, released when the last holder ends, however it ends."""

import errno
import fcntl
import os
import stat

from ..shared.trouble import Refusal, naming, shown


class Lock:
    """An exclusive flock on `path` (made with mode 0600). Close-on-exec; a child gets it if the descriptor is made inheritable."""

    def __init__(self, path, descriptor):
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def take(cls, path):
        """The lock, or None while another process holds it. A file that its last holder removed meanwhile is none: we make it anew."""
        while (lock := cls._take(path)) is not None and not lock._has_its_name():
            lock.give_back()
        return lock

    @classmethod
    def _take(cls, path):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise Refusal(f"{shown(path)} is a link, not a lock file: remove it") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Refusal(f"{shown(path)} is not a lock file: remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def _has_its_name(self):
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def write(self, text):
        """Notes the owner in the file; a second process that wants the lock reports it. One write, padded with blanks: the file has
        the old text or the new one whenever this process is killed."""
        with naming(self.path):
            padded = text.encode("utf-8", "surrogateescape").ljust(os.fstat(self.descriptor).st_size)
            os.pwrite(self.descriptor, padded, 0)

    def give_back(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def is_held(path):
    """Whether some living process holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)

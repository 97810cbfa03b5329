"""Survives a `__pycache__` that a full disk cut off.

Python 3.11 does not look whether all of a module's byte code was written, and no later import of that module succeeds. Importing this module
makes imports from this folder compile such a module from its source again. Of this module itself nothing may be cached, so import it
while sys.dont_write_bytecode is set.
"""

import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import cache_from_source

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _Loader(SourceFileLoader):
    def get_code(self, fullname):
        try:
            return super().get_code(fullname)
        except (EOFError, ImportError, TypeError, ValueError):  # what is wrong with the source comes again below
            try:
                os.unlink(cache_from_source(self.path))  # the next import writes it anew
            except OSError:
                pass
            return self.source_to_code(self.get_data(self.path), self.path)


def _is_ours(path):
    return path == _FOLDER or path.startswith(_FOLDER + os.sep)


def _finder(path):
    if not _is_ours(path):
        raise ImportError("another finder's")
    return FileFinder(path, (_Loader, SOURCE_SUFFIXES))


sys.path_hooks.insert(0, _finder)
for _path in list(sys.path_importer_cache):
    if _is_ours(_path):
        del sys.path_importer_cache[_path]

"""Where cuBLAS is, on a machine whose dynamic loader does not know: it often comes with a Python package alone."""

import glob
import os
import sys

_LIBRARY = "libcublasLt.so.13"
# As pip lays out NVIDIA's wheels, in this Python and in the machine's others.
_PLACES = (
    "/usr/local/lib/python3*/*-packages",
    "/usr/lib/python3/*-packages",
    "/opt/*/lib/python3*/site-packages",
)


def environment(given=os.environ):
    """What the gpu_executor's environment needs beside `given` (kernels/cuda/cublas_lt.cpp looks there)."""
    folder = None if given.get("POISE_CUBLAS") else _in_python_packages()
    return {"POISE_CUBLAS": folder} if folder else {}


def _in_python_packages(places=_PLACES):
    for place in (*sys.path, *places):
        found = sorted(glob.glob(os.path.join(place, "nvidia", "*", "lib", _LIBRARY))) if os.path.isabs(place) else []
        if found:
            return os.path.dirname(found[0])
    return None

"""Finds cuBLAS on a machine where it is not on the dynamic loader's path: often only a Python package brings it."""

import glob
import os
import sys

_LIBRARY = "libcublasLt.so.13"
# Where pip puts NVIDIA's wheels, for this Python and for others on the machine.
_PLACES = (
    "/usr/local/lib/python3*/*-packages",
    "/usr/lib/python3/*-packages",
    "/opt/*/lib/python3*/site-packages",
)


def environment(given=os.environ):
    """What to add to the environment `given` for the gpu_executor: POISE_CUBLAS, which kernels/cuda/cublas_lt.cpp reads."""
    folder = None if given.get("POISE_CUBLAS") else _in_python_packages()
    return {"POISE_CUBLAS": folder} if folder else {}


def _in_python_packages(places=_PLACES):
    for place in (*sys.path, *places):
        found = sorted(glob.glob(os.path.join(place, "nvidia", "*", "lib", _LIBRARY))) if os.path.isabs(place) else []
        if found:
            return os.path.dirname(found[0])
    return None

#!/bin/sh
# Checks a GPU machine from a bundle with tests (`launch/poise bundle --with-tests`) or from a built checkout:
#   bench/gpu_check.sh --results DIR [--only tests,goldens,demo,sanitizer,restart,speed,peers] [--help]
# Needs Python 3.11 or newer; for the peers one with torch (the `python3` on PATH, or --peer-python).
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 2
exec "${POISE_PYTHON:-python3}" -s "$here/gpu_check.py" "$@"

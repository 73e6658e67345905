#!/bin/sh
# Run the comparisons on a GPU: equality with the CPU, rounds against loops, a table of each paper.
# Use: sh examples/benchmarks/gpu.sh [--seconds 420] [--data-dir DIR] [--out FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..:$here${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$here/gpu.py" "$@"

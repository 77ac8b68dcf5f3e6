"""Stand-ins for commands of clusters that no test machine has: they start processes as the real ones would.

Each is a small program on PATH. What they set is taken from the manuals of srun, Open MPI and pdsh.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

SRUN = """#!/bin/bash
# srun [--option[=value]...] COMMAND...: one task a node, tasks beside each other; %j and %n in --output
output=/dev/stdout
while [[ $1 == -* ]]; do [[ $1 == --output=* ]] && output=${1#--output=}; shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
  file=${output//%j/$SLURM_JOB_ID}
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" > "${file//%n/$node}" 2> "${file//%n/$node}.err" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
echo localhost
"""
TASKS = """#!/bin/bash
# As many tasks of a launcher as NTASKS says; NAMES lists the variables for rank, local rank, size and local size.
read -r rank local size local_size <<< "$NAMES"
pids=()
for ((task = 0; task < NTASKS; task++)); do
  export "$rank=$task" "$local=$task" "$size=$NTASKS"
  [[ -n $local_size ]] && export "$local_size=$NTASKS"
  "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
PDSH = """#!/bin/bash
# pdsh [-S] [-f N] -w HOST,... COMMAND: here every host is this machine; %n becomes its number, output is prefixed
while [[ $1 == -* ]]; do
  case $1 in
    -w) hosts=$2; shift 2 ;;
    -f) shift 2 ;;
    *) shift ;;
  esac
done
number=0
for host in ${hosts//,/ }; do
  command="$*"
  bash -c "${command//%n/$number}" 2>&1 | sed -u "s/^/$host: /" &
  number=$((number + 1))
done
wait
"""
SSH = """#!/bin/bash
# ssh [-o ...] HOST COMMAND: this machine is every host
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
shift
exec bash -c "$*"
"""


def put(folder: Path, **programs: str) -> dict[str, str]:
    """Write the programs into `folder`; the environment in which they are found."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

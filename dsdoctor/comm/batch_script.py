"""Ready batch scripts that run the check on every node of a cluster: one launcher a node, rank 0 on the first. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_MINUTES = 10
_PORT = 29500
_DS_CONFIG = "ds_config.json"
_MOUNT = "/dsdoctor"
_CONFIG_MOUNT = f"""            - name: config
              mountPath: {_MOUNT}
"""
_CONFIG_VOLUME = """        - name: config
          configMap:
            name: dsdoctor-comm
"""


def slurm(arguments: Sequence[str], *, nodes: int, nproc: int, gpus: bool) -> str:
    """A script for `sbatch`: one task a node, each its own output file; rank 0's holds the result.

    `arguments` are those of `dsdoctor comm`; `nproc` ranks a node, each with a GPU if `gpus`.
    """
    start = _torchrun(arguments, nproc, "$SLURM_NNODES", "$SLURM_NODEID")
    resources = f"#SBATCH --gpus-per-node={nproc}" if gpus else f"#SBATCH --cpus-per-task={nproc}"
    return f"""#!/bin/bash
#SBATCH --job-name=dsdoctor-comm
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}
#SBATCH --time=00:{_MINUTES:02d}:00
#SBATCH --output=dsdoctor-comm-%j.txt

# The result is in dsdoctor-comm-JOB-0.txt, the file of the first node.
set -eu
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT={_PORT}

srun --kill-on-bad-exit=0 --output=dsdoctor-comm-%j-%n.txt bash -c '{start}'
"""


def kubernetes(
    arguments: Sequence[str], *, nodes: int, nproc: int, gpus: bool, image: str, config: Mapping[str, Any] | None = None
) -> str:
    """Manifests for `kubectl apply -f`: a headless service, and an indexed job whose pod 0 logs the result.

    The pods do not have the files of this machine: the ds_config goes with the manifests.
    """
    limits = f"nvidia.com/gpu: {nproc}" if gpus else f"cpu: {nproc}"
    given = [f"{_MOUNT}/{_DS_CONFIG}"] if config else []
    command = _torchrun([*given, *arguments], nproc, str(nodes), "$JOB_COMPLETION_INDEX")
    return f"""# The result is in the log of the first pod: kubectl logs -l batch.kubernetes.io/job-completion-index=0
# Remove all of it before the next check: kubectl delete job,service,configmap dsdoctor-comm --ignore-not-found
{_config_map(config) if config else ""}apiVersion: v1
kind: Service
metadata:
  name: dsdoctor-comm
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: dsdoctor-comm
---
apiVersion: batch/v1
kind: Job
metadata:
  name: dsdoctor-comm
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 0
  activeDeadlineSeconds: {_MINUTES * 60}
  template:
    spec:
      subdomain: dsdoctor-comm
      restartPolicy: Never
      containers:
        - name: comm
          image: {image}
          env:
            - name: MASTER_ADDR
              value: dsdoctor-comm-0.dsdoctor-comm
            - name: MASTER_PORT
              value: "{_PORT}"
          command: ["bash", "-c"]
          args:
            - >-
              {command}
          resources:
            limits:
              {limits}
          volumeMounts:
            - name: shm
              mountPath: /dev/shm
{_CONFIG_MOUNT if config else ""}      volumes:
        - name: shm
          emptyDir:
            medium: Memory
{_CONFIG_VOLUME if config else ""}"""


def _config_map(config: Mapping[str, Any]) -> str:
    """JSON is YAML too, so that the text can stand there as it is."""
    return f"""apiVersion: v1
kind: ConfigMap
metadata:
  name: dsdoctor-comm
data:
  {_DS_CONFIG}: {json.dumps(json.dumps(config))}
---
"""


def _torchrun(arguments: Sequence[str], nproc: int, nodes: str, node: str) -> str:
    """What each node runs; `nodes` and `node` are expanded there."""
    meeting = '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    told = shlex.join(["dsdoctor", "comm", *arguments]).replace("'", '"')
    return f"torchrun --nnodes={nodes} --nproc-per-node={nproc} --node-rank={node} {meeting} -m {told}"

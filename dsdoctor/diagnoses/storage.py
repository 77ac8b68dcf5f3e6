"""Disks: full, and as swap space of ZeRO-Infinity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import at_key
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, Fix, Severity
from dsdoctor.frames import passes_through
from dsdoctor.machine.facts import SwapFolder
from dsdoctor.runs.facts import Failure
from dsdoctor.units import size

_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "lustre", "cifs", "smb", "gpfs", "beegfs", "ceph", "fuse.sshfs", "afs", "9p")


class DiskFull(TextDiagnosis):
    """A file could not be written because the disk (or a quota) is full.

    What it is: a full training checkpoint takes about 14 to 16 bytes a parameter, times the checkpoints kept. torch's
    writer often says no word about a disk: "PytorchStreamWriter failed writing file", "unexpected pos", "iostream
    error".

    What proves it: such an error of the writer, or "No space left on device" for a file; before a run the size that a
    checkpoint will have against the free space of the folder it is to be written to.

    When it could be wrong: "No space left on device" from NCCL or under /dev/shm is shared memory, not the disk. A
    network file system that went away breaks the stream as well.

    What to do: `df -h FOLDER` and `df -i FOLDER` show room and inodes, `quota -s` (on Lustre `lfs quota -hu $USER
    FOLDER`) your own limit, `ulimit -f` one for each file, `du -sh FOLDER/* | sort -h` what fills it. Write to another
    volume (`output_dir`, or the folder given to `engine.save_checkpoint`), and keep fewer checkpoints:
    `save_total_limit=2` in the Trainer, else `rm -r CKPT/OLD_TAG` once the newer one is complete. The checkpoint that
    was being written is cut off: name the one before it in `CKPT/latest`.
    """

    id = "disk/full"
    severity = "error"
    title = "the disk is full"
    forms = (
        Form(message=r"PytorchStreamWriter failed writing file|inline_container\.cc:\d+\] \. unexpected pos"),
        Form(message=r"basic_ios::clear: iostream error|iostream error"),
        Form(message=r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]"),
        Form(message=r"SafetensorError.*(?:No space|IoError)|Error while serializing: IoError"),
    )
    cause = (
        "a file could not be written to its end: the disk is full, or a quota or the limit of a file's size is reached"
    )
    fixes = (
        Fix(
            text="see what is full (df -h, df -i, quota -s, ulimit -f) and free it, or write to another volume; "
            "a full checkpoint takes 14 to 16 bytes a parameter"
        ),
        Fix(text="keep fewer checkpoints (save_total_limit=2), delete old ones; the one being written is cut off"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        checkpoint = case.memory.checkpoint if case.memory is not None else None
        if checkpoint is not None and checkpoint.free is not None and checkpoint.needed > checkpoint.free:
            told = f"{checkpoint.kept} checkpoint(s) of {size(checkpoint.bytes)} and {size(checkpoint.free)} free"
            yield self.finding(
                cause=f"the checkpoints will not fit into {checkpoint.folder}: {told}",
                evidence=(Evidence(source="memory", text=told),),
                confidence=0.8,
                caveat="the size is worked out from weights, masters and optimizer states",
                fixes=self.fixes,
            )

    def applies(self, failure: Failure, case: Case) -> bool:
        everything = (failure, *failure.chain)
        shared = any(
            "/dev/shm" in f.message or "nccl" in f.message.lower() or "/torch_" in f.message for f in everything
        )
        return not shared and not passes_through(failure.frames, r"multiprocessing[/\\]reductions\.py")


class NvmeSwap(TextDiagnosis):
    """ZeRO-Infinity cannot swap to NVMe.

    What it is: parameters or optimizer states that are to lie on a disk need the async_io extension (libaio) and a
    folder with room for 12 to 16 bytes a parameter.

    What proves it: an error out of DeepSpeed's swapping code or of async_io, or a swap file that is shorter than the
    buffer written to it (`buffer nbytes != file bytes`, which ends the process with -6); before a run the folder
    itself, if it cannot be written in or lies in memory or on the network.

    When it could be wrong: a full disk there is reported as `disk/full`.

    What to do: `ds_report` must show async_io as `[OKAY]`: else `apt-get install libaio-dev` (`dnf install
    libaio-devel`), or with conda `CFLAGS="-I$CONDA_PREFIX/include" LDFLAGS="-L$CONDA_PREFIX/lib"` in front of the
    command. Give `"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}`, likewise
    `offload_optimizer`, on a local disk: `df -hT /local_nvme` shows its file system and room. While no job runs,
    `rm -r /local_nvme/zero_stage_3` takes away what an earlier one has left. Without such a disk, `"device": "cpu"`.
    """

    id = "nvme/swap"
    severity = "error"
    title = "swapping to NVMe does not work"
    forms = (
        Form(
            message=r"(?P<unset>expected str, bytes or os\.PathLike object, not NoneType)", frames=r"swap_tensor[/\\]"
        ),
        Form(message=r"(?P<unset>\"nvme_path\" in DeepSpeed Config cannot be None)"),
        Form(types=("AssertionError", "RuntimeError", "OSError"), frames=r"deepspeed[/\\]runtime[/\\]swap_tensor[/\\]"),
        Form(message=r"async_io.*(?:not compatible|not being compatible|requires the dev libaio|failed)"),
    )
    kinds = ("swap-failed",)
    confidence = 0.85
    cause = "DeepSpeed cannot swap tensors to NVMe"
    fixes = (
        Fix(text="see to the room on the disk of nvme_path (df -h): 12 to 16 bytes a parameter, and that it is local"),
        Fix(
            text="install libaio's development files (libaio-dev, libaio-devel); ds_report shows whether async_io loads"
        ),
    )
    keys = ("zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path")

    def tell(self, groups: Mapping[str, str]) -> str:
        return (
            self.cause if groups.get("unset", "?") == "?" else "swapping to NVMe is asked for without a folder for it"
        )

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        return self.fixes if groups.get("unset", "?") == "?" else (_GIVE_FOLDER, *self.fixes)

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        for folder in case.machine.swap_folders if case.machine is not None else ():
            if not folder.usable:
                yield self._folder(case, folder, "cannot be written in", "error", 0.95)
            elif folder.file_system in _IN_MEMORY:
                yield self._folder(
                    case, folder, f"lies in memory ({folder.file_system}), not on a disk", "warning", 0.9
                )
            elif folder.file_system is not None and folder.file_system.startswith(_NETWORK):
                yield self._folder(case, folder, f"lies on the network ({folder.file_system})", "warning", 0.7)

    def _folder(self, case: Case, folder: SwapFolder, what: str, severity: Severity, confidence: float) -> Finding:
        shown = Evidence(source="environment", text=f"{folder.path}: {folder.file_system or 'unknown'} file system")
        config = case.config
        return self.finding(
            severity=severity,
            cause=f"{folder.key} is {folder.path}, which {what}",
            evidence=(shown, *((at_key(config, folder.key),) if config is not None else ())),
            confidence=confidence,
            fixes=(Fix(text="give a folder on a local NVMe disk that the job may write in"),),
            keys=(folder.key,),
        )


_GIVE_FOLDER = Fix(
    text="give nvme_path beside device: nvme, in zero_optimization.offload_param and offload_optimizer: a folder on a "
    'local NVMe disk; or "device": "cpu"'
)

DIAGNOSES: tuple[Diagnosis, ...] = (DiskFull(), NvmeSwap())

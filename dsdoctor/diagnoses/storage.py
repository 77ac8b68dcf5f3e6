"""Disks: full, and as swap space of ZeRO-Infinity."""

from __future__ import annotations

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix
from dsdoctor.frames import passes_through
from dsdoctor.runs.facts import Failure


class DiskFull(TextDiagnosis):
    """A file could not be written because the disk (or a quota) is full.

    What it is: a full training checkpoint takes about 14 to 16 bytes a parameter, times the checkpoints kept. torch's
    writer often says no word about a disk: "PytorchStreamWriter failed writing file", "unexpected pos", "iostream
    error".

    What proves it: such an error of the writer, or "No space left on device" for a file.

    When it could be wrong: "No space left on device" from NCCL or under /dev/shm is shared memory, not the disk. A
    network file system that went away breaks the stream as well.

    What to do: free space or write elsewhere; keep fewer checkpoints (`save_total_limit`).
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
    cause = "writing a file failed: the disk, or its quota, is full"
    fixes = (
        Fix(text="free space or write to another volume; a full checkpoint takes 14 to 16 bytes a parameter"),
        Fix(text="keep fewer checkpoints (save_total_limit), delete old ones"),
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

    What proves it: an error out of DeepSpeed's swapping code or of async_io.

    When it could be wrong: a full disk there is reported as `disk/full`.

    What to do: install libaio's development files, give `nvme_path`, and see to the room on that disk.
    """

    id = "nvme/swap"
    severity = "error"
    title = "swapping to NVMe does not work"
    forms = (
        Form(message=r"expected str, bytes or os\.PathLike object, not NoneType", frames=r"swap_tensor[/\\]"),
        Form(types=("AssertionError", "RuntimeError", "OSError"), frames=r"deepspeed[/\\]runtime[/\\]swap_tensor[/\\]"),
        Form(message=r"async_io.*(?:not compatible|requires the dev libaio|failed)"),
    )
    confidence = 0.8
    cause = "DeepSpeed cannot swap tensors to NVMe"
    fixes = (Fix(text="install libaio's development files and give nvme_path a folder on that disk with enough room"),)
    keys = ("zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path")


DIAGNOSES: tuple[Diagnosis, ...] = (DiskFull(), NvmeSwap())

"""Checkpoints that cannot be loaded or converted."""

from __future__ import annotations

from collections.abc import Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix
from dsdoctor.runs.facts import Failure

_LOADS = r"load_checkpoint|checkpoint_engine|zero_to_fp32\.py|ds_to_universal\.py|_load_from_checkpoint"


class WorldSize(TextDiagnosis):
    """The checkpoint was written by another number of ranks.

    What it is: ZeRO checkpoints hold one part of the optimizer states a data-parallel rank.

    What proves it: DeepSpeed's message with both numbers.

    When it could be wrong: the numbers are of data-parallel ranks; with another tensor or pipeline parallelism they
    differ although as many GPUs run.

    What to do: resume with the same number of ranks; or `python -m deepspeed.checkpoint.ds_to_universal --input_folder
    CKPT/TAG --output_folder CKPT/TAG_universal` and `"checkpoint": {"load_universal": true}`; or load the weights
    alone: `engine.load_checkpoint(CKPT, load_optimizer_states=False, load_module_only=True)`.
    """

    id = "checkpoint/world-size"
    severity = "error"
    title = "the checkpoint is of another number of ranks"
    forms = (Form(message=r"used a DP world size of (?P<old>\d+) but the current world size is (?P<new>\d+)"),)
    confidence = 0.95
    cause = "the checkpoint was written by {old} data-parallel ranks and is loaded by {new}"
    fixes = (
        Fix(
            text="resume with the same number of ranks, or convert it with ds_to_universal.py and load it as universal"
        ),
        Fix(text="or load the weights alone: load_optimizer_states=False, load_module_only=True"),
    )
    keys = ("checkpoint.load_universal",)


class MissingShards(TextDiagnosis):
    """Files of a checkpoint are not there, or cut off.

    What it is: a wrong folder or tag, files of another node that were never copied, a save or a download that was
    interrupted (its file is there and ends too early).

    What proves it: the loader's message about the file that it looked for or could not read to its end, or a bare
    assertion inside the loader.

    When it could be wrong: a `latest` file that is missing is only a warning: DeepSpeed then starts afresh in silence.

    What to do: `cat CKPT/latest; ls -l CKPT/$(cat CKPT/latest)`: there must be one `*_optim_states.pt` a data-parallel
    rank, all of about the same size; with several nodes save to a file system that all of them share. Where the last
    save was interrupted, write the tag of the one before into `latest`.
    """

    id = "checkpoint/missing-shards"
    severity = "error"
    title = "files of the checkpoint are missing or cut off"
    forms = (
        Form(message=r"Expected \d+ of '[^']*' under '[^']*' but found \d+ files"),
        Form(
            message=r"(?i)(?:can't|unable to) find.{0,60}(?:checkpoint|latest|optim_states|model_states|zero_pp_rank)"
        ),
        Form(types=("FileNotFoundError",), message=r"(?:zero_pp_rank|mp_rank|optim_states|model_states)\S*\.pt"),
        Form(message=r"Invalid for universal checkpoint: \S+ does not exist"),
        Form(message=r"not a valid DeepSpeed checkpoint|unable to load the checkpoint\. Ensure you passed in"),
        Form(types=("SafetensorError",), message=r"(?P<damaged>Error while deserializing header)"),
        Form(types=("OSError",), message=r"(?P<damaged>Unable to load weights) from (?:pytorch )?checkpoint file"),
        Form(message=r"(?P<damaged>PytorchStreamReader) failed", frames=_LOADS),
        Form(
            types=("UnpicklingError", "EOFError"), message=r"(?P<damaged>pickle data|Ran out of input)", frames=_LOADS
        ),
        Form(
            types=("AssertionError",),
            message=r"^\s*$",
            frames=r"deepspeed[/\\]runtime[/\\](?:state_dict_factory|engine)\.py:\w*(?:load|check)\w*",
        ),
    )
    cause = "files of the checkpoint are missing, or the folder or tag is not the right one"
    fixes = (
        Fix(text="see that the folder holds the parts of all ranks under the tag that its file latest names"),
        Fix(text="save to a file system that all nodes share"),
    )

    def tell(self, groups: Mapping[str, str]) -> str:
        if "damaged" in groups:
            return (
                "a file of the checkpoint cannot be read to its end: its save or its download was interrupted, or it "
                "was copied in part"
            )
        return super().tell(groups)


class ZeroToFp32(TextDiagnosis):
    """The conversion of a ZeRO checkpoint to one weights file fails.

    What it is: `zero_to_fp32.py` puts the partitions of all ranks together. It fails where files are missing, were
    written by another release, or frozen parameters are not accounted for.

    What proves it: its own sum of elements, or a traceback that goes through the script.

    When it could be wrong: a lack of memory in the conversion has its own message.

    What to do: `cd CKPT && python zero_to_fp32.py . OUT`, with the script that lies beside that checkpoint (it belongs
    to the release that wrote it) and the files of all ranks of one and the same save.
    """

    id = "checkpoint/zero-to-fp32"
    severity = "error"
    title = "the ZeRO checkpoint cannot be converted"
    forms = (
        Form(message=r"consumed \d+ numels out of \d+ - something is wrong"),
        Form(types=("AssertionError",), message=r"universal_checkpoint_info"),
        Form(
            types=("KeyError", "ValueError", "AttributeError", "RuntimeError"),
            message=r".",
            frames=r"zero_to_fp32\.py:",
        ),
    )
    confidence = 0.85
    cause = "zero_to_fp32 cannot put the partitions of this checkpoint together"
    fixes = (
        Fix(text="run the zero_to_fp32.py that lies in the checkpoint's folder, with the files of all ranks there"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        """Where files are missing, or damaged, that is the diagnosis."""
        return not MissingShards().claims(failure, case)


DIAGNOSES: tuple[Diagnosis, ...] = (WorldSize(), MissingShards(), ZeroToFp32())

"""How the processes of a job were started."""

from __future__ import annotations

from collections.abc import Mapping

from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix


class LauncherMissing(TextDiagnosis):
    """The script was started with plain `python`, without a launcher.

    What it is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not all set, so DeepSpeed tries to find
    an MPI environment and misses mpi4py.

    What proves it: the import error of mpi4py in DeepSpeed's MPI discovery, or torch's message about an unset RANK.

    When it could be wrong: a cluster that really starts ranks by mpirun needs mpi4py.

    What to do: start it with `deepspeed`, `torchrun` or `accelerate launch`. Installing mpi4py makes the error go away
    and trains with a world size of 1, silently.
    """

    id = "launch/launcher-missing"
    severity = "error"
    title = "started without a launcher"
    forms = (
        Form(types=("ModuleNotFoundError", "ImportError"), message=r"No module named 'mpi4py'"),
        Form(message=r"DeepSpeed requires the LOCAL_RANK environment variable"),
        Form(
            message=r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set"
        ),
        Form(types=("KeyError",), message=r"^'?(?:LOCAL_RANK|RANK|WORLD_SIZE)'?$"),
    )
    cause = (
        "the variables of a launcher (RANK, WORLD_SIZE, LOCAL_RANK, ...) are not set: it was started with plain python"
    )
    fixes = (
        Fix(text="start it with deepspeed, torchrun or accelerate launch"),
        Fix(text="do not install mpi4py for this: it would train with a world size of 1, silently"),
    )


class LocalRankMismatch(TextDiagnosis):
    """The local rank given as an argument and the one in the environment do not agree, or the argument is refused.

    What it is: the `deepspeed` launcher appends `--local_rank=N` to the script's arguments; torchrun only sets
    LOCAL_RANK. A script that parses its arguments strictly ends with exit code 2; one that believes the default 0 of an
    argument of its own disagrees with the environment.

    Where the local rank is not used at all, every rank takes GPU 0, and NCCL refuses two ranks on one GPU.

    What proves it: the message of DeepSpeed, an argument parser (argparse, Hugging Face's, click) that refuses
    `--local_rank`, or NCCL's "Duplicate GPU detected".

    When it could be wrong: two ranks also share a GPU where more are started than there are, or where
    CUDA_VISIBLE_DEVICES is the same single one for all.

    What to do: read LOCAL_RANK from the environment, and accept the argument (`parser.add_argument("--local_rank")`) or
    start with `--no_local_rank`.
    """

    id = "launch/local-rank-mismatch"
    severity = "error"
    title = "--local_rank and LOCAL_RANK do not go together"
    forms = (
        Form(
            message=r"Mismatch in local rank setting(?:, args\.local_rank=0 but env\['LOCAL_RANK'\]=(?P<unasked>\d+))?"
        ),
        Form(types=("SystemExit", "ArgumentError"), message=r"unrecognized arguments: .*--local[-_]rank"),
        Form(message=r"not used by the HfArgumentParser: .*--local[-_]rank"),
        Form(message=r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device"),
    )
    kinds = ("local-rank-refused",)
    cause = "the --local_rank argument of the launcher and the script's own idea of its local rank do not go together"
    fixes = (
        Fix(text="read LOCAL_RANK from the environment and accept --local_rank in the argument parser"),
        Fix(
            text="or start it with the launcher it was written for: deepspeed passes --local_rank, torchrun does "
            "not (dsdoctor starts it so with --launcher deepspeed)"
        ),
        Fix(text="or start with deepspeed --no_local_rank, where the script refuses the argument"),
    )

    def tell(self, groups: Mapping[str, str]) -> str:
        """What it means: the default of the script's own argument, another argument, or one GPU for two ranks."""
        if groups.get("unasked"):
            return (
                f"the script's --local_rank is 0 on the process whose LOCAL_RANK is {groups['unasked']}: its launcher "
                "passes no such argument (torchrun does not, deepspeed does), so that the argument's default counts"
            )
        if not groups.get("one"):
            return self.cause
        return (
            f"ranks {groups['one']} and {groups['other']} use the same GPU: the script does not take the one that its "
            "local rank stands for"
        )

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        return (_OWN_GPU,) if groups.get("one") else self.fixes


_OWN_GPU = Fix(text='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first of all; start no more ranks than GPUs')


class SshOrHostfile(TextDiagnosis):
    """The hostfile cannot be used, or a host of it cannot be reached.

    What it is: the `deepspeed` launcher starts the other nodes over ssh/pdsh from a hostfile with lines
    `host slots=N`.

    What proves it: its message, or those of ssh, pdsh (exit code 255, or 127 where the program is missing on that node)
    and mpirun (too few slots, daemons that do not start).

    When it could be wrong: an exit code of 0 from an old pdsh is no success; any other exit code behind "ssh exited
    with" is that of the job on a node that was reached, and is not meant here.

    What to do: `ssh HOST true` must work without a password from the node where you launch; every line of the hostfile
    must read `host slots=N`.
    """

    id = "launch/ssh-or-hostfile"
    severity = "error"
    title = "a host of the hostfile cannot be used"
    forms = (
        Form(message=r"(?i)hostfile .*(?:not formatted correctly|is empty|does not exist|multiple entries|contains)"),
        Form(message=r"(?i)not reachable via ssh|setup passwordless ssh"),
        Form(message=r"launcher '\w+' not installed"),
        Form(message=r"not found in hostfile|No slot '\S+' specified on host|no extra nodes available via hostfile"),
    )
    kinds = ("ssh-failed",)
    cause = "a host of the hostfile cannot be used or reached over ssh"
    fixes = (
        Fix(text="make `ssh HOST true` work without a password for every host, from the node where you launch"),
        Fix(text="write every line of the hostfile as: host slots=N"),
    )


DIAGNOSES: tuple[Diagnosis, ...] = (LauncherMissing(), LocalRankMismatch(), SshOrHostfile())

"""The lines that programs print, as pieces for whole logs: DeepSpeed, its launcher, torchrun, the Trainer, NCCL."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SITE = "/opt/conda/lib/python3.10/site-packages"


@dataclass(frozen=True, kw_only=True)
class WrittenLog:
    """A log and what must be said of it. `primary` is None where nothing of severity warning or error may be said.

    `line` is a piece of the decisive line; `skipped` and `settled` are fields of the loss scale.
    """

    name: str
    text: str
    primary: str | None
    also: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    line: str = ""
    skipped: int | None = None
    settled: float | None = None


def log(*pieces: str | Iterable[str]) -> str:
    """The pieces, one below the other."""
    lines: list[str] = []
    for piece in pieces:
        lines.extend([textwrap.dedent(piece).strip("\n")] if isinstance(piece, str) else piece)
    return "\n".join(lines) + "\n"


def behind(prefix: str, text: str) -> str:
    """The text with that prefix before each line, as launchers and collectors of logs put it there."""
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def ds(message: str, *, second: int = 0, level: str = "INFO", where: str = "logging.py:96:log_dist") -> str:
    """A line of DeepSpeed's logger."""
    hours, rest = divmod(second, 3600)
    clock = f"{10 + hours:02d}:{rest // 60:02d}:{rest % 60:02d},118"
    return f"[2024-05-11 {clock}] [{level}] [{where}] {message}"


def overflow(scale: int, following: int | None = None, *, second: int = 0, hysteresis: int = 2) -> str:
    """The line about a skipped step, 0.8.3 and later; without a next scale only hysteresis is used up."""
    text = f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, "
    if following is None:
        text += f"but hysteresis is {hysteresis}. Reducing hysteresis to {hysteresis - 1}"
        return ds(text, second=second, where="loss_scaler.py:190:update_scale")
    return ds(f"{text}reducing to {following}", second=second, where="loss_scaler.py:183:update_scale")


def bar(done: int, total: int, *, speed: str = "1.31s/it", title: str = "") -> str:
    """A progress bar of tqdm."""
    percent = 100 * done // total
    head = f"{title}: " if title else ""
    return f"{head}{percent:3d}%|{'█' * (percent // 10):<10}| {done}/{total} [01:{done % 60:02d}<09:11, {speed}]"


def hf(step: int, loss: float | str, *, norm: float | str | None = None, epoch: float = 0.0, lr: str = "1e-05") -> str:
    """The dict that the Trainer prints."""
    grad = f", 'grad_norm': {norm}" if norm is not None else ""
    return f"{{'loss': {loss}{grad}, 'learning_rate': {lr}, 'epoch': {epoch or round(step / 500, 2)}}}"


def trainer(
    losses: Sequence[float | str], *, total: int = 500, first: int = 1, norms: Sequence[float | str] = ()
) -> list[str]:
    """Bars and dicts of the Trainer, one each step."""
    lines = []
    for index, loss in enumerate(losses):
        step = first + index
        lines += [bar(step, total), hf(step, loss, norm=norms[index] if norms else None)]
    return lines


def falling(count: int, start: float = 2.8, end: float = 1.4) -> list[float]:
    """Losses of a run that learns."""
    return [round(start + (end - start) * (i / count) ** 0.5 + 0.03 * ((i * 7) % 5 - 2), 4) for i in range(count)]


def launched(script: str = "train.py", *, gpus: int = 2) -> list[str]:
    """What the `deepspeed` command prints before the ranks do."""
    slots = ", ".join(map(str, range(gpus)))
    return [
        ds("Setting ds_accelerator to cuda (auto detect)", where="real_accelerator.py:191:get_accelerator"),
        ds(
            "Unable to find hostfile, will proceed with training with local resources only.",
            level="WARNING",
            where="runner.py:202:fetch_hostfile",
        ),
        ds(f"cmd = /opt/conda/bin/python -u -m deepspeed.launcher.launch {script}", where="runner.py:568:main"),
        ds(f"WORLD INFO DICT: {{'localhost': [{slots}]}}", where="launch.py:145:main"),
        ds(f"nnodes=1, num_local_procs={gpus}, node_rank=0", where="launch.py:151:main"),
        ds(f"dist_world_size={gpus}", where="launch.py:163:main"),
    ]


def finished(*, gpus: int = 2) -> list[str]:
    """What the `deepspeed` command prints when all ranks have done their work."""
    where = "launch.py:351:main"
    return [ds(f"Process {4100 + rank} exits successfully.", second=900, where=where) for rank in range(gpus)]


def stopped(code: int, *, gpus: int = 2, script: str = "train.py", second: int = 900) -> list[str]:
    """What the `deepspeed` command prints when a rank has failed."""
    where = "launch.py:315:sigkill_handler"
    lines = [ds(f"Killing subprocess {4100 + rank}", second=second, where=where) for rank in range(gpus)]
    command = f"['/opt/conda/bin/python', '-u', '{script}', '--local_rank={gpus - 1}']"
    return [*lines, ds(f"{command} exits with return code = {code}", second=second, level="ERROR", where=where)]


def frame(file: str, line: int, function: str, code: str) -> str:
    return f'  File "{file}", line {line}, in {function}\n    {code}'


def traceback(kind: str, message: str, *frames: tuple[str, int, str, str], prefix: str = "") -> list[str]:
    """A traceback; `prefix` stands before each of its lines."""
    body = [frame(*one) for one in (("train.py", 88, "<module>", "main()"), *frames)]
    text = "\n".join(["Traceback (most recent call last):", *body, f"{kind}: {message}" if message else kind])
    return [prefix + line for line in text.splitlines()]


def torchrun_failed(code: int, *, rank: int = 0, others: Sequence[int] = (), name: str = "") -> list[str]:
    """The agent's report: one rank failed, the others were sent SIGTERM."""
    lines = [
        f"W0511 10:15:01.{i}21000 4000 torch/distributed/elastic/multiprocessing/api.py:900] "
        f"Sending process {4100 + other} closing signal SIGTERM"
        for i, other in enumerate(others)
    ]
    signal = f" ({name})" if name else ""
    why = f"Signal {-code} ({name}) received by PID {4100 + rank}" if name else "To enable traceback see: https://x"
    return [
        *lines,
        f"E0511 10:15:02.921000 4000 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) "
        f"local_rank: {rank} (pid: {4100 + rank}) of binary: /opt/conda/bin/python",
        "Traceback (most recent call last):",
        '  File "/opt/conda/bin/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        f'  File "{SITE}/torch/distributed/run.py", line 918, in main',
        "    run(args)",
        f'  File "{SITE}/torch/distributed/launcher/api.py", line 268, in launch_agent',
        "    raise ChildFailedError(",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2024-05-11_10:15:01",
        "  host      : gpu01",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: {4100 + rank}){signal}",
        "  error_file: <N/A>",
        f"  traceback : {why}",
        "=" * 60,
    ]


def watchdog(rank: int, seq: int, op: str, *, numel: int, out: int | None = None, ms: int = 600000) -> str:
    """The line of NCCL's watchdog, torch 2.4 and later."""
    return (
        f"[rank{rank}]:[E511 10:40:0{rank % 10}.408271257 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, "
        f"NumelOut={out if out is not None else numel}, Timeout(ms)={ms}) ran for {ms + 41 + rank} milliseconds "
        "before timing out."
    )


def watchdog_ends(rank: int, seq: int) -> list[str]:
    """What a rank prints when its watchdog takes the process down."""
    return [
        f"[rank{rank}]:[E511 10:40:0{rank % 10}.715588844 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) "
        f"Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL "
        f"work: {seq + 2}, last completed NCCL work: {seq - 1}.",
        f"[rank{rank}]:[E511 10:40:0{rank % 10}.715601113 ProcessGroupNCCL.cpp:630] [Rank {rank}] To avoid data "
        "inconsistency, we are taking the entire process down.",
    ]

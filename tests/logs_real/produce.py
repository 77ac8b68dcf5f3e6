"""Runs `job.py` in all its ways under the real launchers and keeps what they print, made neutral, in `produced/`.

    python -m tests.logs_real.produce [NAME…]        # all, or these

Needs torch, DeepSpeed and Transformers on a machine without a GPU; takes about ten seconds a log. Paths, hosts, users,
process ids, ports, addresses of memory and the date are replaced; times keep their distances.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
PRODUCED = HERE / "produced"
LONGEST = 48_000
"""Characters of a log that are kept: its head and its tail."""
LIMIT = 120
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--master-port", "{port}")
DEEPSPEED = ("deepspeed", "--num_accelerators", "2", "--master_port", "{port}")
ALONE = ("torchrun", "--nproc-per-node", "1", "--master-port", "{port}")
PYTHON = ("python",)


@dataclass(frozen=True)
class Recipe:
    """How a log is made: the launcher, what job.py does, and what happens around it."""

    name: str
    how: str
    launcher: tuple[str, ...] = TORCHRUN
    variables: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """Ways of job.py that are run before, in the same folder."""
    send: int | None = None
    """Signal for the launcher after it has trained for some seconds."""
    hold_port: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    job: str = "job.py"
    beside: tuple[str, ...] = ()
    """A second launcher, started at the same time, whose output goes into the same log."""


RECIPES = (
    *(Recipe(name, name) for name in (
        "warmup", "periodic", "collapse", "thrash", "static", "no-zero-collapse", "hidden", "exploding",
        "bf16-skips", "bf16-silent", "underflow", "no-fp16", "healthy", "healthy-zero3", "batch-size",
        "unknown-key", "wrong-type", "both-precisions", "auto-clipping", "auto-batch", "no-config",
        "untested-optimizer", "own-exception", "bogus-size", "segfault", "kill", "bus", "stuck", "uneven",
        "weight-outside", "second-model", "empty-file", "no-grad", "reduced-twice", "recompute", "full-disk",
        "no-device", "trainer", "trainer-nan", "trainer-nan-shown", "trainer-mismatch",
    )),
    Recipe("mismatch", "mismatch", variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    Recipe("offload", "offload", ALONE),
    Recipe("offline", "offline", variables={"HF_HUB_OFFLINE": "1"}),
    Recipe("no-launcher", "healthy", PYTHON),
    Recipe("alone", "alone", PYTHON, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}),
    Recipe("no-such-host", "client", PYTHON, {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "{port}"}),
    Recipe("port-taken", "healthy", hold_port=True),
    Recipe("other-world", "load", ALONE, before=("save",)),
    Recipe("no-such-tag", "load-nothing", before=("save",)),
    Recipe("hangup", "long", send=signal.SIGHUP),
    Recipe("cancelled", "long", send=signal.SIGTERM),
    Recipe("ds-healthy", "healthy", DEEPSPEED),
    Recipe("ds-own-exception", "own-exception", DEEPSPEED),
    Recipe("ds-kill", "kill", DEEPSPEED),
    Recipe("ds-strict", "strict-healthy", DEEPSPEED),
    Recipe("ds-hostfile", "healthy", ("deepspeed", "--hostfile", "hosts"), files={"hosts": "node01 slots = 4\n"}),
)  # fmt: skip


def produce(recipe: Recipe) -> str:
    """The log of one recipe, made neutral."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.listen()
        for name, text in recipe.files.items():
            Path(folder, name).write_text(text)
        for how in recipe.before:
            _run(Recipe(how, how, job=recipe.job), folder, _free_port())
        text = _run(recipe, folder, port if recipe.hold_port else _free_port())
        return cut(neutral(text, folder))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(recipe: Recipe, folder: str, port: int) -> str:
    output = Path(folder, "output")
    with output.open("wb") as sink:
        process = _start(recipe, recipe.launcher, folder, port, sink)
        beside = _start(recipe, recipe.beside, folder, _free_port(), sink) if recipe.beside else None
        try:
            if recipe.send is not None:
                _when(lambda: b"step 20 " in output.read_bytes(), process)
                process.send_signal(recipe.send)
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
            if beside is not None:
                _end(beside)
    return output.read_text("utf-8", "replace")


def _start(
    recipe: Recipe, launcher: tuple[str, ...], folder: str, port: int, sink: IO[bytes]
) -> subprocess.Popen[bytes]:
    bin_folder = Path(sys.executable).parent
    head, *rest = (part.format(port=port) for part in launcher)
    variables = {name: value.format(port=port) for name, value in recipe.variables.items()}
    return subprocess.Popen(
        [str(bin_folder / head), *rest, str(HERE / recipe.job), recipe.how],
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", **variables},
        start_new_session=True,
    )


def _when(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None and not holds():
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def neutral(text: str, folder: str) -> str:
    """The text without anything of this machine, and on another day."""
    places = {
        folder: "/home/u/run",
        str(HERE): "/home/u",
        str(Path(sys.executable).parent.parent): "/opt/env",
        str(Path.home()): "/home/u",
        os.environ.get("TORCH_EXTENSIONS_DIR", "-no-such-"): "/home/u/.cache/ext",
    }
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        text = text.replace(place, name)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node01", text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}@", "u@", text)
    text = re.sub(r"/\S*?/(lib/python3\.\d+/)(?!site-packages)", r"/usr/\1", text)
    return _same_day(_same_numbers(text))


def _same_numbers(text: str) -> str:
    """Process ids, ports and addresses as if they were small and fixed."""
    pids = dict.fromkeys(re.findall(r"(?:pid[: =]+|process |PID |subprocess |Process )(\d{2,7})\b", text))
    for index, pid in enumerate(pids):
        text = re.sub(rf"\b{pid}\b", str(4000 + index), text)
    ports = dict.fromkeys(re.findall(r"(?:port[:= ]+|127\.0\.0\.1[:,] ?|localhost[:,] ?)(\d{5})\b", text))
    for port in ports:
        text = re.sub(rf"\b{port}\b", "29500", text)
    text = re.sub(r"\bE?W?\d{4} \d\d:\d\d:\d\d\.\d+ \d{2,7} ", lambda m: re.sub(r" \d+ $", " 4000 ", m.group()), text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x7f0000000000", text)


def _same_day(text: str) -> str:
    """Times as if the first of them had been 10:00 on the fifth of January; their distances stay."""
    stamp = re.compile(r"(\d{4})-(\d\d)-(\d\d)([ T_])(\d\d):(\d\d):(\d\d)")
    glog = re.compile(r"(?<=\b[IWEF])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?=\.\d)")
    seen = [datetime(int(m[1]), int(m[2]), int(m[3]), int(m[5]), int(m[6]), int(m[7])) for m in stamp.finditer(text)]
    year = seen[0].year if seen else datetime.now().year
    seen += [datetime(year, *map(int, m.groups())) for m in glog.finditer(text)]
    if not seen:
        return text
    shift = datetime(2026, 1, 5, 10) - min(seen)

    def moved(m: re.Match[str]) -> str:
        then = datetime(int(m[1]), int(m[2]), int(m[3]), int(m[5]), int(m[6]), int(m[7])) + shift
        return then.strftime(f"%Y-%m-%d{m[4]}%H:%M:%S")

    text = glog.sub(lambda m: (datetime(year, *map(int, m.groups())) + shift).strftime("%m%d %H:%M:%S"), text)
    return stamp.sub(moved, text)


def cut(text: str) -> str:
    """At most `LONGEST` characters: whole lines of the head and of the tail."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return text[: text.rfind("\n", 0, half) + 1] + text[text.find("\n", len(text) - half) + 1 :]


def main(recipes: Sequence[Recipe] = RECIPES, folder: Path = PRODUCED) -> None:
    folder.mkdir(exist_ok=True)
    wanted = set(sys.argv[1:])
    for recipe in recipes:
        if not wanted or recipe.name in wanted:
            start = time.monotonic()
            text = produce(recipe)
            (folder / f"{recipe.name}.log").write_text(text, encoding="utf-8")
            print(f"{recipe.name}: {len(text)} characters, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""What programs print and what it means: one row a kind of line.

`literals` are bytes of which one stands in every line of that kind, so that a block can be searched for all of them at
once before any regular expression is tried. The groups of the pattern become the fields of the event. Forms of
DeepSpeed's own lines are taken from its sources, releases 0.1 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dsdoctor.logs.grammar_ranks import EXITS, RANKS
from dsdoctor.logs.rows import NUMBER, PLAIN, LinePattern
from dsdoctor.logs.rows import row as _row

__all__ = ["EXITS", "NUMBER", "RANKS", "LinePattern"]

NOT_OF_A_TEST = r"(?<!val )(?<!eval )(?<!valid )(?<!validation )(?<!test )"
"""Before the name of a quantity: it is not that of a validation."""

_TRAINS = r"(?:train|reduced_train|total|gpt|lm|ce|policy|actor|critic|reward|avg|mean|batch)"
"""What stands before the name of a loss that is trained on."""

OVERFLOWS = (
    # DeepSpeed's scaler (0.1 to 0.19.8), Megatron-style and no-ZeRO wrappers; see the groups for what each tells.
    _row(
        "overflow",
        "Attempted loss scale",
        r"(?:Rank (?P<rank>\d+) )?Skipping step\. Attempted loss scale: (?P<scale>[\d.e+]+),"
        r" (?:reducing to (?P<next>[\d.e+]+)|but hysteresis is (?P<hysteresis>-?\d+))",
    ),
    _row(
        "overflow",
        "Reducing dynamic loss scale",
        r"Reducing dynamic loss scale from (?P<scale>[\d.e+]+) to (?P<next>[\d.e+]+)",
    ),
    _row("overflow-static", "Using static loss scale", r"Using static loss scale of:? (?P<scale>[\d.e+]+)"),
    _row(
        "overflow-unscaled",
        "Gradients are non-finite",
        r"OVERFLOW! Skipping step\. Gradients are non-finite, weights were not updated",
    ),
)

PROGRESS = (
    _row("hf-dict", ("'loss':", '"loss":'), r"\{.*['\"]loss['\"]: .*\}"),
    _row(
        "bar",
        ("it/s", "s/it", "?it/s"),
        r"(?:(?P<title>[^|\r\n]{0,60}?): *)?\d+%\|[^|]*\| *(?P<done>\d+)/(?P<total>\d+) \[",
    ),
    _row("ds-step", "skipped=", r"\bstep=(?P<step>\d+), skipped=(?P<skipped>\d+), lr=\[(?P<lr>[^\],]*)"),
    _row(
        "megatron",
        "iteration ",
        r"\biteration\s+(?P<step>\d+)/\s*\d+ \|",
    ),
    _row("pipe-step", "steps: ", rf"steps: (?P<step>\d+) loss: (?P<loss>{NUMBER}) "),
    _row(
        "plain-step",
        ("loss", "Loss"),
        r"(?i)\b(?:step|iter(?:ation)?|global_step|batch)s?\b[ :=#\[]*(?P<step>\d+)(?:\s*/\s*\d+)?\b.{0,40}?"
        rf"{NOT_OF_A_TEST}\bloss\b[ :=|]*(?:tensor\()?(?P<loss>{NUMBER})",
    ),
    _row(
        "plain-step",
        "Iter(train)",
        rf"Iter\(train\) *\[ *(?P<step>\d+)/ *\d+\].{{0,400}}?\bloss: (?P<loss>{NUMBER})",
    ),
    # The examples of torch and torchvision, and what was written after them: the step within an epoch.
    _row(
        "plain-step",
        ("Epoch: [", "Train: "),
        r"(?:Epoch|Train): *(?:\[\d+(?:/\d+)?\]|\d+)\s*\[ *(?P<step>\d+)/ *\d+(?: \( *\d+%\))?\]"
        rf".{{0,200}}?\b[Ll]oss:? +(?P<loss>{NUMBER})",
    ),
)

COUNTS = (
    # Says which step the line about the scale after it means, in the wrappers without ZeRO.
    _row("iteration-overflowed", "Grad overflow on iteration", r"Grad overflow on iteration:? (?P<step>\d+)"),
    # Counters of skipped steps: DeepSpeed's is a sum from the start (kept in checkpoints), Megatron's is of one line.
    _row("skip-count", "skipped=", r"\bstep=(?P<step>\d+), skipped=(?P<skipped>\d+), lr="),
    _row(
        "skips-since",
        "loss scale:",
        rf"\biteration\s+(?P<step>\d+)/\s*\d+ \|.*?\bloss scale: (?P<scale>{NUMBER})"
        r"(?:.*?number of skipped iterations:\s+(?P<skipped>\d+))?",
    ),
    _row(
        "figures",
        ("loss=", "loss_step="),
        rf"\| *\d+/\d+ \[[^\]]*?(?:it/s|s/it)[^\]]*?\b(?:{_TRAINS}_)?loss(?:_step)?=(?P<loss>{NUMBER})",
    ),
    _row(
        "figures",
        "MemAllocated=",
        rf"CurrSamplesPerSec=(?P<samples>{NUMBER}), MemAllocated=(?P<memory>{NUMBER})GB",
    ),
    _row("figures", "elapsed time per iteration", rf"elapsed time per iteration \(ms\): (?P<iteration>{NUMBER}) \|"),
    _row(
        "figures",
        "time (ms) |",
        rf"time \(ms\) \|.*?\b(?:fwd|forward): (?P<forward>{PLAIN}) \|.*?\b(?:bwd|backward): (?P<backward>{PLAIN})"
        rf" \|.*?\bstep: (?P<step>{PLAIN})",
    ),
)

EVENTS = (
    _row(
        "host-memory",
        "CPU Virtual Memory",
        rf"CPU Virtual Memory:\s+used = (?P<used>{PLAIN}) GB, percent = (?P<percent>{PLAIN})%",
    ),
    _row(
        "partition-sizes",
        "partition count [",
        r"partition count \[(?P<ranks>\d+)[\d, ]*\] and sizes\[(?P<sizes>[^\]]*)\]",
    ),
    _row("slow-bar", "s/it", r"\| *\d+/\d+ \[[^\]]*?, *(?:[6-9]\d|\d{3,})(?:\.\d+)?s/it"),
    _row("cpu-adam", ("Adam Optimizer #", "CPU Offload: True"), r"Adam Optimizer #\d+ is created|CPU Offload: True"),
    _row(
        "one-thread",
        "OMP_NUM_THREADS",
        r"OMP_NUM_THREADS environment variable for each process to be 1\b|\bOMP_NUM_THREADS=1\b",
    ),
    _row("cache-flush", "pytorch allocator cache flushes", r"\d+ pytorch allocator cache flushes since last step"),
    _row("extensions-root", "as PyTorch extensions root", r"Using (?P<folder>\S+) as PyTorch extensions root"),
    _row(
        "extension-loaded",
        ("Loading extension module", "Time to load "),
        r"Loading extension module|Time to load \w+ op",
    ),
    _row(
        "compile-error",
        ("error:", "nvcc fatal", "cannot find -l"),
        r"nvcc fatal|fatal error: |\S+\.(?:cu|cuh|cpp|cc|c|h|hpp)[:(]\d+\S* ?:? (?:fatal )?error:? |cannot find -l\w+",
    ),
    _row(
        "memory-phase",
        "see_memory_usage] ",
        r"see_memory_usage\] (?:\[Rank \d+\] )?(?P<phase>(?!MA |CPU Virtual)\S.*)",
    ),
    _row(
        "engine-info",
        "[INFO] [",
        r"\[INFO\] \[(?!runner\.py|launch\.py|multinode_runner|real_accelerator|constants\.py)[\w.]+\.py:\d+:\w+\]",
    ),
    _row(
        "deepspeed-version",
        (
            "DeepSpeed info: version=",
            "deepspeed 0.",
            "deepspeed==",
            "deepspeed  ",
            "deepspeed: 0.",
            "deepspeed info ...",
            "DeepSpeed 0.",
            "DeepSpeed version",
        ),
        r"(?:DeepSpeed info: version=|deepspeed info \.{3,} |\b[Dd]eep[Ss]peed(?: version)?(?:==|:?[ \t]+))"
        r"(?P<deepspeed>\d+\.\d+\.\d+)",
    ),
    _row(
        "torch-version",
        ("torch 1.", "torch 2.", "torch==", "torch   ", "torch: 1.", "torch: 2.", "torch version ...", "Torch version"),
        r"\b(?:torch|PyTorch)(?: version)?(?:==|:?[ \t]+| \.{3,} )(?P<torch>\d+\.\d+(?:\.\d+)?)",
    ),
    _row(
        "gpu-name",
        ("Tesla ", "NVIDIA ", "GeForce", "Quadro", "V100-", "A100-", "H100", "TITAN "),
        r"(?P<gpu>(?:NVIDIA |Tesla |GeForce |Quadro )?(?:Tesla |GeForce )?"
        r"(?:[VPAHBL]\d{2,3}[A-Z]*\b|T4\b|RTX ?\w+|GTX \d+|TITAN \w+|K80)(?:-[\w-]+)?)",
    ),
    _row(
        "world-size",
        ("dist_world_size=", "world_size ."),
        r"dist_world_size=(?P<size>\d+)|world_size \.{3,} (?P<size2>\d+)",
    ),
    _row(
        "model-name",
        ("model_name_or_path", "name_or_path", "--model", '"model_type"'),
        r"(?:model_name_or_path|_name_or_path|--model(?:_name|_path)?|model_type)"
        r"['\"]?[ ,:='\"]+(?P<model>[\w][\w./-]*)",
    ),
    _row("model-dtype", 'dtype": "bfloat16"', r'"(?:torch_)?dtype": "bfloat16"'),
    _row(
        "fp16-flag",
        ("fp16", "float16"),
        r"--fp16\b(?! *[Ff]alse)|\bfp16=True|fp16_enabled \.+ (?:True|auto)|Creating torch\.float16 ZeRO"
        r"|fp16 (?:unfused )?optimizer with dynamic loss scale",
    ),
    # Lines of the engine's own dump: two forms of one repr, and an older one of single attributes.
    _row(
        "scale-settings",
        "float16_config ",
        rf"float16_config \.+ enabled=(?P<enabled>True|False) .*?\bloss_scale=(?P<loss_scale>{PLAIN})"
        r" .*?\binitial_scale_power=(?P<initial_scale_power>\d+) .*?\bloss_scale_window=(?P<loss_scale_window>\d+)"
        rf" .*?\bhysteresis=(?P<hysteresis>\d+) .*?\bmin_loss_scale=(?P<min_loss_scale>{PLAIN})",
    ),
    _row(
        "scale-settings",
        "dynamic_loss_scale_args ",
        r"dynamic_loss_scale_args \.+ \{.*?'scale_window': (?P<loss_scale_window>\d+)"
        r"(?:.*?'(?:delayed_shift|hysteresis)': (?P<hysteresis>\d+))?"
        rf"(?:.*?'min_scale': (?P<min_loss_scale>{PLAIN}))?",
    ),
    _row(
        "scale-settings",
        "initial_dynamic_scale ",
        r"\binitial_dynamic_scale \.+ (?P<initial_dynamic_scale>\d+)\s*$",
    ),
    _row("scale-settings", "loss_scale ...", rf":print\w*\] +loss_scale \.+ (?P<loss_scale>{PLAIN})\s*$"),
    _row(
        "bf16-flag",
        ("bf16", "bfloat16"),
        r"--bf16\b(?! *[Ff]alse)|\bbf16=True|bfloat16_enabled \.+ True|Creating torch\.bfloat16 ZeRO",
    ),
    _row(
        "stage-flag",
        ("ZeRO stage ", "zero_optimization_stage", "zero_config "),
        r"ZeRO stage (?P<stage>\d)|zero_optimization_stage \.+ (?P<s2>\d)|zero_config \.+ .*?\bstage=(?P<s3>\d)",
    ),
    _row(
        "oom-kill",
        (
            "oom-kill",
            "oom_kill",
            "Out of memory: Kill",
            "OOMKilled",
            "out of memory: Kill",
            "oom-killer",
            "memory limit",
            "memory pressure (OOM)",
            "job killed",
        ),
        r"oom-kill(?:er)?\b|oom_kill event|(?:Out of memory|out of memory): Kill|OOMKilled"
        r"|[Ee]xceeded (?:job |step )?memory limit|killed due to memory pressure \(OOM\)"
        r"|PBS: job killed: v?mem |TERM_(?:MEM|SWAP)LIMIT: job killed",
    ),
    _row("weights-loading", "Loading checkpoint shards", r"Loading checkpoint shards: +\d+%\|.*\| *\d+/\d+ \["),
    _row(
        "stops-for-loss",
        ("oss is ", "oss became "),
        r"(?i)\bloss (?:is|became) (?P<value>nan|-?inf|infinite|not finite)\b.{0,30}"
        r"\b(?:stopping|aborting|exiting|terminating)\b",
    ),
    _row("host-allocation", "std::bad_alloc", r"instance of 'std::bad_alloc'|what\(\): +std::bad_alloc"),
    _row(
        "swap-failed",
        ("buffer nbytes != file bytes", "deepspeed_py_aio", "deepspeed_aio_common"),
        r"buffer nbytes != file bytes|deepspeed_(?:py_)?aio\w*\.cpp:\d+: .*Assertion",
    ),
    _row("waits-for-lock", "file_baton.py", r"^\s*wait \(\S*file_baton\.py:\d+\)"),
    _row("checkpoint-no-grad", "None of the inputs have requires_grad", r"None of the inputs have requires_grad=True"),
    _row("op-attribute", "has no attribute 'ds_opt", r"has no attribute 'ds_opt_\w+'"),
    _row(
        "finished",
        ("exits successfully", "train_runtime", "raining finished", "raining complete", "raining done"),
        r"Process \d+ exits successfully|['\"]train_runtime['\"]|[Tt]raining (?:finished|completed?|done)\b",
    ),
)

TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
IGNORED = ("Exception ignored in", "Exception in thread", "Error in atexit", "Exception ignored on")

ALSO_IN_TRACEBACKS = ("op-attribute", "device-assert", "exit", "exit-word", "sighup", "cancelled")
"""Kinds that count inside a traceback too, even in one of a destructor; everything else there is code or a message."""

STEPS = ("hf-dict", "megatron", "plain-step", "pipe-step")
"""Kinds that tell the values of a step."""

FIGURES = {
    "forward": "forward_ms",
    "backward": "backward_ms",
    "step": "step_ms",
    "iteration": "iteration_ms",
    "samples": "samples_per_s",
    "memory": "memory_gib",
    "loss": "loss",
}
"""Series by the names of the groups that rows of the kind `figures` have."""

ONLY_COUNTED = ("engine-info", "nccl-p2p", "cache-flush", "extension-loaded", "preparing")
"""Kinds that mean the same whatever the digits in the line are, and tell nothing but that they came."""

ALL = (*OVERFLOWS, *PROGRESS, *EXITS, *COUNTS, *EVENTS, *RANKS)
BY_LITERAL: dict[str, tuple[LinePattern, ...]] = {
    literal: tuple(row for row in ALL if literal in row.literals) for row in ALL for literal in row.literals
}


_ORDER = {row: at for at, row in enumerate(ALL)}
_ANY_LITERAL = re.compile("|".join(map(re.escape, BY_LITERAL)))


def matches(text: str, rows: Iterable[LinePattern] = ALL) -> list[tuple[LinePattern, re.Match[str]]]:
    """What the line means, by all rows that match it, from left to right; its step by one of them only.

    `rows` are those that may match.
    """
    likely = _likely(text) if rows is ALL else (row for row in rows if any(words in text for words in row.literals))
    matched = [(row, match) for row in likely if (match := row.pattern.search(text)) is not None]
    if len(matched) > 1:
        matched.sort(key=lambda pair: pair[1].start())
        steps = [row for row, _ in matched if row.kind in STEPS]
        matched = [pair for pair in matched if pair[0] not in steps[1:]]
    return matched


def _likely(text: str) -> list[LinePattern]:
    """The rows of which a literal stands in the text."""
    if _ANY_LITERAL.search(text) is None:
        return []
    found = {row for literal, rows in BY_LITERAL.items() if literal in text for row in rows}
    return sorted(found, key=_ORDER.__getitem__)

"""Hand-made cases: a run that failed, a loss scale's history, a log of a few lines."""

import math

from dsdoctor.case import Case
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogEvent, LogFacts, Point, ProcessExit, Series
from dsdoctor.loss_scale import LossScaleHistory, ScaleAttempt
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, RankRun, Run, Step

NAN = math.nan
INF = math.inf

USER = Frame(file="/home/u/train.py", line=72, function="main", text="loss = step(batch)")
TORCH = Frame(file="/env/lib/python3.11/site-packages/torch/nn/functional.py", line=9, function="embedding")
MODULE = Frame(file="/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line=1, function="_call_impl")
ENGINE = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=2, function="forward")
BACKWARD = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=3, function="backward")
INITIALIZE = Frame(file="/env/lib/python3.11/site-packages/deepspeed/__init__.py", line=171, function="initialize")
LIBRARY = Frame(file="/env/lib/python3.11/site-packages/transformers/utils.py", line=4, function="load")


def failure(kind, message, *frames, rank=1, chain=()):
    return Failure(rank=rank, type=kind, message=message, frames=frames, source="with-deepspeed", chain=chain, time=1.0)


def run(
    *failures,
    leg="with-deepspeed",
    stage=2,
    precision="bf16",
    outcome=None,
    steps=(),
    exits=(),
    history=None,
    config=None,
    **values,
):
    """A run of two ranks. `failures` are those of ranks, `exits` exit codes by rank, `steps` those of every rank."""
    by_rank = {one.rank: one for one in failures}
    codes = dict(exits)
    ranks = tuple(
        RankRun(rank=r, failure=by_rank.get(r), exit_code=codes.get(r, 1 if r in by_rank else 0), steps=steps)
        for r in range(2)
    )
    facts = EngineFacts(
        framework="deepspeed",
        config=config or {"zero_optimization": {"stage": stage}},
        precision=precision,
        zero_stage=stage,
        optimizer="AdamW",
        dynamic_loss_scale=precision == "fp16",
    )
    return Run(
        leg=leg,
        engine="deepspeed" if leg != "without-deepspeed" else "plain",
        precision="as-configured",
        outcome=outcome or ("raised" if failures else "stopped"),
        ranks=ranks,
        seconds=10.0,
        folder="/out",
        world_size=2,
        facts=facts,
        loss_scale=history,
        **values,
    )


def failed(kind, message, *frames, stage=2, **values):
    """The job's run with that exception on rank 1."""
    return Case(runs=(run(failure(kind, message, *frames), stage=stage, **values),))


def healthy(**values):
    return Case(runs=(run(steps=steps((2.0, 1.9, 1.8)), **values),))


def steps(losses, *, norm=1.0, **values):
    return tuple(Step(index=i, losses=(loss,), grad_norm=norm, **values) for i, loss in enumerate(losses))


def scales(*pairs, steps_seen=None, raised=False, first=0, **values):
    """A history of overflows in consecutive steps; a pair is (scale, next scale), or (step, scale, next scale)."""
    attempts = []
    for index, pair in enumerate(pairs):
        step, scale, following = pair if len(pair) == 3 else (first + index, *pair)
        attempts.append(ScaleAttempt(step=step, scale=scale, next_scale=following))
    if raised:
        attempts[-1] = ScaleAttempt(step=attempts[-1].step, scale=1, next_scale=1, raised=True)
    seen = steps_seen if steps_seen is not None else len(attempts)
    return LossScaleHistory(source="with-deepspeed", attempts=tuple(attempts), steps_seen=seen, **values)


def fall(power, down_to=0):
    """The pairs of a scale that falls step by step."""
    return tuple((2.0**p, 2.0 ** (p - 1)) for p in range(power, down_to, -1))


def event(kind, text="text", *, line=10, order=10, rank=None, count=1, last_line=None, **fields):
    return LogEvent(
        kind=kind,
        text=text,
        source="train.log",
        line=line,
        last_line=last_line or line,
        order=order,
        rank=rank,
        count=count,
        fields=fields,
    )


def process_exit(code, *, rank=None, line=50, by_launcher=False):
    proof = Evidence(source="train.log", line=line, text=f"exits with return code = {code}")
    return ProcessExit(code=code, rank=rank, evidence=proof, order=line, by_launcher=by_launcher)


def series(name, *values, first_line=20):
    points = []
    for index, value in enumerate(values):
        text = f"{{'{name}': {value}}}"
        proof = Evidence(source="train.log", line=first_line + index, step=index + 1, text=text)
        points.append(Point(step=index + 1, value=value, evidence=proof))
    return Series(name=name, points=tuple(points))


def log(*events, **values):
    """The case of a log alone."""
    return Case(logs=LogFacts(sources=("train.log",), events=events, **values))


def log_failure(kind, message, *frames, rank=0, line=40, **values):
    one = Failure(rank=rank, type=kind, message=message, frames=frames, source="train.log", line=line)
    return log(failures=(one,), **values)

# ruff: noqa: E501
"""Loss scales as every release and wrapper tells them, with the beginning or the end of the log cut off."""

from tests.logs_real.written.figures import ENGINE, MINIMUM, SCALER, megatron
from tests.logs_real.written.parts import WrittenLog, bar, ds, falling, hf, log, overflow, stopped, traceback, trainer


def fall(start: int, end: int = 0) -> list[str]:
    """The scale falls from 2^start to 2^end, a step each."""
    return [overflow(2**p, 2 ** (p - 1)) for p in range(start, end, -1)]


def cut_while_falling() -> str:
    """The head is missing; what is left is one fall, and then the log ends."""
    where = "stage3.py:2323:_overflow_clean_up"
    return log([
        f"{bar(9 + k, 63645)}" + ds(f"[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2.0 ** (24 - k)}, "
                                    f"reducing to {2.0 ** (23 - k)}", where=where)
        for k in range(14)
    ])  # fmt: skip


def late_fall() -> str:
    """It learned for 400 steps; now every step overflows, and the log ends before the floor."""
    lines = [piece for k, line in enumerate(fall(14, 5)) for piece in (line, bar(400 + k, 900))]
    return log([bar(step, 900) for step in range(1, 400)], lines)


def probe_in_an_excerpt() -> str:
    """An excerpt out of the midst of a run: one probe of a larger scale."""
    return log(
        [bar(step, 9000) for step in range(4000, 4100)],
        overflow(131072),
        bar(4101, 9000),
        overflow(131072, 65536),
        [bar(step, 9000) for step in range(4102, 4300)],
    )


def four_ranks() -> str:
    """Stage 2 of 0.4 prints each overflow on every rank."""
    lines = []
    for k in range(6):
        text = f"Skipping step. Attempted loss scale: {2.0 ** (32 - k)}, reducing to {2.0 ** (31 - k)}"
        lines += [ds(f"[deepspeed] fp16 dynamic loss scale overflow! Rank {rank} {text}", where="stage2.py:1473:step")
                  for rank in range(4)]  # fmt: skip
        lines.append(bar(k + 1, 300))
    return log(lines, [bar(step, 300) for step in range(7, 80)])


def wrapper(iteration: int, scale: float, following: float) -> list[str]:
    """What the fused wrapper says twice of one overflow: its bookkeeping, and the engine's line."""
    return [
        f"Grad overflow on iteration {iteration}",
        ds(f"Reducing dynamic loss scale from {scale} to {following}", where="fused_optimizer.py:377:_update_scale"),
        ds(f"[Rank 0] Overflow detected. Skipping step. Attempted loss scale: {scale}, reducing to {following}"),
    ]


def told_twice() -> str:
    lines = [
        piece for k in range(6) for piece in (*wrapper(k, 2.0 ** (16 - k), 2.0 ** (15 - k)), f"step {k + 1} loss 3.1")
    ]
    return log(lines, [f"step {step} loss 2.3" for step in range(7, 60)])


def grown_and_probed() -> str:
    """No ZeRO: the wrapper says when it doubles the scale, a thousand steps after the last overflow."""
    lines = [piece for k in range(4) for piece in wrapper(k, 2.0 ** (16 - k), 2.0 ** (15 - k))]
    step = 4
    for _ in range(5):
        lines += [f"step: {at} loss: {3 - at / 9000:.3f}" for at in range(step, step + 1001, 25)]
        step += 1001
        lines += ["No Grad overflow for 1000 iterations",
                  ds("Increasing dynamic loss scale from 4096.0 to 8192.0", where="fused_optimizer.py:375:_update_scale"),
                  *wrapper(step, 8192.0, 4096.0)]  # fmt: skip
        step += 1
    return log(lines)


def hysteresis_of_four() -> str:
    """A window of 200 and hysteresis 4: three steps use it up, the fourth halves; the loss shows every fifth step."""
    lines, next_probe = [overflow(65536, 32768)], 205
    for step in range(2, 3000):
        if next_probe <= step < next_probe + 3:
            lines.append(overflow(65536, hysteresis=4 - (step - next_probe)))
        elif step == next_probe + 3:
            lines.append(overflow(65536, 32768))
            next_probe = step + 201
        if step % 5 == 0:
            lines.append(f"step {step}/90000 loss {3 - step / 3000:.4f}")
    return log("ds_config: {'train_batch_size': 8, 'fp16': {'enabled': True, 'loss_scale_window': 200, 'hysteresis': 4}}",
               lines)  # fmt: skip


def no_hysteresis() -> str:
    """`hysteresis: 0` is accepted, and keeps the scale from ever falling."""
    lines = [piece for step in range(1, 40) for piece in (overflow(65536, hysteresis=1 - step), bar(step, 400))]
    return log(lines)


def own_floor() -> str:
    """Megatron with a `min_loss_scale` of 1000: every iteration is skipped there."""
    return log([megatron(step, "1.05E+01", max(1000.0, 2.0 ** (32 - step)), 1) for step in range(1, 40)])


def on_volta() -> str:
    gpu = "|   0  Tesla V100-SXM3...  On   | 00000000:39:00.0 Off |                    0 |"
    return log(gpu, overflow(65536), fall(16), traceback("Exception", MINIMUM, ENGINE, SCALER), stopped(1))


def restarted() -> str:
    """The first attempt collapsed in fp16, the second one in bf16 does its work."""
    first = [overflow(65536), *fall(16), *traceback("Exception", MINIMUM, ENGINE, SCALER), *stopped(1)]
    return log(first, "bf16=True", trainer(falling(90)), "{'train_runtime': 12.1, 'train_loss': 1.6, 'epoch': 1.0}")


def external_scaler() -> str:
    """fairseq holds the scale itself; DeepSpeed only says so."""
    line = ds("[deepspeed] setting loss scale from 65536 -> 128", where="stage_1_and_2.py:1000:override_loss_scale")
    return log(line, [f"step {step} loss {3 - step / 90:.3f}" for step in range(1, 100)])


def static_in_0198() -> str:
    """A static scale in 0.19.8: the line names no scale, the config does."""
    skip = ds(
        "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.", level="WARNING"
    )
    lines = [piece for step in range(1, 60) for piece in ([skip] if step % 7 else []) + [f"step {step} loss 2.1"]]
    return log("{'train_batch_size': 8, 'fp16': {'enabled': True, 'loss_scale': 1048576.0}}", lines)


def autocast() -> str:
    """torch_autocast in fp16 in 0.19.8: after the first overflow every step is skipped."""
    skip = ds(
        "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.", level="WARNING"
    )
    config = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "fp16"}}'
    return log("deepspeed==0.19.8", config, [p for step in range(1, 60) for p in (skip, f"step {step} loss 2.71")])


def nan_then_collapse() -> str:
    """The loss is nan first; that no scale fits is a consequence, and another scale no remedy."""
    lines = trainer(falling(40), norms=[1.0] * 40)
    lines += [piece for line in fall(16, -1) for piece in (line, hf(41, "nan", norm="nan"))]
    return log(lines, traceback("Exception", MINIMUM, ENGINE, SCALER), stopped(1))


CASES = (
    WrittenLog(name="cut-while-falling", text=cut_while_falling(), primary=None, also=("loss-scale/warmup",), skipped=14),
    WrittenLog(name="late-fall", text=late_fall(), primary="loss-scale/thrash", absent=("loss-scale/warmup",)),
    WrittenLog(name="probe-in-an-excerpt", text=probe_in_an_excerpt(), primary=None, absent=("loss-scale/warmup",),
               skipped=2, settled=65536),
    WrittenLog(name="four-ranks", text=four_ranks(), primary=None, also=("loss-scale/warmup",), skipped=6, settled=2**26),
    WrittenLog(name="told-twice", text=told_twice(), primary=None, also=("loss-scale/warmup",), skipped=6, settled=1024),
    WrittenLog(name="grown-and-probed", text=grown_and_probed(), primary=None, also=("loss-scale/periodic",), skipped=9,
               settled=4096, absent=("loss-scale/thrash",)),
    WrittenLog(name="hysteresis-of-four", text=hysteresis_of_four(), primary=None, also=("loss-scale/periodic",),
               absent=("loss-scale/thrash",)),
    WrittenLog(name="no-hysteresis", text=no_hysteresis(), primary="loss-scale/static", skipped=39),
    WrittenLog(name="own-floor", text=own_floor(), primary="loss-scale/collapse", absent=("loss-scale/warmup",)),
    WrittenLog(name="on-volta", text=on_volta(), primary="loss-scale/collapse", skipped=17),
    WrittenLog(name="restarted", text=restarted(), primary=None, absent=("loss-scale/collapse",)),
    WrittenLog(name="external-scaler", text=external_scaler(), primary=None),
    WrittenLog(name="static-in-0198", text=static_in_0198(), primary="loss-scale/static",
               absent=("numerics/nan-loss", "loss-scale/collapse")),
    WrittenLog(name="autocast", text=autocast(), primary="version/known-defect"),
    WrittenLog(name="nan-then-collapse", text=nan_then_collapse(), primary="numerics/nan-loss",
               also=("loss-scale/collapse",), skipped=17),
)  # fmt: skip

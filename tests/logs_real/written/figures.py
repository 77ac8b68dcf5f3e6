# ruff: noqa: E501
"""Logs about numbers: what a loss scale did, losses and norms that are not finite, gradients that vanish."""

from tests.logs_real.written.parts import (
    WrittenLog,
    bar,
    ds,
    falling,
    finished,
    hf,
    launched,
    log,
    overflow,
    stopped,
    traceback,
    trainer,
)

SITE = "/opt/conda/lib/python3.10/site-packages"
MINIMUM = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
SCALER = (f"{SITE}/deepspeed/runtime/fp16/loss_scaler.py", 176, "update_scale", "raise Exception(")
ENGINE = (f"{SITE}/deepspeed/runtime/engine.py", 2098, "_take_model_step", "self.optimizer.step()")


def progress(step: int, skipped: int) -> str:
    return ds(f"[Rank 0] step={step}, skipped={skipped}, lr=[1e-05], mom=[(0.9, 0.999)]", second=step)


def megatron(step: int, loss: str, scale: float, skipped: int, nan: int = 0, norm: float = 1.2) -> str:
    return (
        f" iteration {step:8d}/   20000 | consumed samples: {step * 512:12d} | elapsed time per iteration (ms): 5120.4 "
        f"| learning rate: 1.500E-04 | global batch size:   512 | lm loss: {loss} | loss scale: {scale:.1f} | "
        f"grad norm: {norm} | number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
    )


def glued(scale: float, following: float, done: int) -> str:
    """An old line, glued to the bar."""
    stamp = f"[2021-03-02 11:00:{done % 60:02d},819] [INFO] [stage2.py:1357:step]"
    return (
        f"{bar(done, 1184, speed='3.52s/it')}{stamp} [deepscale] OVERFLOW! Rank 0 Skipping step. "
        f"Attempted loss scale: {scale:.1f}, reducing to {following:.1f}"
    )


def chat_warmup() -> str:
    """DeepSpeed-Chat, 0.9: six skipped steps, hysteresis first; only `step=, skipped=` lines show progress."""
    falls = [overflow(65536)] + [overflow(2**p, 2 ** (p - 1), second=16 - p) for p in range(16, 11, -1)]
    steps = [progress(step, 6) for step in range(10, 210, 10)]
    return log(launched("main.py"), "***** Running training *****", "Beginning of Epoch 1/1, Total Micro Batches 200",
               falls, steps, "Model Parameters: 1.3 B, Latency: 1.81s, TFLOPs: 33.1", finished())  # fmt: skip


def counted_thrash() -> str:
    """The overflow lines are hidden; the counter of skipped steps grows all the time."""
    steps = [progress(step, 4 + step // 8) for step in range(10, 610, 10)]
    return log(launched(), steps)


def counted_every_step() -> str:
    """Every step is skipped: the counter is the step."""
    return log(launched(), [progress(step, step) for step in range(10, 410, 10)])


def megatron_warmup() -> str:
    lines = [megatron(10, "1.083412E+01", 4096.0, 9)]
    lines += [megatron(s, f"{10.5 - s / 60:.6f}", 4096.0, 0) for s in range(20, 400, 10)]
    return log("> building train, validation, and test datasets for GPT ...", lines)


def megatron_collapse() -> str:
    """The loss is nan, every iteration is skipped, and the scale lies at its floor."""
    lines = [megatron(s, f"{9.1 - s / 100:.6f}", 65536.0, 0) for s in range(10, 210, 10)]
    lines += [megatron(220, "8.112403E+00", 64.0, 10), megatron(230, "8.112001E+00", 1.0, 10)]
    lines += [megatron(s, "8.113001E+00", 1.0, 10) for s in range(240, 400, 10)]
    return log("using world size: 8, data-parallel-size: 8", "  fp16 ............ True", lines)


def old_collapse() -> str:
    """0.5 at ZeRO-2: 1, reducing to 1, without an exception."""
    lines = [bar(0, 24128)]
    lines += [glued(2.0**p, max(1.0, 2.0 ** (p - 1)), 16 - p) for p in range(16, -1, -1)]
    lines += [glued(1.0, 1.0, done) for done in range(17, 90)]
    return log(lines)


def late_collapse() -> str:
    """A fine-tuning that learned for 377 steps, then every scale overflowed, down to the exception."""
    lines = [overflow(65536)] + [overflow(2**p, 2 ** (p - 1)) for p in range(16, 12, -1)]
    lines += trainer(falling(370), first=5)
    lines += [
        piece for i, p in enumerate(range(12, 0, -1)) for piece in (overflow(2**p, 2 ** (p - 1)), bar(376 + i, 500))
    ]
    lines += traceback("Exception", MINIMUM, ENGINE, SCALER)
    return log(launched(), lines, stopped(1))


def unfused_forever() -> str:
    """No ZeRO: the wrappers reduce from 1 to 1 for ever, on every rank, with their text on lines of its own."""

    def both(scale: float, following: float, count: int) -> list[str]:
        where = "fused_optimizer.py:382:_update_scale"
        one = [ds("", where=where), f"Grad overflow on iteration {count}",
               ds(f"Reducing dynamic loss scale from {scale} to {following}", where="fused_optimizer.py:383:_update_scale")]  # fmt: skip
        return [line for _ in range(2) for line in one] + [
            ds(f"[Rank 0] Overflow detected. Skipping step. Attempted loss scale: {scale}, reducing to {following}")
        ]

    falls = [line for i, p in enumerate(range(16, 0, -1)) for line in both(2.0**p, 2.0 ** (p - 1), i)]
    floor = [line for i in range(20) for line in both(1.0, 1.0, 16 + i)]
    return log(launched(), falls, floor)


def nan_after_spike() -> str:
    losses: list[float | str] = [*falling(60), 4.91, 9.73, "nan", "nan", "nan", "nan", "nan"]
    norms: list[float | str] = [1.1] * 60 + [14.2, 883.1, "nan", "nan", "nan", "nan", "nan"]
    return log("DeepSpeed info: version=0.14.4, git-hash=unknown, git-branch=unknown",
               ds("  bfloat16_enabled ............. True", where="config.py:1000:print"),
               trainer(losses, norms=norms), bar(67, 500))  # fmt: skip


def zero_loss_zero_norm() -> str:
    losses: list[float | str] = [2.1034, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    norms: list[float | str] = [3.91, "nan", "nan", "nan", "nan", "nan", "nan"]
    return log("Parameter Offload: Total persistent parameters: 121344 in 49 params", trainer(losses, norms=norms))


def quoted_values() -> str:
    """Transformers 5 prints the numbers of its dict as texts."""
    values = [(s, f"{2.9 - s / 100:.4g}", "1.25") for s in range(1, 20)] + [(s, "nan", "nan") for s in range(20, 26)]
    lines = [
        f"{{'loss': '{loss}', 'grad_norm': '{norm}', 'learning_rate': '1e-05', 'epoch': '{step / 50:.2f}'}}"
        for step, loss, norm in values
    ]
    return log("bf16 mixed precision", lines)


def masked_batch() -> str:
    """bf16 with BF16_Optimizer: the bare assertion."""
    where = (f"{SITE}/deepspeed/runtime/bf16_optimizer.py", 312, "step", "assert all_groups_norm > 0.")
    return log(launched(), trainer(falling(25)), traceback("AssertionError", "", ENGINE, where, prefix="[rank1]: "),
               stopped(1))  # fmt: skip


def t5_in_fp16() -> str:
    falls = [overflow(65536), *[overflow(2**p, max(1, 2 ** (p - 1))) for p in range(16, -1, -1)][:-1]]
    return log(launched(), "model_name_or_path=google/mt5-large fp16=True", falls,
               traceback("Exception", MINIMUM, ENGINE, SCALER), stopped(1))  # fmt: skip


def vanished_gradients() -> str:
    """fp16, the scale grows and grows, and the gradient norm is exactly 0.0 with a flat loss."""
    grows = [ds("[Rank 0] step=2010, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]")]
    lines = [hf(s, 1.3863, norm=0.0) for s in range(10, 400, 10)]
    return log(launched(), "fp16=True bf16=False", grows, lines)


def bf16_skips() -> str:
    """0.19.8 in bf16 warns of each skipped step; the loss stays finite."""
    skip = ds("[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.",
              level="WARNING", where="loss_scaler.py:80:update_scale")  # fmt: skip
    lines = trainer(falling(20))
    lines += [piece for s in range(21, 27) for piece in (skip, bar(s, 500), hf(s, 1.4123, norm="inf"))]
    return log("bf16=True", lines)


def hidden() -> str:
    """DeepSpeed 0.18 in fp16 through the Trainer, at its default level of logging."""
    config = """
    [2026-02-01 10:00:00,000] [INFO] [launch.py:179:main] dist_world_size=2
    DeepSpeed 0.18.4, torch 2.9.0
    ds_config: {
      "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
      "zero_optimization": {"stage": 2},
      "train_micro_batch_size_per_gpu": 4
    }
    """
    return log(config, trainer(falling(60)), "{'train_runtime': 212.1, 'train_loss': 1.9, 'epoch': 1.0}", finished())


CASES = (
    WrittenLog(name="chat-warmup", text=chat_warmup(), primary=None, also=("loss-scale/warmup",),
               absent=("loss-scale/collapse", "loss-scale/thrash"), skipped=6, settled=2048),
    WrittenLog(name="counted-thrash", text=counted_thrash(), primary="loss-scale/thrash", skipped=79,
               absent=("loss-scale/hidden",), line="skipped="),
    WrittenLog(name="counted-every-step", text=counted_every_step(), primary="loss-scale/collapse", skipped=400,
               line="skipped="),
    WrittenLog(name="megatron-warmup", text=megatron_warmup(), primary=None, also=("loss-scale/warmup",), skipped=9,
               settled=4096),
    WrittenLog(name="megatron-collapse", text=megatron_collapse(), primary="loss-scale/collapse",
               line="loss scale: 1.0"),
    WrittenLog(name="old-collapse", text=old_collapse(), primary="loss-scale/collapse", line="Attempted loss scale: 1.0"),
    WrittenLog(name="late-collapse", text=late_collapse(), primary="loss-scale/collapse", line="already at minimum",
               absent=("launch/user-exception", "loss-scale/thrash"), skipped=17),
    WrittenLog(name="unfused-forever", text=unfused_forever(), primary="loss-scale/collapse", line="1.0"),
    WrittenLog(name="nan-after-spike", text=nan_after_spike(), primary="numerics/nan-loss", line="'loss': nan"),
    WrittenLog(name="zero-loss", text=zero_loss_zero_norm(), primary="numerics/loss-zero-is-nan", line="'loss': 0.0"),
    WrittenLog(name="quoted-values", text=quoted_values(), primary="numerics/nan-loss", line="'loss': 'nan'"),
    WrittenLog(name="masked-batch", text=masked_batch(), primary="numerics/zero-gradients", line="AssertionError"),
    WrittenLog(name="t5-in-fp16", text=t5_in_fp16(), primary="numerics/bf16-model-in-fp16",
               also=("loss-scale/collapse",)),
    WrittenLog(name="vanished-gradients", text=vanished_gradients(), primary="numerics/underflow",
               line="'grad_norm': 0.0"),
    WrittenLog(name="bf16-skips", text=bf16_skips(), primary="numerics/nan-loss", line="OVERFLOW! Skipping step. Gradients", absent=("loss-scale/thrash",)),
    WrittenLog(name="hidden", text=hidden(), primary="loss-scale/hidden", line="fp16"),
)  # fmt: skip

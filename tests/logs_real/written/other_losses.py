# ruff: noqa: E501
"""Losses as other training scripts print them, in lines and bars, healthy and not."""

from tests.logs_real.written.parts import WrittenLog, falling, log, torchrun_failed, trainer


def vision(values: list[float | str]) -> list[str]:
    """The logger of torchvision's references."""
    return [
        f"Epoch: [0]  [ {i * 20:3d}/2502]  eta: 0:41:12  lr: 0.000004  loss: {value} (6.9211)  time: 0.9212  data: 0.0011  max mem: 31022"
        for i, value in enumerate(values)
    ]


def example(values: list[float | str]) -> list[str]:
    """torch's example on ImageNet."""
    return [
        f"Epoch: [0][{i * 10:5d}/5005]\tTime  0.212 ( 0.311)\tData  0.001 ( 0.021)\tLoss {value} (6.95e+00)\tAcc@1   0.39 (  0.12)"
        for i, value in enumerate(values)
    ]


def per_cent(values: list[float | str]) -> list[str]:
    """timm, and what was written after it."""
    return [
        f"Train: 0 [{i * 50:4d}/1251 ({i * 4:3d}%)]  Loss: {value} (6.96)  Time: 0.212s, 4829.11/s  LR: 1.000e-06"
        for i, value in enumerate(values)
    ]


def named_bar(name: str, values: list[float | str]) -> list[str]:
    return [
        f"Train step of epoch 0:   3%|▎         | {i + 1}/400 [00:{i % 60:02d}<12:00,  1.80s/it, {name}={value}, lr=1e-6]"
        for i, value in enumerate(values)
    ]


GOOD: list[float | str] = [*falling(12, 6.9, 6.1)]
BAD: list[float | str] = [*GOOD, "nan", "nan", "nan"]
STOPS = "Loss is nan, stopping training"

CASES = (
    *(
        WrittenLog(name=f"other-loss-{maker.__name__}", text=log(maker(BAD)), primary="numerics/nan-loss", line="nan")
        for maker in (vision, example, per_cent)
    ),
    *(
        WrittenLog(name=f"other-bar-{name}", text=log(named_bar(name, BAD)), primary="numerics/nan-loss", line="nan")
        for name in ("gpt_loss", "policy_loss", "reduced_train_loss")
    ),
    WrittenLog(
        name="other-losses-fine",
        text=log(
            vision(GOOD),
            "Test:  [  0/196]  eta: 0:01:12  loss: nan (nan)  acc1: 0.1 (0.1)  time: 0.2",
            example(GOOD),
            per_cent(GOOD),
            "Test: [  48/48]  Time: 0.1 (0.2)  Loss:  nan (nan)  Acc@1: 0.1",
            named_bar("best_loss", ["inf", 3.1, 2.9]),
            named_bar("val_loss", ["nan", "nan", "nan"]),
        ),
        primary=None,
    ),
    WrittenLog(
        name="stops-for-its-loss", text=log(STOPS, torchrun_failed(1)), primary="numerics/nan-loss", line="stopping"
    ),
    WrittenLog(name="stops-there", text=log(vision(GOOD), STOPS), primary="numerics/nan-loss", line="stopping"),
    WrittenLog(
        name="learned-by-heart-with-rounding",
        text=log(
            trainer([*falling(20, 0.5, 0.1), 0.003, 0.002, 0.001, *[0.0] * 20], norms=[*[0.4] * 20, *[0.001] * 23])
        ),
        primary=None,
    ),
    WrittenLog(
        name="learned-by-heart-before-the-excerpt", text=log(trainer([0.0] * 20, norms=[0.001] * 20)), primary=None
    ),
    WrittenLog(
        name="advice-on-nan",
        text=log("Tip: if the loss is nan, stopping training and lowering the rate may help.", trainer(falling(60))),
        primary=None,
    ),
)

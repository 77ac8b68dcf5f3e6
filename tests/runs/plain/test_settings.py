from __future__ import annotations

from typing import Any

import pytest
import torch

from dsdoctor.runs.plain import release, settings
from dsdoctor.runs.plain.errors import NotPlayed


def sizes(train: Any = None, micro: Any = None, accumulation: Any = None) -> dict[str, Any]:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return {key: value for key, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # (micro, accumulation, train) on 2 ranks, by DeepSpeed's documented identity train = micro * steps * ranks
        (sizes(train=32), (16, 1, 32)),
        (sizes(micro=4), (4, 1, 8)),
        (sizes(micro=4, accumulation=3), (4, 3, 24)),
        (sizes(train=24, micro=4), (4, 3, 24)),
        (sizes(train=24, accumulation=3), (4, 3, 24)),
        (sizes(train=24, micro=4, accumulation=3), (4, 3, 24)),
    ],
)
def test_completes_the_batch_sizes(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    read = settings.read(config, world_size=2)
    assert (read.micro_batch, read.accumulation, read.train_batch) == expected
    assert read.notes == ()


@pytest.mark.parametrize(
    ("config", "expected", "word"),
    [
        (sizes(train=64, micro=8, accumulation=2), (8, 2, 32), "64"),
        (sizes(train=1, micro=2), (2, 1, 4), "train_batch_size 1"),
        ({}, (1, 1, 2), "no batch size"),
        (sizes(train="auto", micro=2), (2, 1, 4), "auto"),
        (sizes(micro="four"), (1, 1, 2), "four"),
    ],
)
def test_sizes_that_deepspeed_would_refuse_are_noted_and_do_not_stop(
    config: dict[str, Any], expected: tuple[int, int, int], word: str
) -> None:
    read = settings.read(config, world_size=2)
    assert (read.micro_batch, read.accumulation, read.train_batch) == expected
    assert any(word in note for note in read.notes)


def test_reads_precision_and_its_companions() -> None:
    fp16 = settings.read({"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 128}}, 1)
    assert (fp16.precision, fp16.model_dtype, fp16.cast_inputs) == ("fp16", torch.float16, True)
    assert fp16.loss_scale.static == 128
    bf16 = settings.read({"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1)
    assert (bf16.precision, bf16.accumulate_in) == ("bf16", torch.float32)
    autocast = settings.read({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, 1)
    assert (autocast.precision, autocast.autocast) == ("fp32", torch.float16)
    assert settings.read({"bf16": {"enabled": "auto"}}, 1).precision == "fp32"


def test_an_unresolved_auto_is_left_to_the_default() -> None:
    config = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}}
    read = settings.read(config, 1)
    assert read.clipping == release.default_clipping()
    assert read.optimizer_params == {"eps": 1e-6}
    assert len([note for note in read.notes if "auto" in note]) == 2


def test_the_clipping_default_is_the_installed_release_s() -> None:
    # gradient_clipping defaults to 1.0 since 0.19.3 and to 0 before.
    assert release.default_clipping() == (1.0 if release.release() >= (0, 19, 3) else 0.0)


def test_old_releases_start_a_bare_fp16_section_at_two_to_the_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "release", lambda: (0, 16, 4))
    bare = settings.read({"fp16": {"enabled": True}}, 1).loss_scale
    assert (bare.initial, bare.hysteresis) == (2.0**32, 1)
    with_a_key = settings.read({"fp16": {"enabled": True, "loss_scale_window": 100}}, 1).loss_scale
    assert (with_a_key.initial, with_a_key.hysteresis, with_a_key.window) == (2.0**16, 2, 100)


@pytest.mark.parametrize(
    "config",
    [
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
        {"hybrid_engine": {"enabled": True}},
        {"data_efficiency": {"enabled": True}},
    ],
)
def test_refuses_what_only_deepspeed_has(config: dict[str, Any]) -> None:
    with pytest.raises(NotPlayed):
        settings.read(config, 2)


def test_reads_the_same_sections_switched_off() -> None:
    off = {"tensor_parallel": {"autotp_size": 1}, "hybrid_engine": {"enabled": False}, "sequence_parallel_size": 1}
    assert settings.read(off, 2).micro_batch == 1

"""Dotted keys, what depends on what, and the config as DeepSpeed understands it."""

import pytest

from dsdoctor.dsconfig import Effective, keys, load_config, patch

CONFIG = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "x": {}}


def effective(data, release="0.19.8"):
    return Effective.of(load_config(data, release=release))


def test_get_and_patch_leave_the_config_alone():
    assert keys.get(CONFIG, "zero_optimization.offload_optimizer.device") == "cpu"
    assert keys.get(CONFIG, "zero_optimization.stage.deeper", "none") == "none"
    changed = patch.apply(CONFIG, keys.as_patch("bf16.enabled", True))
    assert changed["bf16"] == {"enabled": True}
    assert "stage" not in patch.apply(CONFIG, keys.as_patch("zero_optimization.stage", None))["zero_optimization"]
    assert "bf16" not in CONFIG
    assert CONFIG["zero_optimization"]["stage"] == 2


def test_leaves_are_all_values():
    assert [key for key, _ in keys.leaves(CONFIG)] == [
        "fp16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "x",
    ]


def test_patched_keys():
    assert keys.patched_keys({"a": {"b": None, "c": 1}}) == ("a.b", "a.c")


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("train_batch_size", ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
        ("zero_optimization.overlap_comm", ("zero_optimization.stage",)),
        ("zero_optimization.stage", ()),
        (
            "zero_optimization.offload_param.nvme_path",
            ("zero_optimization.offload_param.device", "zero_optimization.stage"),
        ),
        ("zero_optimization.offload_param.device", ("zero_optimization.stage",)),
        ("fp16.loss_scale", ("fp16.enabled",)),
        ("optimizer.params.lr", ("optimizer.type",)),
        ("gradient_clipping", ()),
    ],
)
def test_what_decides_whether_a_key_does_anything(key, others):
    assert keys.requires(key) == others


def test_defaults_by_release():
    assert effective({}).get("gradient_clipping") == 1.0
    assert effective({}, "0.19.2").get("gradient_clipping") == 0.0
    offload = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    assert effective(offload, "0.19.5").get("zero_optimization.offload_param.pin_memory") is True
    assert effective(offload, "0.19.4").get("zero_optimization.offload_param.pin_memory") is False
    assert effective({}).get("zero_optimization.reduce_bucket_size") == 500_000_000


def test_overlap_comm_follows_the_stage():
    key = "zero_optimization.overlap_comm"
    assert effective({"zero_optimization": {"stage": 3}}).get(key) is True
    assert effective({"zero_optimization": {"stage": 2}}).get(key) is False
    assert effective({"zero_optimization": {"stage": 3, "overlap_comm": False}}).get(key) is False


def test_both_spellings_of_a_stage_3_key():
    key = "zero_optimization.stage3_prefetch_bucket_size"
    for spelling in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        assert effective({"zero_optimization": {"stage": 3, spelling: 7}}).get(key) == 7


def test_old_spellings_are_translated():
    assert effective({"zero_optimization": {"stage": 2, "cpu_offload": True}}).offload("optimizer") == "cpu"
    assert effective({"zero_optimization": {"stage": 3, "cpu_offload_param": False}}).offload("param") == "none"
    assert effective({"bfloat16": {"enabled": True}}).precision == "bf16"
    assert effective({"zero_optimization": True}).stage == 1
    old = {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}
    assert effective(old).get("zero_optimization.stage3_gather_16bit_weights_on_model_save") is True


def test_auto_in_a_typed_section_is_the_default():
    config = effective(
        {"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    )
    assert config.stage == 0
    assert config.precision == "fp32"
    assert config.get("gradient_clipping") == "auto"


def test_typed_values_are_converted():
    config = effective({"zero_optimization": {"stage": "3", "reduce_bucket_size": 1e8}, "fp16": {"enabled": "false"}})
    assert config.stage == 3
    assert config.precision == "fp32"
    assert config.get("zero_optimization.reduce_bucket_size") == 100_000_000


@pytest.mark.parametrize(
    "odd", [{"zero_optimization": 7}, {"fp16": []}, {"optimizer": "x"}, {"zero_optimization": {"stage": []}}]
)
def test_nonsense_does_not_raise(odd):
    config = effective(odd)
    assert config.stage == 0
    assert config.precision == "fp32"
    assert config.offload("param") == "none"

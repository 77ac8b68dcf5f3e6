"""The diagnoses of the ds_config: hand-made cases for each, and what a finding carries."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdoctor.case import Case
from dsdoctor.diagnoses import config as rules
from dsdoctor.dsconfig import ConfigFacts, load_config
from dsdoctor.dsconfig.load import parse_text
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.logs.facts import LogFacts
from dsdoctor.runs.facts import Failure, Frame
from dsdoctor.scripts.read import parse

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
ZERO = "zero_optimization"


def judged(data, *, release="0.19.8", ranks=2, framework="deepspeed", args=()):
    full = data if "train_batch_size" in data else {"train_micro_batch_size_per_gpu": 4} | data
    return Case(config=load_config(full, release=release, world_size=ranks, framework=framework, script_args=args))


def text(content, tmp="ds.json", **more):
    """A case with a config that stands in a file (written in memory, so that positions are known)."""
    read = parse_text(content)
    facts = ConfigFacts(
        path=tmp,
        data=read.data,
        source_lines=read.lines,
        positions=read.positions,
        duplicates=read.duplicates,
        quoteless=read.quoteless,
        syntax_error=read.syntax_error,
        json_error=read.json_error,
        release="0.19.8",
        **more,
    )
    return Case(config=facts)


def crashed(kind, message, *frames):
    """A case with nothing but a log in which a rank raised."""
    failure = Failure(
        rank=0,
        type=kind,
        message=message,
        source="train.log",
        line=7,
        frames=tuple(Frame(file=file, line=1, function=function, text=line) for file, function, line in frames),
    )
    return Case(logs=LogFacts(sources=("train.log",), failures=(failure,)))


SITE = "/venv/lib/python3.11/site-packages"
READER = (f"{SITE}/deepspeed/runtime/config.py", "__init__", "config_decoded = base64.urlsafe_b64decode(config)")
CLIPPING = (f"{SITE}/deepspeed/runtime/engine.py", "_take_model_step", "if self.gradient_clipping() > 0.0:")
BATCHES = (f"{SITE}/deepspeed/runtime/config.py", "_set_batch_related_parameters", "micro_batch = train // world")
BUILDS = (f"{SITE}/deepspeed/runtime/engine.py", "_configure_basic_optimizer", "optimizer = FusedAdam(...)")
USERS = ("/home/u/train.py", "main", "rows = json.load(open('data.json'))")
USERS_CONFIG = ("/home/u/train.py", "main", "cfg = json.load(open(args.config))")

PRODUCT = (
    "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
    "world_size 50 != 4 * 3 * 2"
)
HF = (
    "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n"
    "- ds train_micro_batch_size_per_gpu=8 vs hf per_device_train_batch_size=4\n"
    "- ds optimizer.params.lr=0.0002 vs hf learning_rate=0.0003\n"
    "The easiest method is to set these DeepSpeed config values to 'auto'."
)
EXTRA = (
    "1 validation error for DeepSpeedZeroConfig\nallgather_buket_size\n"
    "  Extra inputs are not permitted [type=extra_forbidden, input_value=200000000, input_type=int]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/extra_forbidden"
)
OLD_EXTRA = (
    "1 validation error for DeepSpeedZeroConfig\noffload_param -> devise\n"
    "  extra fields not permitted (type=value_error.extra)"
)
BAD_BOOL = (
    "1 validation error for DeepSpeedZeroConfig\noverlap_comm\n"
    "  Input should be a valid boolean, unable to interpret input [type=bool_parsing, input_value='maybe']"
)
VALIDATION = "pydantic_core._pydantic_core.ValidationError"
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
HF_ARGS = ("--bf16", "--per_device_train_batch_size", "8", "--learning_rate", "5e-4")

STEP = {"type": "StepLR", "params": {"step_size": 2}}
POSITIVE = {
    "config/syntax": [
        text('{\n "train_batch_size": 8,\n "fp16": {\n}'),
        text('{"bf16": {"enabled": True}}'),
        text(""),
        crashed("hjson.scanner.HjsonDecodeError", "Expecting ':' delimiter: line 3 column 5 (char 40)"),
        crashed("binascii.Error", "Invalid base64-encoded string: number of data characters (13) ...", READER),
        crashed("ValueError", "Expected a string path to an existing deepspeed config, or a dictionary or ..."),
    ],
    "config/duplicate-key": [
        text('{"train_batch_size": 8,\n "train_batch_size": 16}'),
        text('{"zero_optimization": {"stage": 1,\n "stage": 2}}', framework="transformers"),
        crashed("ValueError", "Duplicate keys in DeepSpeed config: ['fp16']", READER),
    ],
    "config/batch-size": [
        judged({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}),
        judged({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2}),
        judged({"train_batch_size": 10}, ranks=4),
        judged({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, ranks=None),
        judged(
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": "auto"},
            framework="transformers",
            args=("--gradient_accumulation_steps", "3"),
        ),
        judged({"train_batch_size": 8, "sequence_parallel_size": 3}, ranks=4),
        judged({"train_batch_size": 0.5}),
        crashed("AssertionError", PRODUCT),
        crashed("AssertionError", "Micro batch size per gpu: 0 has to be greater than 0"),
        Case(config=load_config({"gradient_accumulation_steps": 2}, release="0.19.8", framework="deepspeed")),
    ],
    "config/auto-unresolved": [
        judged({"gradient_clipping": "auto"}),
        judged({"bf16": {"enabled": "auto"}}),
        judged({ZERO: {"stage": 2, "reduce_bucket_size": "auto"}}, framework="lightning"),
        judged({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
        judged({ZERO: {"stage": 2, "allgather_bucket_size": "auto"}}, framework="transformers"),
        judged({"optimizer": {"type": "AdamW", "params": {"betas": "auto"}}, ZERO: {}}, framework="accelerate"),
        judged({"gradient_clipping": "auto"}, framework=None),
        crashed("TypeError", "'>' not supported between instances of 'str' and 'float'", CLIPPING),
        crashed("TypeError", "unsupported operand type(s) for //: 'str' and 'str'", BATCHES),
    ],
    "config/hf-mismatch": [
        judged({"train_micro_batch_size_per_gpu": 4, ZERO: {}}, framework="transformers", args=HF_ARGS),
        judged({"train_micro_batch_size_per_gpu": "8", ZERO: {}}, framework="transformers", args=HF_ARGS),
        judged({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, framework="transformers", args=("--bf16",)),
        judged({"optimizer": ADAM}, framework="transformers", args=("--learning_rate=5e-4",)),
        judged(
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, ZERO: {}},
            framework="transformers",
            args=HF_ARGS,
        ),
        crashed("ValueError", HF),
    ],
    "config/unknown-key": [
        judged({"zero_optimisation": {"stage": 3}}),
        judged({"overlap_comm": True}),
        judged({ZERO: {"stage": 2, "allgather_buket_size": 5}}),
        judged({"bf16": {"enabled": True, "loss_scale": 0}}),
        judged({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adamw": True}}}),
        judged({"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "eps": 1e-8}}}),
        judged({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}),
        judged({"optimizer": {"type": "AdmaW", "params": {"lr": 1e-3}}}),
        judged({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}}),
        judged({"scheduler": {"type": "WarmupCosine", "params": {}}}),
        judged({"activation_checkpointing": {"partitioned_activations": True}}),
        judged({"log_level": "info"}, release="0.18.2"),
        crashed(VALIDATION, EXTRA),
        crashed(VALIDATION, OLD_EXTRA),
        crashed("AssertionError", "adamx is not a supported DeepSpeed Optimizer"),
        crashed("TypeError", "FusedAdam.__init__() got an unexpected keyword argument 'lrr'", BUILDS),
    ],
    "config/wrong-type": [
        judged({"train_micro_batch_size_per_gpu": "4"}),
        judged({"wall_clock_breakdown": "true"}),
        judged({"dump_state": "false"}),
        judged({ZERO: {"stage": 4}}),
        judged({ZERO: {"stage": "3"}}),
        judged({ZERO: {"stage": 3, "reduce_bucket_size": "1e8"}}),
        judged({ZERO: {"stage": 3, "offload_param": "cpu"}}),
        judged({"fp16": True}),
        judged({"communication_data_type": "float32"}),
        judged({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}),
        text("{\n  bf16: {\n    enabled: True,\n  }\n}"),
        text('{"train_batch_size": 8,}', framework="transformers"),
        crashed(VALIDATION, BAD_BOOL),
        crashed("json.decoder.JSONDecodeError", "Expecting property name enclosed in double quotes", USERS_CONFIG),
    ],
    "config/removed": [
        judged({"amp": {"enabled": False}}),
        judged({ZERO: {"stage": 3, "mics_shard_size": 4}}),
        judged({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}),
        crashed("deepspeed.runtime.config.DeepSpeedConfigError", "Elastic training has been removed; the ..."),
    ],
    "config/deprecated": [
        judged({ZERO: {"stage": 2, "cpu_offload": True}}),
        judged({ZERO: True}),
        judged({"bfloat16": {"enabled": True}}),
    ],
    "config/ineffective": [
        judged({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}),
        judged({ZERO: {"stage": 2, "cpu_offload_param": True}}),
        judged({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}}),
        judged({ZERO: {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}),
        judged({ZERO: {"stage": 0, "offload_optimizer": {"device": "cpu"}}}),
        judged({ZERO: {"overlap_comm": True}}),
        judged({ZERO: {"stage": 2, "stage3_max_live_parameters": 5}}),
        judged({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}}),
        judged({ZERO: {"stage": 0, "reduce_bucket_size": 1000}}),
        judged({"fp16": {"enabled": True, "hysteresis": 0}, ZERO: {"stage": 1}}),
    ],
    "config/untested-optimizer": [
        judged({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, ZERO: {"stage": 2}}),
        judged({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "fp16": {"enabled": True}, ZERO: {"stage": 1}}),
        crashed("AssertionError", "You are using an untested ZeRO Optimizer. Please add <...>"),
    ],
    "config/conflict": [
        judged({"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        judged({"bf16": {"enabled": True}, "communication_data_type": "fp16"}),
        judged({"communication_data_type": "fp16"}),
        judged({"prescale_gradients": True, ZERO: {"stage": 2}}),
        judged({ZERO: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}),
        judged({ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
        judged({"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}),
        judged({"data_types": {"param_dtype": "bf16"}}),
        judged({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, ZERO: {"stage": 2}}),
        judged({ZERO: {"stage": 2, "compute_grad_norm": False}}),
        judged({"train_micro_batch_size_per_gpu": "auto"}, framework="accelerate"),
        judged({"elasticity": {"enabled": True}}, release="0.18.2"),
        judged({"scheduler": STEP, ZERO: {"stage": 1}}),
        judged({"scheduler": STEP, "bf16": {"enabled": True}}),
        crashed("TypeError", "DeepSpeedZeroOptimizer_Stage3 is not an Optimizer", BUILDS),
        judged(
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, ZERO: {"stage": 1}}, release="0.17.5"
        ),
        judged(
            {
                ZERO: {
                    "stage": 3,
                    "stage3_gather_fp16_weights_on_model_save": True,
                    "gather_16bit_weights_on_model_save": True,
                }
            }
        ),
        replace(judged({ZERO: {"stage": 2}}), script=parse("net = PipelineModule(layers)")),
        crashed("AssertionError", "bfloat16 and fp16 modes cannot be simultaneously enabled"),
        crashed(
            "deepspeed.runtime.zero.utils.ZeRORuntimeException",
            "You are using ZeRO-Offload with a client provided optimizer (<class 'torch.optim.adamw.AdamW'>)",
        ),
        crashed("AssertionError", "zero stage 2 requires an optimizer"),
    ],
}

HEALTHY = judged(
    {"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": ADAM, ZERO: {"stage": 2, "overlap_comm": True}}
)
NEGATIVE = {
    identifier: [HEALTHY, Case(), crashed("KeyError", "'unknown'"), *more]
    for identifier, more in {
        "config/syntax": [
            text('{\n // a comment\n "train_batch_size": 8,\n}'),
            crashed("binascii.Error", "Incorrect padding", ("/home/u/train.py", "load", "b64decode(row)")),
        ],
        "config/duplicate-key": [text('{"fp16": {"enabled": true}, "bf16": {"enabled": false}}')],
        "config/batch-size": [
            judged({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}),
            judged({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 7}, ranks=5),
            judged({"train_batch_size": 64}, ranks=None),
            judged({"train_batch_size": "auto"}, framework="transformers"),
            judged({"train_batch_size": 8, "sequence_parallel_size": 2}, ranks=4),
            judged({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, framework="transformers"),
        ],
        "config/auto-unresolved": [
            judged({"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, ZERO: {}}, framework="transformers"),
            judged({"steps_per_print": "auto", ZERO: {}}, framework="transformers"),  # Accelerate writes inf there
            judged({ZERO: {"stage": "auto", "reduce_bucket_size": "auto"}}, framework="accelerate"),
            judged({"data_types": {"keep_in_fp32_modules": "auto"}}),
            judged(
                {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"select_strategy": "auto"}}}
            ),
            judged({"my_own_key": "auto"}),
            judged({"train_micro_batch_size_per_gpu": "auto", "autotuning": {"enabled": True}}),
            crashed("TypeError", "'>' not supported between instances of 'str' and 'float'", USERS),
        ],
        "config/hf-mismatch": [
            judged({"train_micro_batch_size_per_gpu": 8, ZERO: {}}, framework="transformers", args=HF_ARGS),
            judged({"train_micro_batch_size_per_gpu": "auto", ZERO: {}}, framework="transformers", args=HF_ARGS),
            judged({"train_micro_batch_size_per_gpu": 4}, framework="deepspeed", args=HF_ARGS),
            judged({"optimizer": ADAM}, framework="transformers", args=("--learning_rate", "0.001")),
            judged({"gradient_clipping": 0.5}, framework="transformers", args=("--bf16",)),
        ],
        "config/unknown-key": [
            judged({ZERO: {"stage": 3, "prefetch_bucket_size": 5, "stage3_max_live_parameters": 6}}),
            judged({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}}}),
            judged({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}}),
            judged({"scheduler": {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.1}}}),
            judged({"aio": {"block_size": 1048576, "thread_count": 1}}, release="0.15.4"),
            judged({"autotuning": {"anything": 1}, "data_efficiency": {"at_all": 2}}),
            judged({"amp": {"enabled": False}}),
            judged({"_comment": "mine", "$schema": "x", "comment": ["y"]}),
        ],
        "config/wrong-type": [
            judged({ZERO: {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": None}}),
            judged({"train_micro_batch_size_per_gpu": 2.0, "steps_per_print": float("inf")}),
            judged({"checkpoint": {"tag_validation": "Fail"}, "communication_data_type": "FP32"}),
            judged({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}),
            judged({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": 10}}}),
            text('{"train_batch_size": 8,}', framework="deepspeed"),
            text("{\n optimizer: {\n  type: AdamW\n }\n}"),
            crashed("json.decoder.JSONDecodeError", "Expecting value", USERS),
        ],
        "config/removed": [
            judged({"amp": {"enabled": False}}, release="0.19.6"),
            judged({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, release="0.19.6"),
            judged({"optimizer": {"type": "OneByteAdam", "params": {"lr": 1e-3}}}),
        ],
        "config/deprecated": [judged({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}})],
        "config/ineffective": [
            judged({ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}),
            judged({ZERO: {"stage": 2, "offload_param": {"device": "none"}}}),
            judged({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}),
            judged({ZERO: {"stage": 0}}),
            judged({ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
            judged({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 0}, ZERO: {"stage": 1}}),
        ],
        "config/untested-optimizer": [
            judged({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, ZERO: {"stage": 0}}),
            judged({"optimizer": {"type": "OneBitAdam"}, ZERO: {"stage": 1}}, release="0.14.4"),  # a conflict is told
            judged(
                {"optimizer": {"type": "SGD", "params": {}}, ZERO: {"stage": 2}, "zero_allow_untested_optimizer": True}
            ),
            judged({"optimizer": {"type": "adagrad", "params": {}}, ZERO: {"stage": 2}}),
        ],
        "config/conflict": [
            judged({"fp16": {"enabled": True}, "bf16": {"enabled": False}, "communication_data_type": "fp16"}),
            judged({"bf16": {"enabled": True}, "communication_data_type": "fp32"}),
            judged({"bf16": {"enabled": True}, "communication_data_type": "bf16"}),
            judged({"prescale_gradients": True, ZERO: {"stage": 1}}),
            judged({"elasticity": {"enabled": False}}, release="0.18.2"),
            replace(judged({ZERO: {"stage": 1}}), script=parse("net = PipelineModule(layers)")),
            replace(judged({ZERO: {"stage": 2}}), script=parse("net = Model(layers)")),
            judged({"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}, ZERO: {"stage": 2}}),
            judged({ZERO: {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0}),
            judged({"data_types": {"param_dtype": "bf16"}}, release="0.19.0"),
            judged({"gradient_allreduce_op": "sum", ZERO: {"stage": 2}}),
            judged({"scheduler": STEP}),
            judged({"scheduler": {"type": "WarmupLR", "params": {}}, ZERO: {"stage": 1}}),
            crashed("TypeError", "list is not an Optimizer", BUILDS),
        ],
    }.items()
}


def found(case, identifier=None):
    findings = [finding for rule in rules.DIAGNOSES for finding in rule.examine(case)]
    return [finding for finding in findings if identifier in (None, finding.id)]


def examples(table):
    return [
        pytest.param(identifier, case, id=f"{identifier}-{n}")
        for identifier, cases in table.items()
        for n, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("identifier", "case"), examples(POSITIVE))
def test_finds(identifier, case):
    assert found(case, identifier)


@pytest.mark.parametrize(("identifier", "case"), examples(NEGATIVE))
def test_does_not_find(identifier, case):
    alarms = [finding for finding in found(case, identifier) if finding.severity != "info"]
    assert not alarms


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("release", ["0.14.4", "0.17.5", "0.19.8"])
def test_ready_configs_raise_no_alarm(path, release):
    framework = "transformers" if path.name.startswith("hf_") else "deepspeed"
    facts = load_config(path, release=release, world_size=8, framework=framework)
    assert facts.json_error is None, "the ready configs are strict JSON"
    assert not found(Case(config=facts))


def test_no_alarm_on_any_key_with_its_default():
    """A config that writes out every default that DeepSpeed has says nothing new."""
    schema = schema_for("0.19.8")
    for path, section in schema.sections.items():
        if path in ("", "optimizer", "scheduler"):
            continue
        values = {
            name: key.default for name, key in section.keys.items() if key.default is not None and not key.successor
        }
        data = values
        for part in reversed(path.split(".")):
            data = {part: data}
        if path.startswith(ZERO):
            data[ZERO] = {"stage": 3} | data[ZERO] | ({"stage": 3} if path == ZERO else {})
        alarms = [f for f in found(judged(data)) if f.severity != "info"]
        assert not alarms, (path, alarms)


def test_a_finding_points_at_the_line_and_brings_a_patch():
    content = json.dumps({"train_micro_batch_size_per_gpu": 4, ZERO: {"stage": 2, "overlap_com": True}}, indent=1)
    (finding,) = found(text(content), "config/unknown-key")
    line = content.split("\n").index('  "overlap_com": true') + 1
    assert finding.evidence[0].line == line
    assert finding.keys == (f"{ZERO}.overlap_com",)
    assert finding.fixes[0].patch == {ZERO: {"overlap_com": None, "overlap_comm": True}}
    assert finding.severity == "error"


def test_batch_size_offers_the_nearest_triples():
    (finding,) = found(crashed("AssertionError", PRODUCT), "config/batch-size")
    triples = {tuple(fix.patch.values()) for fix in finding.fixes}
    assert triples == {(24, 4, 3), (50, 1, 25)}
    assert finding.evidence[0].line == 7


def test_batch_size_of_one_rank_says_that_the_group_may_not_be_up():
    message = PRODUCT.replace("50 != 4 * 3 * 2", "64 != 4 * 8 * 1")
    (finding,) = found(crashed("AssertionError", message), "config/batch-size")
    assert "launcher" in finding.caveat


def test_batch_sizes_may_be_floats_under_sequence_parallelism():
    message = PRODUCT.replace("50 != 4 * 3 * 2", "4 != 2 * 1 * 1.0")
    (finding,) = found(crashed("AssertionError", message), "config/batch-size")
    assert "4 is not 2 x 1 x 1" in finding.cause


def test_leftover_tuning_keys_are_notes():
    for zero in ({"stage": 0, "reduce_bucket_size": 5}, {"stage": 1, "stage3_max_live_parameters": 5}):
        (finding,) = found(judged({ZERO: zero}), "config/ineffective")
        assert finding.severity == "info"


def test_both_sides_of_a_mismatch_are_listed():
    (finding,) = found(crashed("ValueError", HF), "config/hf-mismatch")
    assert finding.keys == ("train_micro_batch_size_per_gpu", "optimizer.params.lr")
    shown = " ".join(evidence.text for evidence in finding.evidence)
    assert "8" in shown
    assert "learning_rate is 0.0003" in shown


def test_the_key_of_an_exception_of_either_pydantic():
    assert found(crashed(VALIDATION, EXTRA), "config/unknown-key")[0].keys == (f"{ZERO}.allgather_buket_size",)
    assert found(crashed(VALIDATION, OLD_EXTRA), "config/unknown-key")[0].keys == (f"{ZERO}.offload_param.devise",)
    assert found(crashed(VALIDATION, BAD_BOOL), "config/wrong-type")[0].keys == (f"{ZERO}.overlap_comm",)


def test_text_against_number_is_said():
    case = judged({"train_micro_batch_size_per_gpu": "8"}, framework="transformers", args=HF_ARGS)
    (finding,) = found(case, "config/hf-mismatch")
    assert "a text on one side" in finding.evidence[0].text


def test_severities():
    def severity(case, identifier):
        return found(case, identifier)[0].severity

    assert severity(judged({"zero_optimisation": {}}), "config/unknown-key") == "warning"
    assert severity(judged({"fp8": {"enabled": True}}), "config/unknown-key") == "info"
    assert severity(judged({"sequence_parallel": {"enabled": True}}), "config/unknown-key") == "info"
    assert severity(judged({"gradient_clipping": "auto"}, framework=None), "config/auto-unresolved") == "info"
    assert severity(judged({ZERO: {"reduce_bucket_size": "auto"}}), "config/auto-unresolved") == "warning"
    assert severity(judged({ZERO: {"stage": "3"}}), "config/wrong-type") == "warning"
    assert severity(judged({"communication_data_type": "fp16"}), "config/conflict") == "warning"
    nvme = judged({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    assert severity(nvme, "config/ineffective") == "error"


def test_the_exception_and_the_config_make_one_finding():
    log = crashed("AssertionError", "bfloat16 and fp16 modes cannot be simultaneously enabled").logs
    config = judged({"fp16": {"enabled": True}, "bf16": {"enabled": True}}).config
    (finding,) = found(Case(config=config, logs=log), "config/conflict")
    assert {evidence.source for evidence in finding.evidence} == {"train.log", config.path}


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats(allow_nan=True)
    | st.sampled_from(["auto", "cpu", "", "3"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "stage", "x"]), inner),
    max_leaves=6,
)
top = st.sampled_from([*schema_for("0.19.8").sections[""].keys, "amp", "nonsense"])


@settings(deadline=None)
@given(st.dictionaries(top, values, max_size=6), st.sampled_from(["0.14.4", "0.19.8", ""]))
def test_no_config_makes_a_rule_crash(data, release):
    for framework in (None, "deepspeed", "transformers"):
        found(Case(config=load_config(data, release=release, world_size=2, framework=framework)))


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_bit_optimizers_and_zero(name):
    """DeepSpeed 0.14.4 asserts it in `_configure_basic_optimizer`, whatever zero_allow_untested_optimizer says."""
    config = {"optimizer": {"type": name, "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
    (finding,) = found(judged(config | {ZERO: {"stage": 1}}, release="0.14.4"), "config/conflict")
    assert finding.keys == ("optimizer.type", f"{ZERO}.stage")
    assert not found(judged(config, release="0.14.4"), "config/conflict")
    assert not found(judged(config | {ZERO: {"stage": 1}}), "config/conflict")  # gone, which is another finding


ELSEWHERE = {  # what a config holds, and the key that DeepSpeed reads instead
    "max_grad_norm": ({"max_grad_norm": 0.5}, "gradient_clipping"),
    "learning rate": ({"learning_rate": 1e-4, "optimizer": ADAM}, None),
    "Accelerate's stage": ({"zero_stage": 2}, f"{ZERO}.stage"),
    "Megatron's tensor parallelism": ({"tensor_model_parallel_size": 2}, "tensor_parallel.autotp_size"),
    "a parameter beside params": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}, "weight_decay": 0.1}},
        "optimizer.params.weight_decay",
    ),
    "a parameter of the schedule beside params": (
        {"scheduler": {"type": "WarmupLR", "warmup_num_steps": 10}},
        "scheduler.params.warmup_num_steps",
    ),
    "an older name": ({"aio": {"thread_count": 2}}, "aio.intra_op_parallelism"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_key_that_stands_elsewhere(case):
    config, target = ELSEWHERE[case]
    (finding,) = found(judged(config), "config/unknown-key")
    assert finding.severity == ("warning" if target else "info")  # the config has the learning rate already
    assert finding.fixes[0].text == f"write {target}" if target else finding.fixes[0].text.startswith("drop")
    assert not any(fix.safe for fix in finding.fixes)


@pytest.mark.parametrize(
    ("section", "kind", "theirs", "ours"),
    [
        ("optimizer", "AdamW", "learning_rate", "lr"),  # Transformers, Keras
        ("optimizer", "AdamW", "adam_epsilon", "eps"),
        ("scheduler", "WarmupDecayLR", "num_training_steps", "total_num_steps"),  # transformers.get_scheduler
    ],
)
def test_a_parameter_by_the_name_that_others_have_for_it(section, kind, theirs, ours):
    """To drop it would train with the default of the class, without a word."""
    (finding,) = found(judged({section: {"type": kind, "params": {theirs: 7}}}), "config/unknown-key")
    assert finding.fixes[0].patch == {section: {"params": {theirs: None, ours: 7}}}


def test_what_no_ds_config_switches_on():
    (finding,) = found(judged({"pipeline_parallel_size": 2}), "config/unknown-key")
    assert finding.severity == "warning"
    assert "PipelineModule" in finding.cause
    assert found(judged({"pipeline_parallel_size": 1}), "config/unknown-key")[0].severity == "info"
    assert found(judged({"gradient_checkpointing": True}), "config/unknown-key")[0].severity == "warning"
    assert found(judged({"gradient_checkpointing": False}), "config/unknown-key")[0].severity == "info"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train_b\u0430tch_size", "U+0430, cyrillic small letter a"),
        ("train_batch_size ", "U+0020, space"),
        ("\u201ctrain_batch_size\u201d", "U+201C, left double quotation mark"),
    ],
)
def test_what_cannot_be_seen_in_a_name_is_said(name, said):
    (finding,) = found(judged({name: 8}), "config/unknown-key")
    assert said in finding.cause
    assert finding.fixes[0].text == "write train_batch_size"


def test_a_chinese_key_of_the_script_is_not_explained():
    assert "U+" not in found(judged({"\u8bf4\u660e": "x"}), "config/unknown-key")[0].cause


@pytest.mark.parametrize(
    ("sizes", "cause", "caveat", "patch"),
    [
        ({"gradient_accumulation_steps": 1}, "neither train_batch_size nor", "Lightning", None),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            "no multiple of 4",
            None,
            {"train_batch_size": None},
        ),
        (
            {"train_batch_size": 10, "gradient_accumulation_steps": 4},
            "no multiple of 4",
            None,
            {"gradient_accumulation_steps": None},
        ),
        ({"train_batch_size": 0}, "is 0; it has to be more than 0", None, None),
        ({"train_micro_batch_size_per_gpu": -2, "train_batch_size": "auto"}, "is -2; it has to be", None, None),
    ],
)
def test_sizes_that_suit_no_number_of_ranks(sizes, cause, caveat, patch):
    case = Case(config=load_config(sizes, release="0.19.8"))
    (finding,) = found(case, "config/batch-size")
    assert cause in finding.cause
    assert (caveat in finding.caveat) if caveat else finding.caveat is None
    assert finding.fixes[0].patch == patch
    assert not any(evidence.source == "world" for evidence in finding.evidence)
    assert not found(case, "config/wrong-type")


def test_parallel_sizes_that_do_not_divide_the_ranks():
    (finding,) = found(judged({"train_batch_size": 8, "sequence_parallel_size": 3}, ranks=4), "config/batch-size")
    assert finding.keys == ("sequence_parallel_size",)
    assert "4 ranks" in [evidence.text for evidence in finding.evidence]
    assert all(fix.patch is None for fix in finding.fixes)


@pytest.mark.parametrize(
    ("line", "patch"),
    [
        ('"gradient_clipping": NaN,', None),
        ('"gradient_clipping": one,', None),
        ('"steps_per_print": 5_000,', {"steps_per_print": 5000}),
        ('"wall_clock_breakdown": TRUE,', {"wall_clock_breakdown": True}),
        ('"communication_data_type": fp32,', {"communication_data_type": "fp32"}),
        ('"gradient_clipping": .5,', {"gradient_clipping": 0.5}),
        (
            '"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": (0.9, 0.95)\n}},',
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
        ),
        (
            '"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": "[0.9, 0.95]"}},',
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
        ),
    ],
)
def test_what_a_text_was_meant_as(line, patch):
    (finding,) = found(
        text(f'{{\n"train_batch_size": 8,\n{line}\n"bf16": {{"enabled": true}}\n}}'), "config/wrong-type"
    )
    assert finding.severity == "error"
    assert finding.fixes[0].patch == patch


def test_a_number_that_is_too_small_is_not_called_of_another_kind():
    (finding,) = found(judged({ZERO: {"stage": 1, "reduce_bucket_size": -5}}), "config/wrong-type")
    assert "more than 0" in finding.cause


def test_what_a_schedule_takes_is_said():
    """WarmupCosineLR works with shares of the learning rate; published configs give it those of WarmupLR."""
    params = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 1e-4}
    (finding,) = found(judged({"scheduler": {"type": "WarmupCosineLR", "params": params}}), "config/unknown-key")
    assert "takes total_num_steps, warmup_min_ratio, warmup_num_steps" in finding.fixes[0].text

"""What single lines mean: overflows of every era, progress, values, exits, configs."""

import math

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, diagnose
from dsdoctor.logs.read import read_logs

STAMP = "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:190:update_scale] "
OVERFLOW = STAMP + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
FP16 = '{\n  "fp16": {\n    "enabled": true,\n    "loss_scale_window": 500\n  },\n  "train_batch_size": 8\n}\n'


def facts(tmp_path, text):
    path = tmp_path / "a.log"
    path.write_text(text)
    return read_logs([path])


# Texts as DeepSpeed's releases print them, oldest first.
@pytest.mark.parametrize(
    "line",
    [
        "[deepspeed] OVERFLOW! Skipping step. Attempted loss scale: 65536.0, reducing to 32768.0",
        "[2021-12-02 09:43:20,066] [INFO] [stage2.py:1643:step] [deepscale] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 65536.0, reducing to 32768.0",
        "[deepspeed] fp16 dynamic loss scale overflow! Rank 0 Skipping step. Attempted loss scale: 65536.0, "
        "reducing to 32768.0",
        "[deepspeed] fp16 dynamic loss scale overflow! Skipping step. Attempted loss scale: 65536, reducing to 32768.0",
        "[2023-01-01 00:00:00,000] [INFO] [fused_optimizer.py:1:step] [Rank 0] Overflow detected. Skipping step. "
        "Attempted loss scale: 65536, reducing to 32768.0",
        STAMP + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        "Reducing dynamic loss scale from 65536 to 32768.0",
    ],
)
def test_overflow_lines_of_all_releases(tmp_path, line):
    history = facts(tmp_path, f"start\n{line}\n").loss_scale
    (attempt,) = history.attempts
    assert (attempt.scale, attempt.next_scale, attempt.evidence.line) == (65536, 32768, 2)
    assert (history.precision, history.dynamic) == ("fp16", True)


def test_a_hysteresis_line_keeps_the_scale(tmp_path):
    text = (
        STAMP + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. "
        "Reducing hysteresis to 1\n"
    )
    (attempt,) = facts(tmp_path, text).loss_scale.attempts
    assert (attempt.scale, attempt.next_scale) == (65536, 65536)


def test_a_skip_without_a_scale_is_no_scaling(tmp_path):
    text = "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.\n"
    history = facts(tmp_path, text * 3).loss_scale
    assert (history.precision, history.dynamic, len(history.attempts)) == ("bf16", False, 3)


def test_overflows_glued_to_a_progress_bar(tmp_path):
    """As tqdm and DeepSpeed share a terminal: carriage returns, and a line end only after the overflow."""
    text = "".join(
        f"\r  1%|▏  | {i}/80 [00:0{i}<01:00,  1.0it/s]" + OVERFLOW.format(2 ** (16 - i), 2 ** (15 - i))
        for i in range(4)
    )
    history = facts(tmp_path, text).loss_scale
    assert [(a.step, a.scale, a.evidence.line) for a in history.attempts] == [
        (0, 65536, 1), (1, 32768, 2), (2, 16384, 3), (3, 8192, 4)]  # fmt: skip


def test_the_same_overflow_told_by_every_rank_counts_once(tmp_path):
    told = "[rank{0}]: [deepspeed] OVERFLOW! Rank {0} Skipping step. Attempted loss scale: {1}, reducing to {2}\n"
    lines = [told.format(rank, 2**power, 2 ** (power - 1)) for power in (16, 15, 14) for rank in (0, 1)]
    assert len(facts(tmp_path, "".join(lines)).loss_scale.attempts) == 3


def test_a_quotation_in_a_bf16_run_is_no_overflow(tmp_path):
    text = '{\n  "bf16": {\n    "enabled": true\n  },\n  "train_batch_size": 8\n}\n' + (
        "Answer: [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
    )
    assert facts(tmp_path, text).loss_scale is None


def test_settings_of_the_scale_come_from_the_config_in_the_log(tmp_path):
    history = facts(tmp_path, FP16 + OVERFLOW.format(65536, 32768)).loss_scale
    assert (history.window, history.initial_power) == (500, None)


def test_the_exception_at_the_minimum_is_the_last_attempt(tmp_path):
    text = OVERFLOW.format(2, 1) + (
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    engine.step()\n'
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"
    )
    history = facts(tmp_path, text).loss_scale
    assert [a.raised for a in history.attempts] == [False, True]
    assert history.attempts[-1].evidence.line == 5


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("{'loss': 1.5624, 'grad_norm': 0.8087, 'learning_rate': 2.7e-07, 'epoch': 0.1}", (1.5624, 0.8087, 2.7e-07)),
        ("{'loss': '0.5', 'grad_norm': 'inf', 'learning_rate': '0.00018', 'epoch': '0.9'}", (0.5, math.inf, 0.00018)),
        ("step    10/700 | loss 6.1871 | grad_norm 0.865 | lr 3.000e-04 | 2414 tok/s", (6.1871, 0.865, 3e-4)),
        (" iteration        7/     100 | consumed samples: 56 | learning rate: 1.5E-05 | lm loss: 6.4E+00 | "
         "loss scale: 131072.0 | grad norm: 1.25 |", (6.4, 1.25, 1.5e-05)),
    ],
)  # fmt: skip
def test_values_of_a_step(tmp_path, line, values):
    got = facts(tmp_path, line + "\n")
    assert tuple(got.series_of(name).points[0].value for name in ("loss", "grad_norm", "lr")) == values


def test_values_of_the_trainer_have_the_bars_step(tmp_path):
    text = "\r 10%|█ | 3/30 [00:04<00:05,  8.90it/s]\r     \r{'loss': 2.0, 'grad_norm': nan}\n"
    got = facts(tmp_path, text)
    assert got.series_of("loss").points[0].step == 3
    assert math.isnan(got.series_of("grad_norm").points[0].value)


def test_the_loss_of_a_validation_is_not_the_loss_of_training(tmp_path):
    got = facts(tmp_path, "step 10 loss 2.5\nstep 10 val loss nan\n")
    assert [point.value for point in got.series_of("loss").points] == [2.5]


def test_bars_of_other_work_are_no_training(tmp_path):
    text = "Loading checkpoint shards: 100%|██| 7/7 [00:04<00:00,  1.9it/s]\n"
    assert facts(tmp_path, text).steps_seen == 0


@pytest.mark.parametrize(
    ("line", "rank", "code"),
    [
        ("[2024-03-20 12:15:47,438] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 't.py', '--local_rank=1'] "
         "exits with return code = -9", None, -9),
        ("E0122 13:57:00.488000 8361 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -11) "
         "local_rank: 1 (pid: 8366) of binary: python", 1, -11),
        ("  rank      : 5 (local_rank: 1)\n  exitcode  : -7 (pid: 8366)  (SIGBUS)", 5, -7),
        ("srun: error: n1: task 3: Exited with exit code 137", 3, 137),
        ("/bin/bash: line 1:  4711 Killed                  python train.py", None, -9),
    ],
)  # fmt: skip
def test_how_processes_ended(tmp_path, line, rank, code):
    (exit,) = facts(tmp_path, line + "\n").exits
    assert (exit.rank, exit.code) == (rank, code)


def test_a_config_that_was_printed(tmp_path):
    got = facts(tmp_path, "+ cat ds.json\n" + FP16 + "after\n")
    assert got.config["train_batch_size"] == 8
    (event,) = got.of_kind("fp16-enabled")
    assert event.line == 3


def test_the_engines_own_dump_is_nearer_to_the_truth(tmp_path):
    dump = "[2024-03-20 12:15:47,438] [INFO] [config.py:964:print_user_config]   json = {\n"
    dump += '    "train_batch_size": 16, \n    "zero_optimization": {\n        "stage": 3\n    }\n}\n'
    assert facts(tmp_path, FP16 + dump).config["train_batch_size"] == 16


def test_auto_is_resolved_by_the_trainers_arguments(tmp_path):
    text = '{\n  "fp16": {\n    "enabled": "auto"\n  },\n  "train_batch_size": "auto"\n}\nfp16=True,\n'
    case = Case(logs=facts(tmp_path, text))
    assert context.config_value(case, "fp16.enabled") is True
    assert context.precision(case) == "fp16"


def test_single_settings_are_no_whole_config(tmp_path):
    got = facts(tmp_path, "Creating torch.float16 ZeRO stage 2 optimizer\n")
    assert got.config is None
    assert got.settings == {"fp16.enabled": True, "zero_optimization.stage": 2}
    assert context.stage(Case(logs=got)) == 2


def test_versions(tmp_path):
    text = "DeepSpeed info: version=0.12.5, git-hash=unknown, git-branch=unknown\ntorch 2.1.2, deepspeed 0.12.5\n"
    assert facts(tmp_path, text).versions == {"deepspeed": "0.12.5", "torch": "2.1.2"}


def test_repeats_are_counted(tmp_path):
    line = "[WARNING] [stage3.py:1993:step] 2 pytorch allocator cache flushes since last step. this happens\n"
    (event,) = facts(tmp_path, "x\n" + line * 5).of_kind("cache-flush")
    assert (event.line, event.last_line, event.count) == (2, 6, 5)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("step 1 loss 2.0\n", "open"),
        ("[INFO] [launch.py:351:sigkill_handler] Process 340050 exits successfully.\n", "finished"),
        ("{'train_runtime': '5.646', 'epoch': 1.0}\n", "finished"),
        ("[ERROR] [launch.py:325:x] ['python'] exits with return code = 1\n", "failed"),
    ],
)
def test_how_a_log_ends(tmp_path, text, end):
    assert facts(tmp_path, text).end == end


def test_lines_are_counted_by_line_feeds(tmp_path):
    got = facts(tmp_path, "a\r\nb\rc\n" + OVERFLOW.format(4, 2).rstrip("\n") + "\r\nend")
    assert got.lines == 4
    assert got.loss_scale.attempts[0].evidence.line == 3


def test_a_healthy_fp16_log_has_only_information(tmp_path):
    text = FP16 + "".join(OVERFLOW.format(2 ** (16 - i), 2 ** (15 - i)) for i in range(4))
    text += "".join(f"step {i} loss {3 - i / 50:.3f}\n" for i in range(1, 60)) + "training finished\n"
    findings = diagnose(Case(logs=facts(tmp_path, text)), strict=True).findings
    assert [finding.id for finding in findings] == ["loss-scale/warmup"]


DUMP = "[2024-03-20 12:15:47,438] [INFO] [config.py:984:print]   {}\n"


@pytest.mark.parametrize(
    "lines",
    [
        (  # as releases up to 0.17.0 print it
            "dynamic_loss_scale_args ...... {'init_scale': 4096, 'scale_window': 500, 'delayed_shift': 3, "
            "'consecutive_hysteresis': False, 'min_scale': 2}",
            "fp16_enabled ................. True",
            "initial_dynamic_scale ........ 4096",
            "loss_scale ................... 0",
        ),
        (  # as later ones do
            "float16_config ............... enabled=True auto_cast=False loss_scale=0.0 initial_scale_power=12 "
            "loss_scale_window=500 hysteresis=3 consecutive_hysteresis=False min_loss_scale=2 "
            "fp16_master_weights_and_grads=False",
        ),
    ],
)
def test_settings_of_the_scale_come_from_single_lines_of_the_dump(tmp_path, lines):
    text = "".join(map(DUMP.format, lines)) + OVERFLOW.format(4096, 2048)
    history = facts(tmp_path, text).loss_scale
    assert (history.window, history.hysteresis, history.initial_power, history.floor) == (500, 3, 12, 2)
    assert (history.precision, history.dynamic) == ("fp16", True)


def test_a_static_scale_of_the_dump(tmp_path):
    text = DUMP.format("fp16_enabled ................. True") + DUMP.format("loss_scale ................... 128.0")
    line = "[2024-03-20 12:15:47,438] [WARNING] [x.py:1:f] [deepspeed] OVERFLOW! Skipping step. "
    line += "Gradients are non-finite, weights were not updated.\n"
    assert facts(tmp_path, text + line).loss_scale.attempts[0].scale == 128

"""Scripts on real DeepSpeed, one or two processes on the CPU, as a user would have written them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.runs.child_run import run_bare, run_child, write_script

BF16 = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-9}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}


def config(stage: int, **other: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
    return {**BF16, **ADAM, "zero_optimization": zero, **other}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


REGRESSION = """
    import argparse
    import deepspeed
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+")
    for path in parser.parse_args().configs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
        for _ in range(5):
            loss = engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            print("loss", path, loss.item().hex())
    """


@pytest.fixture(scope="module")
def bare_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Losses of the script without dsdoctor, by config file."""
    folder = tmp_path_factory.mktemp("bare")
    write_script(folder, REGRESSION)
    names = [f"stage{stage}.json" for stage in range(4)]
    for stage, name in enumerate(names):
        (folder / name).write_text(json.dumps(config(stage)))
    lines = [line.split() for line in run_bare(folder, names).splitlines() if line.startswith("loss ")]
    return {name: [line[2] for line in lines if line[1] == name] for name in names}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_observed_losses_are_bit_equal(work: Path, bare_losses: dict[str, list[str]], stage: int) -> None:
    name = f"stage{stage}.json"
    write_script(work, REGRESSION)
    (work / name).write_text("{}")  # what the script passes is not what the run uses
    result = run_child(work, args=(name,), config=config(stage))
    printed = [line.split()[2] for line in result.stdout().splitlines() if line.startswith("loss ")]
    assert len(printed) == 5
    assert printed == bare_losses[name]
    trace = result.trace
    assert trace.completed
    assert [step.losses for step in trace.steps] == [(float.fromhex(text),) for text in printed]
    assert all(not step.skipped and step.grad_norm and step.lr == 0.01 and step.host_bytes for step in trace.steps)
    assert trace.facts is not None
    assert (trace.facts.zero_stage, trace.facts.precision, trace.facts.optimizer) == (stage, "bf16", "Adam")
    assert trace.facts.config == config(stage), "without what dsdoctor adds to its copy"
    assert any("differs from the given one" in note for note in trace.notes)
    assert trace.process_group is not None
    assert trace.process_group.backend == "gloo"


def test_config_in_the_arguments_makes_way_unless_there_is_another(work: Path) -> None:
    write_script(
        work,
        """
        from types import SimpleNamespace
        import deepspeed
        import torch

        args = SimpleNamespace(deepspeed_config="gone.json", local_rank=0)
        model = torch.nn.Linear(8, 1)
        engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
        assert args.deepspeed_config == "gone.json"
        deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config={})
        """,
    )
    result = run_child(work, config=config(1))
    assert result.trace.called_engine
    assert result.trace.failure is not None
    assert "we were given deepspeed configs in the deepspeed arguments and" in result.trace.failure.message


def test_run_goes_on_until_the_loss_scale_holds(work: Path) -> None:
    write_script(
        work,
        """
        import deepspeed
        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="gone.json")
        try:
            while True:
                loss = engine(torch.ones(4, 8).half()).float().pow(2).mean()
                engine.backward(loss)
                engine.step()
        finally:
            print("counted", engine.skipped_steps, engine.optimizer.cur_scale)
        """,
    )
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    result = run_child(work, steps=2, config=config(2, bf16={"enabled": False}, fp16=fp16))
    trace = result.trace
    assert trace.stopped == "steps"
    assert result.codes == (0,)
    counted, scale = next(line.split()[1:] for line in result.stdout().splitlines() if line.startswith("counted"))
    assert [step.skipped for step in trace.steps] == [True] * int(counted) + [False]
    assert int(counted) > 2, "otherwise the run did not have to go on"
    assert [step.loss_scale for step in trace.steps] == [2.0 ** (22 - i) for i in range(len(trace.steps))]
    assert trace.steps[-1].next_scale == float(scale)
    assert trace.facts is not None
    assert trace.facts.dynamic_loss_scale
    assert any("rehearsal" in note for note in trace.notes)
    assert "OVERFLOW! Rank 0 Skipping step" in result.stdout(), "the log level is raised in the copy"


@pytest.mark.parametrize("engine", ["deepspeed", "plain"])
def test_losses_of_a_script_that_calls_backward_itself(work: Path, engine: str) -> None:
    """Of its own engine alone: the critic's loss, whose input comes from the engine too, is another model's."""
    write_script(
        work,
        """
        import deepspeed
        import torch

        torch.manual_seed(0)
        model, critic = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={})
        for number in range(4):
            out = engine(torch.randn(4, 8).half()).float()
            critic(out.detach()).square().mean().backward()
            loss = out.square().mean()
            engine.scale(loss).backward()
            print("loss", loss.item().hex())
            engine.step()
        """,
    )
    fp16 = {"enabled": True, "initial_scale_power": 4}
    result = run_child(
        work, engine=engine, config=config(1, bf16={"enabled": False}, fp16=fp16, gradient_accumulation_steps=2)
    )
    assert result.trace.failure is None
    printed = [float.fromhex(line.split()[1]) for line in result.stdout().splitlines() if line.startswith("loss ")]
    assert [step.losses for step in result.trace.steps] == [tuple(printed[:2]), tuple(printed[2:])]
    assert all(step.loss_scale == 16 for step in result.trace.steps), "the losses are those before they were scaled"
    events = [json.loads(line) for line in (result.folder / "trace-rank0.jsonl").read_text().splitlines()]
    backward = [(e["step"], e["micro_step"]) for e in events if e["event"] == "enter" and e["phase"] == "backward"]
    assert backward == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_stop_reaches_a_script_that_catches_everything(work: Path) -> None:
    write_script(
        work,
        """
        from deepspeed import initialize
        import torch

        model = torch.nn.Linear(8, 1)
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config={})
        while True:
            try:
                engine.backward(engine(torch.ones(4, 8).bfloat16()).sum())
                engine.step()
            except:
                print("swallowed", flush=True)
        """,
    )
    result = run_child(work, steps=2, config=config(1))
    assert result.codes == (0,)
    assert (result.trace.stopped, len(result.trace.steps)) == ("steps", 2)
    assert result.stdout().count("swallowed") == 3


def test_ranks_stop_together_and_a_failure_stays_with_its_rank(work: Path) -> None:
    write_script(
        work,
        """
        import sys
        import deepspeed
        import torch

        class Net(torch.nn.Linear):
            def forward(self, x):
                if sys.argv[1:] == ["fail"] and calls == 2 and torch.distributed.get_rank() == 1:
                    raise ValueError("bad batch")
                return super().forward(x)

        model = Net(8, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={})
        calls = 0
        while True:
            calls += 1
            engine.backward(engine(torch.ones(4, 8).bfloat16()).sum())
            engine.step()
        """,
    )
    together = run_child(work, world_size=2, steps=3, config=config(1))
    assert together.codes == (0, 0)
    assert [(t.stopped, len(t.steps), t.world_size) for t in together.traces] == [("steps", 3, 2)] * 2
    failing = run_child(work, world_size=2, steps=3, config=config(1), args=("fail",))
    rank = failing.traces[1]
    assert rank.failure is not None
    assert (rank.failure.type, rank.failure.message, rank.failure.step) == ("ValueError", "bad batch", 1)
    assert (rank.last_phase, rank.last_step) == ("forward", 1)
    assert rank.failure.frames[0].file == rank.failure.frames[-1].file == str(work / "train.py")
    assert not any("dsdoctor" in frame.file.replace(str(work), "") for frame in rank.failure.frames)
    assert failing.codes[1] == 1
    assert not failing.traces[0].completed


def test_probe_ends_when_the_model_is_handed_over(work: Path) -> None:
    write_script(
        work,
        """
        import deepspeed
        import torch

        with deepspeed.zero.Init(config_dict_or_path="ds.json"):
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
        assert model[0].weight.ds_numel == 128
        try:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        finally:
            print("cleaned up")
        """,
    )
    result = run_child(work, probe=True, config=config(3))
    assert result.codes == (0,)
    assert result.stdout().endswith("cleaned up\n")
    assert (result.trace.stopped, result.trace.steps) == ("probe", ())
    assert result.trace.model is not None
    assert (result.trace.model.parameters, result.trace.model.largest_layer) == (8 * 16 + 16 + 16 + 1, 8 * 16 + 16)


def test_without_deepspeed_its_names_still_work(work: Path) -> None:
    write_script(
        work,
        """
        import os
        import deepspeed
        import torch
        from deepspeed.runtime.engine import DeepSpeedEngine

        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
            model = torch.nn.Linear(8, 1)
        with deepspeed.zero.GatheredParameters(model.weight, modifier_rank=0):
            assert model.weight.shape == (1, 8)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        assert isinstance(engine, DeepSpeedEngine) and isinstance(engine, deepspeed.DeepSpeedEngine)
        while True:
            engine.backward(engine(torch.ones(4, 8).bfloat16()).float().sum())
            engine.step()
            engine.save_checkpoint("ckpt", tag="last")
            torch.save(model.state_dict(), "model.pt")
            assert torch.load("model.pt")["weight"].shape == (1, 8)
            assert engine.load_checkpoint("ckpt")[0] is not None
            assert sorted(os.listdir(".")) == ["train.py"], os.listdir(".")
        """,
    )
    result = run_child(work, engine="plain", steps=2, config=config(3))
    assert result.trace.failure is None
    assert (result.trace.stopped, len(result.trace.steps)) == ("steps", 2)
    assert result.trace.facts is not None
    assert (result.trace.facts.zero_stage, result.trace.facts.precision) == (0, "bf16")
    assert {each.original for each in result.trace.contained} == {"ckpt", "model.pt"}


def test_control_in_fp32_overrules_a_script_that_insists_on_half(work: Path) -> None:
    write_script(
        work,
        """
        import deepspeed
        import torch

        model = torch.nn.Linear(8, 1).bfloat16()
        parameter = model.weight
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        assert engine.module.weight is parameter and parameter.dtype == torch.float32
        while True:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = engine(torch.ones(4, 8, dtype=torch.bfloat16))
                assert out.dtype == torch.float32, out.dtype
            engine.backward(out.sum())
            engine.step()
        """,
    )
    result = run_child(work, precision="fp32", steps=2, config=config(1))
    assert result.trace.failure is None
    assert result.trace.stopped == "steps"
    assert result.trace.facts is not None
    assert result.trace.facts.precision == "fp32"
    said = " ".join(result.trace.notes)
    assert all(word in said for word in ("model in half precision", "half-precision inputs", "autocast"))


def test_detector_writes_its_first_hit_and_the_run_goes_on(work: Path) -> None:
    write_script(
        work,
        """
        import deepspeed
        import torch

        class Log(torch.nn.Module):
            def forward(self, x):
                return x.log()

        model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), Log(), torch.nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        torch.nn.init.ones_(model[0].weight)
        for batch in (torch.ones(4, 8), torch.zeros(4, 8), torch.ones(4, 8)):
            engine.backward(engine(batch).sum())
            engine.step()
        """,
    )
    result = run_child(work, detector=True, config=config(0, bf16={"enabled": False}, optimizer=SGD))
    trace = result.trace
    assert trace.failure is None
    assert len(trace.steps) == 3
    first = trace.first_bad
    assert first is not None
    assert (first.rank, first.step, first.phase, first.module, first.kind) == (0, 1, "forward", "1", "inf")
    assert "Log" in trace.frames_report


def test_port_of_the_script_is_the_one_that_is_used(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        write_script(
            work,
            f"""
            import os
            import torch

            os.environ["MASTER_PORT"] = "{taken.getsockname()[1]}"
            torch.distributed.init_process_group("gloo")
            """,
        )
        result = run_child(work)
    assert result.trace.failure is not None
    assert "EADDRINUSE" in result.trace.failure.message
    assert any("rank 0 listens there itself" in note for note in result.trace.notes)


TRAINER = """
    import os
    import huggingface_hub
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            ids = torch.arange(6) % 5
            return {"input_ids": ids, "labels": ids}

    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=8, n_positions=8))
    trainer = Trainer(model=model, args=args, train_dataset=Rows())
    trainer.train()
    model.save_pretrained("final")
    assert GPT2LMHeadModel.from_pretrained("final").config.n_embd == 16
    assert huggingface_hub.create_repo("me/model").repo_id == "me/model"
    huggingface_hub.upload_folder(repo_id="me/model", folder_path="final")
    print("in", sorted(os.listdir(".")))
    """
TRAINER_ARGUMENTS = (
    *("--output_dir", "out", "--use_cpu", "--bf16", "--report_to", "none", "--save_steps", "1", "--max_steps", "3"),
    *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--deepspeed", "ds.json"),
)
TRAINER_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


@pytest.mark.parametrize("engine", ["deepspeed", "plain"])
def test_trainer_takes_our_config_and_leaves_nothing_behind(work: Path, engine: str) -> None:
    write_script(work, TRAINER)
    (work / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    result = run_child(work, args=TRAINER_ARGUMENTS, engine=engine, config=TRAINER_CONFIG)
    trace = result.trace
    assert trace.failure is None
    assert trace.finish_code == 0
    assert len(trace.steps) == 3
    assert all(len(step.losses) == 2 for step in trace.steps)
    assert trace.facts is not None
    assert (trace.facts.framework, trace.facts.precision, trace.facts.gradient_accumulation_steps) == (
        "transformers",
        "bf16",
        2,
    )
    assert trace.facts.config["train_micro_batch_size_per_gpu"] == 4, "auto is resolved by the Trainer"
    assert trace.facts.zero_stage == (2 if engine == "deepspeed" else 0)
    assert trace.model is not None
    assert trace.model.model_type == "gpt2"
    assert "in ['ds.json', 'train.py']" in result.stdout()
    assert (result.folder / "saved" / "out" / "checkpoint-3").is_dir()
    what = {each.what: each for each in trace.contained}
    assert what["Trainer output_dir"].original == "out"
    assert what["huggingface_hub.upload_folder"].replacement == ""


def test_zero_3_converts_a_model_with_the_values_that_the_trainer_filled_in(work: Path) -> None:
    """DeepSpeed calls `zero.Init` itself on a model that was built whole; "auto" there breaks its arithmetic."""
    write_script(work, TRAINER)
    config = {**TRAINER_CONFIG, "zero_optimization": {"stage": 3}}
    result = run_child(work, args=TRAINER_ARGUMENTS, steps=1, config=config)
    assert result.trace.failure is None
    assert (result.trace.stopped, len(result.trace.steps)) == ("steps", 1)


def test_trainer_in_the_fp32_control_agrees_with_its_config(work: Path) -> None:
    write_script(work, TRAINER)
    config = {**TRAINER_CONFIG, "bf16": {"enabled": True}}
    result = run_child(work, args=TRAINER_ARGUMENTS, precision="fp32", steps=1, config=config)
    assert result.trace.failure is None
    assert result.trace.stopped == "steps"
    assert result.trace.facts is not None
    assert result.trace.facts.precision == "fp32"


def test_accelerate_takes_our_config(work: Path) -> None:
    write_script(
        work,
        """
        import torch
        from accelerate import Accelerator, DeepSpeedPlugin
        from torch.utils.data import DataLoader, TensorDataset

        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"), mixed_precision="bf16")
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x.bfloat16()).float().sum())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state("state")
        """,
    )
    (work / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    result = run_child(work, config=given)
    trace = result.trace
    assert trace.failure is None
    assert [len(step.losses) for step in trace.steps] == [2] * 4, "32 rows, 4 in a micro-batch, 2 of them in a step"
    assert trace.facts is not None
    assert (trace.facts.framework, trace.facts.zero_stage, trace.facts.precision) == ("accelerate", 1, "bf16")
    assert sorted(os.listdir(work)) == ["ds.json", "train.py"]

"""`dsdoctor config` as it is called: what it prints, what it writes, how it ends."""

import io
import json
import os
import subprocess
import sys

import pytest

from dsdoctor.cli.main import main

BAD = """{
  // the batch
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {"stage": 2, "overlap_com": true}
}
"""
GOOD = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
HF = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text(BAD)
    (tmp_path / "good.json").write_text(GOOD)
    (tmp_path / "hf.json").write_text(HF)
    return tmp_path


def call(capsys, *words):
    code = main(["config", *words, *(() if "--new" in words else ("--deepspeed-version", "0.19.8"))])
    return code, capsys.readouterr().out


def test_place_and_source_line_are_shown(folder, capsys):
    code, said = call(capsys, "bad.json")
    assert code == 1
    assert 'bad.json:4:37: "zero_optimization": {"stage": 2, "overlap_com": true}' in said
    assert "--fix" in said


def test_nothing_wrong(folder, capsys):
    assert call(capsys, "good.json")[0] == 0


def test_several_files_end_with_the_worst(folder, capsys):
    code, said = call(capsys, "good.json", "bad.json")
    assert code == 1
    assert said.index("good.json:") < said.index("bad.json:")


def test_fix_writes_the_file_and_a_backup(folder, capsys):
    code = main(["config", "bad.json", "--fix"])
    said, told = capsys.readouterr()
    assert code == 0
    assert "kept as bad.json.bak" in told
    assert (folder / "bad.json").read_text() == BAD.replace("overlap_com", "overlap_comm")
    assert (folder / "bad.json.bak").read_text() == BAD
    assert "fixed zero_optimization.overlap_com" in said
    call(capsys, "bad.json", "--fix")
    assert sorted(path.name for path in folder.glob("bad*")) == ["bad.json", "bad.json.bak"]


def test_diff_writes_nothing(folder, capsys):
    code, said = call(capsys, "bad.json", "--diff")
    assert code == 1
    assert (folder / "bad.json").read_text() == BAD
    assert [line[0] for line in said.splitlines()[3:]] == [" ", " ", " ", "-", "+", " "]
    assert not list(folder.glob("*.bak*"))


def test_json_holds_what_was_fixed_and_the_diff(folder, capsys):
    document = json.loads(call(capsys, "bad.json", "--diff", "--json")[1])
    assert document["fixed"][0]["keys"] == ["zero_optimization.overlap_com"]
    assert document["diff"].startswith("--- bad.json")
    place = document["findings"][0]["evidence"][0]
    assert (place["line"], place["column"]) == (4, 37)
    assert document["findings"][0]["fixes"][0]["safe"] is True


def test_arguments_as_words_and_as_files(folder, capsys):
    for arguments in ("--bf16 --per_device_train_batch_size 8", "args.json", "args.yaml"):
        (folder / "args.json").write_text('{"per_device_train_batch_size": 8}')
        (folder / "args.yaml").write_text("per_device_train_batch_size: 8\n")
        code, said = call(capsys, "hf.json", "--hf-args", arguments)
        assert code == 1, arguments
        assert "config/hf-mismatch" in said
    assert call(capsys, "hf.json", "--hf-args", "--bf16 --per_device_train_batch_size 4")[0] == 0


def test_a_pickle_is_never_read(folder, capsys):
    (folder / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert main(["config", "hf.json", "--hf-args", "training_args.bin"]) == 2
    assert "pickle" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_training_arguments_of_the_script(folder, capsys):
    (folder / "train.py").write_text("TrainingArguments(per_device_train_batch_size=2, deepspeed='hf.json')\n")
    code, said = call(capsys, "hf.json", "--script", "train.py")
    assert code == 1
    assert "per_device_train_batch_size is 2" in said


def test_an_accelerate_yaml(folder, capsys):
    text = (
        "deepspeed_config:\n  zero_stage: 2\n  offload_param_device: cpu\n  gradient_accumulation_steps: 2\n"
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
    )
    (folder / "acc.yaml").write_text(text)
    code, said = call(capsys, "acc.yaml")
    assert code == 0
    assert "config/ineffective" in said
    assert "acc.yaml:2:3: zero_stage: 2" in said
    assert "world size 4" in said
    (folder / "acc2.yml").write_text("deepspeed_config:\n  deepspeed_config_file: bad.json\n  zero3_init_flag: true\n")
    assert "bad.json:4:37" in call(capsys, "acc2.yml")[1]


def test_yaml_by_mistake(folder, capsys):
    (folder / "ds.yaml").write_text("train_batch_size: 8\nzero_optimization:\n  stage: 2\n")
    code, said = call(capsys, "ds.yaml")
    assert code == 1
    assert "this is YAML" in said


def test_new_fits_and_is_clean(folder, capsys):
    for name, words in (("a.json", ()), ("b.json", ("--hf",)), ("c.json", ("--precision", "fp16"))):
        sizes = ("--params", "7B", "--gpu", "8x24GiB", "--host", "600GiB")
        assert call(capsys, name, "--new", *sizes, *words)[0] == 0
        assert json.loads((folder / name).read_text())["zero_optimization"]["stage"] >= 1
        framework = ("--hf-args=--bf16",) if "--hf" in words else ()
        assert call(capsys, name, *framework)[0] == 0
    assert main(["config", "a.json", "--new", *sizes]) == 2
    assert main(["config", "d.json", "--new", "--params", "7B"]) == 2
    assert main(["config", "d.json", "--new", "--params", "7B", "--gpu", "many", "--host", "600GiB"]) == 2
    assert main(["config", "e.json", "--new", "--params", "9T", *sizes[2:]]) == 2
    assert not (folder / "e.json").exists()


def test_new_asks_on_a_terminal_for_what_is_missing(folder, capsys, monkeypatch):
    answers = io.StringIO("seven\n7B\n8x\n8x24GiB\n\ny\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert main(["config", "asked.json", "--new", "--host", "600GiB"]) == 0
    said = capsys.readouterr()
    assert "not understood: seven" in said.err
    assert "not understood: 8x" in said.err
    assert "precision" in said.err
    written = json.loads((folder / "asked.json").read_text())
    assert written["bf16"] == {"enabled": "auto"}
    assert written["train_batch_size"] == "auto"


def test_new_ends_where_the_answers_end(folder, capsys, monkeypatch):
    answers = io.StringIO("7B\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert main(["config", "asked.json", "--new"]) == 2
    assert "no answer to: GPUs" in capsys.readouterr().err
    assert not (folder / "asked.json").exists()


def test_the_model_that_the_script_loads(folder, capsys):
    (folder / "net").mkdir()
    (folder / "net" / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"dtype": "bfloat16"}}))
    (folder / "train.py").write_text("model = AutoModel.from_pretrained('net')\n")
    text = json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    (folder / "half.json").write_text(text)
    assert "numerics/bf16-model-in-fp16" in call(capsys, "half.json", "--script", "train.py")[1]
    assert "numerics/bf16-model-in-fp16" in call(capsys, "half.json", "--", "--model_name_or_path", "net")[1]


def test_a_config_of_accelerates_own_is_not_fixed(folder, capsys):
    text = json.dumps({"deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}, "num_processes": 2})
    (folder / "acc.json").write_text(text)
    assert "config/ineffective" in call(capsys, "acc.json")[1]
    assert main(["config", "acc.json", "--fix"]) == 2
    assert (folder / "acc.json").read_text() == text


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def test_the_model_against_a_machine_that_is_described(folder, capsys):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (folder / "offload.json").write_text(json.dumps(json.loads(GOOD) | {"zero_optimization": zero}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    machine = ("--model", "config.json", "--gpu", "8x80GiB")
    code, said = call(capsys, "offload.json", *machine, "--host", "64GiB")
    assert code == 1
    assert "the host needs" in said  # 6.7e9 parameters: master, moments and gradients alone are 16 bytes each
    assert call(capsys, "offload.json", *machine, "--host", "1TiB")[0] == 0
    assert call(capsys, "offload.json", "--model", "config.json")[0] == 0
    assert main(["config", "offload.json", *machine[:2], "--gpu", "nonsense"]) == 2


def test_sarif_and_github(folder, capsys):
    run = json.loads(call(capsys, "bad.json", "--format", "sarif")[1])["runs"][0]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "config/unknown-key"
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "bad.json"},
        "region": {"startLine": 4, "startColumn": 37},
    }
    said = call(capsys, "bad.json", "--format", "github")[1]
    assert said.startswith("::error file=bad.json,")
    assert ",line=4,col=37::" in said


def test_neither_torch_nor_deepspeed_is_imported(folder):
    code = (
        "import sys; from dsdoctor.cli.main import main; main(['config', 'bad.json']); "
        "sys.exit(bool({'torch', 'deepspeed', 'transformers', 'yaml'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0

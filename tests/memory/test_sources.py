"""Where a model comes from: files, folders, the hub's cache, and what is refused."""

import json
import pickle

import pytest

from dsdoctor.memory import meta_build, sources
from dsdoctor.memory.inventory import Sizes, of_number, split_experts, with_adapters
from dsdoctor.memory.parameter import Parameter
from tests.memory.test_headers import entry, written
from tests.memory.test_shape import GROUPED

LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", **GROUPED}


def test_a_config_gives_counts_dtype_and_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        model = sources.inventory_of(str(path))
        assert model.loaded == 2 * model.all
        assert model.shape is not None
        assert "arithmetic" in model.source


def test_weights_beside_a_config_are_exact_and_keep_the_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    written(tmp_path / "model.safetensors", {"a": entry([6], 0, 12), "b": entry([2], 12, 16)}, body=16)
    model = sources.inventory_of(str(tmp_path))
    assert model.all == 8
    assert model.shape is not None
    assert sources.inventory_of(str(tmp_path / "model.safetensors")).all == 8


def test_an_id_is_looked_up_in_the_cache_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(sources.ModelUnknown, match="downloads nothing"):
        sources.inventory_of("org/model")
    old, new = (tmp_path / "models--org--model" / "snapshots" / name for name in ("aaa", "bbb"))
    for folder, layers in ((old, 1), (new, 2)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa")
    assert sources.inventory_of("org/model").shape.layers == 1


class Trap:
    """Unpickling it would leave a file behind."""

    def __reduce__(self):
        return (open, ("unpickled", "w"))


def test_pickles_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(sources.ModelUnknown, match="pickled"):
            sources.inventory_of(str(path))
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("name", ["", "./nothing/here.json", "../no", "a/b/c", "gone.safetensors"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(sources.ModelUnknown, match="no such file or folder"):
        sources.inventory_of(name)


def test_an_unknown_type_is_built_on_the_meta_device(tmp_path):
    """Phi-3 packs its projections into one matrix, which the arithmetic does not know; the counts are its own."""
    pytest.importorskip("transformers")
    config = {"model_type": "phi3", **GROUPED, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    model = sources.inventory_of(str(tmp_path))
    names = {one.name for one in model.parameters}
    assert "model.layers.0.self_attn.qkv_proj.weight" in names
    assert (model.source, model.loaded) == ("built on the meta device by Transformers", 2 * model.all)


@pytest.mark.parametrize(
    ("architecture", "kind", "sizes"),
    [
        ("LlamaForSequenceClassification", "llama", {"num_key_value_heads": 2, "intermediate_size": 96}),
        ("BertForMaskedLM", "bert", {"intermediate_size": 96}),
        (
            "OPTForCausalLM",
            "opt",
            {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "max_position_embeddings": 50},
        ),
    ],
)
def test_the_class_that_the_config_names_is_built(tmp_path, architecture, kind, sizes):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    config = transformers.AutoConfig.for_model(kind, **common, **sizes, architectures=[architecture])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, architecture)._from_config(config)
    found = sources.inventory_of(str(tmp_path))
    assert found.all == model.num_parameters()
    assert found.shape is not None
    assert found.shape.approximate


@pytest.mark.parametrize("absurd", [{"num_hidden_layers": 5_000_000}, {"hidden_size": -64}, {"num_attention_heads": 0}])
def test_sizes_that_no_model_has_are_refused_at_once(tmp_path, absurd, monkeypatch):
    monkeypatch.setattr(meta_build, "build", lambda *_, **__: pytest.fail("nothing of that size is built"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | absurd))
    with pytest.raises(sources.ModelUnknown, match="no size of a model"):
        sources.inventory_of(str(tmp_path / "config.json"))


def test_a_build_that_fails_falls_back_and_says_so(tmp_path, monkeypatch):
    def fails(config, *, loaded):
        raise meta_build.CannotBuild("building the model on the meta device failed: no such type")

    monkeypatch.setattr(meta_build, "build", fails)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new-kind", **GROUPED}))
    model = sources.inventory_of(str(tmp_path))
    assert "failed: no such type" in model.made_up[0]
    assert model.all > 0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new-kind", "width": 3}))
    with pytest.raises(sources.ModelUnknown, match="no such type"):
        sources.inventory_of(str(tmp_path))


def test_code_of_a_model_is_not_run(tmp_path):
    """A config that maps its classes to a file beside it: the file is not imported."""
    pytest.importorskip("transformers")
    (tmp_path / "code.py").write_text("open('ran', 'w')\n")
    mapped = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own-kind", **GROUPED, **mapped}))
    assert "failed" in sources.inventory_of(str(tmp_path)).made_up[0]
    assert not (tmp_path / "ran").exists()


def test_numbers_make_layers():
    """1000 parameters, 10 of hidden size x vocabulary at each end, 4 layers between: 980 / 4 each."""
    model = of_number(1000, Sizes(layers=4, hidden=5, vocab=2, heads=1))
    assert [one.elements for one in model.parameters] == [10, 245, 245, 245, 245, 10]
    with pytest.raises(ValueError, match="alone have"):
        of_number(1000, Sizes(hidden=100, vocab=100))


def test_adapters_freeze_everything_else():
    model = with_adapters(of_number(1_000_000), 6400)
    assert (model.trainable, model.all) == (6400, 1_006_400)
    with pytest.raises(ValueError, match="more than the model has"):
        with_adapters(of_number(1000), 2000)


def test_experts_are_spread_over_ranks():
    dense, expert = Parameter("a", 100), Parameter("mlp.experts.b", 100, True, 4.0, True)
    model = split_experts(of_number(1), 4)
    assert model.expert_parallel == 1
    from dsdoctor.memory.inventory import Inventory

    model = split_experts(Inventory(parameters=(dense, expert)), 4)
    assert [one.elements for one in model.parameters] == [100, 25]
    assert model.expert_parallel == 4


def test_an_adapter_is_trained_and_its_base_frozen(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text(json.dumps(LLAMA))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    written(adapter / "adapter_model.safetensors", {"lora_A": entry([16], 0, 32)}, body=32)
    model = sources.inventory_of(str(adapter))
    assert (model.trainable, model.frozen) == (16, sources.inventory_of(str(base)).all)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(sources.ModelUnknown, match="names no base model"):
        sources.inventory_of(str(adapter))

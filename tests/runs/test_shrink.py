"""Fewer layers for Hugging Face models, and where a checkpoint of DeepSpeed lies."""

import pytest

from dsdoctor.runs.intercepts.resume import place_of
from dsdoctor.runs.intercepts.shrink import LAYERS, shrink

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("GPT2", {"n_layer": 6, "n_embd": 32, "n_head": 2, "vocab_size": 24}),
        ("Llama", {"num_hidden_layers": 5, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 24}),
        ("T5", {"num_layers": 4, "num_decoder_layers": 3, "d_model": 32, "num_heads": 2, "vocab_size": 24}),
        ("Qwen2", {"num_hidden_layers": 5, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 24}),
        ("Bert", {"num_hidden_layers": 5, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 24}),
    ],
)
def test_a_model_is_built_with_fewer_layers(kind, sizes):
    config = getattr(transformers, f"{kind}Config")(**sizes)
    told = []
    shrink(config, told.append)
    model = getattr(transformers, f"{kind}Model")(config)
    blocks = [m for m in model.modules() if type(m).__name__ in ("GPT2Block", "LlamaDecoderLayer", "T5Block")]
    blocks += [m for m in model.modules() if type(m).__name__ in ("Qwen2DecoderLayer", "BertLayer")]
    assert len(blocks) == LAYERS * (2 if kind == "T5" else 1)
    assert told


def test_a_small_model_is_left_alone():
    config = transformers.GPT2Config(n_layer=2)
    told = []
    shrink(config, told.append)
    assert (config.n_layer, told) == (2, [])


def test_a_checkpoint_is_a_folder_with_latest_or_with_the_states(tmp_path):
    tag = tmp_path / "global_step5"
    tag.mkdir()
    assert place_of(tmp_path) is None
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert place_of(tag) == (str(tmp_path), "global_step5")
    (tmp_path / "latest").write_text("global_step5\n")
    assert place_of(tmp_path) == (str(tmp_path), "global_step5")

"""The arithmetic on a config.json against the models that Transformers builds from the same sizes."""

import pytest

from dsdoctor.memory.hf_config import NoShape, known, shape_of
from dsdoctor.memory.shape import parameters

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 160, "head_dim": 16}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 50},
    "gpt_neox": SMALL | {"intermediate_size": 128},
    "opt": SMALL | {"ffn_dim": 128, "max_position_embeddings": 50, "word_embed_proj_dim": 64},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen2_moe": GROUPED
    | {"moe_intermediate_size": 40, "num_experts": 4, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    "qwen3_moe": GROUPED | {"moe_intermediate_size": 40, "num_experts": 4, "mlp_only_layers": [0]},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_counts_are_those_of_the_real_model(kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind], **TOKENS)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = parameters(shape_of({"model_type": kind, **CONFIGS[kind]}))
    assert sum(one.elements for one in counted) == sum(one.numel() for one in model.parameters())
    assert max(one.elements for one in counted) == max(one.numel() for one in model.parameters())
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert sum(one.elements for one in counted if one.expert) == experts
    assert known(config.to_dict())


SWITCHED = {  # a type the arithmetic knows, with a switch in the other position or another head
    "opt-350m": {"model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt without biases": {"model_type": "opt", "hidden_size": 64, "enable_bias": False},
    "neox without biases": {"model_type": "gpt_neox", "attention_bias": False},
    "gpt2 as a decoder beside an encoder": {"model_type": "gpt2", "add_cross_attention": True},
    "qwen2_moe without biases": {"model_type": "qwen2_moe", "qkv_bias": False},
    "a reward model": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
}


@pytest.mark.parametrize("name", SWITCHED)
def test_what_the_arithmetic_does_not_cover_is_built(name):
    assert not known(SWITCHED[name])
    assert known({"model_type": SWITCHED[name]["model_type"], "hidden_size": 64, "word_embed_proj_dim": 64})


@pytest.mark.parametrize(
    ("kind", "foreign"),
    [
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"mlp_bias": True}),
        ("mixtral", {"num_local_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}),
    ],
)
def test_keys_that_a_type_does_not_read_change_nothing(kind, foreign):
    """Compared with what Transformers 5.24 builds: these classes do not look at the keys."""
    own = {name: value for name, value in foreign.items() if name == "num_local_experts"}
    plain, more = ({"model_type": kind, **GROUPED, **keys} for keys in (own, foreign))
    assert parameters(shape_of(plain)) == parameters(shape_of(more))


@pytest.mark.parametrize("kind", ["t5", "whisper", "new"])
def test_an_encoder_and_decoder_has_no_shape_of_a_decoder(kind):
    with pytest.raises(NoShape, match="encoder"):
        shape_of({"model_type": kind, **SMALL, "is_encoder_decoder": True})
    assert shape_of({"model_type": "bert", **SMALL}).approximate


def test_seven_billion():
    """Llama-2 7B has 6,738,415,616 parameters by its model card's files."""
    llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    shape = shape_of(llama | {"intermediate_size": 11008, "vocab_size": 32000})
    assert sum(one.elements for one in parameters(shape)) == 6_738_415_616


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"hidden_size": 64},
        SMALL | {"hidden_size": -64},
        SMALL | {"hidden_size": 0},
        SMALL | {"hidden_size": 10**12},
        SMALL | {"vocab_size": "many"},
        SMALL | {"num_hidden_layers": True},
        SMALL | {"num_attention_heads": 2.5},
    ],
)
def test_sizes_that_are_none(broken):
    with pytest.raises(NoShape):
        shape_of({"model_type": "llama", **broken})


def test_other_types_are_not_taken_for_known():
    assert not known({"model_type": "mamba", **SMALL})
    assert not known({"model_type": "llama", "text_config": SMALL})
    assert shape_of({"model_type": "new", **SMALL}).approximate

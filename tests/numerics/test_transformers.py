"""Healthy models of Transformers, built from config, give no alarm: their masks hold -inf and the lowest numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import attach
from tests.numerics.engine import TinyEngine

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **more)
    return transformers.GPT2LMHeadModel(config)


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL, **more))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=32, **SMALL))


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


MODELS = {
    "gpt2": gpt2,
    "gpt2 eager": lambda: gpt2(attn_implementation="eager"),
    "llama": llama,
    "llama eager": lambda: llama(attn_implementation="eager"),
    "t5": t5,
    "bert": bert,
    "opt": opt,
}


def more_models() -> dict[str, Callable[[], Any]]:
    """Further families: rotary and ALiBi positions, experts, parallel blocks, local windows, images, speech, pairs."""
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = {**small, "intermediate_size": 64}
    t = transformers
    return {
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**wide, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
        ),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**wide, num_key_value_heads=2)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**wide, num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0)
        ),
        "gpt neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**wide)),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
        "falcon": lambda: t.FalconForCausalLM(t.FalconConfig(**small, alibi=True)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**wide, num_key_value_heads=2, sliding_window=4)),
        "electra": lambda: t.ElectraForMaskedLM(t.ElectraConfig(**wide, embedding_size=32)),
        "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**wide, max_position_embeddings=32)),
        "bart": lambda: t.BartForConditionalGeneration(
            t.BartConfig(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_position_embeddings=32,
            )
        ),
    }


def trained_quietly(build: Callable[[], Any], side: str, mode: Any) -> None:
    """Three steps on padded batches: no alarm, no warning, no failure of our own."""
    torch.manual_seed(0)
    engine = TinyEngine(build().train())
    hits: list[FirstBad] = []
    with attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found)) as detector:
        for _ in range(3):
            tokens = torch.randint(2, 64, (3, 10))
            mask = torch.ones(3, 10, dtype=torch.long)
            mask[0, slice(0, 4) if side == "left" else slice(6, 10)] = 0
            labels = tokens.masked_fill(mask == 0, -100)
            engine.backward(engine(input_ids=tokens, attention_mask=mask, labels=labels).loss)
            engine.step()
    assert hits == []
    assert (detector.problems, detector.warnings) == ([], [])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("side", "mode"), [("left", "frames"), ("right", "frames"), ("left", "sentinel")])
def test_padded_batches_of_a_healthy_model_are_silent(name: str, side: str, mode: str) -> None:
    trained_quietly(MODELS[name], side, mode)


@pytest.mark.full
@pytest.mark.parametrize("name", more_models())
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["frames", "sentinel", "auto"])
def test_more_healthy_models_are_silent(name: str, side: str, mode: str) -> None:
    trained_quietly(more_models()[name], side, mode)


def test_a_value_inside_a_model_output_is_seen() -> None:
    model = llama().train()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 2] = float("inf")
    engine = TinyEngine(model)
    hits: list[tuple[FirstBad, str]] = []
    with attach(engine, mode="frames", on_first_bad=lambda found, report, _: hits.append((found, report))):
        tokens = torch.randint(2, 64, (2, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    found, report = hits[0]
    assert (found.phase, found.module, found.tensor) == ("parameter", "model.layers.1.mlp.down_proj", "weight")
    assert report.count("LlamaRMSNorm") >= 2, "the calls before are listed"


def test_all_labels_ignored_inside_the_model() -> None:
    engine = TinyEngine(gpt2().train())
    hits: list[FirstBad] = []
    with attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)) as detector:
        tokens = torch.randint(2, 64, (2, 8))
        engine.backward(engine(input_ids=tokens, labels=torch.full_like(tokens, -100)).loss)
    assert (hits[0].phase, hits[0].module, hits[0].tensor) == ("forward", "", "output[loss]")
    assert (hits[0].op, hits[0].cause) == ("aten.nll_loss_forward", "ignored-labels")
    assert detector.problems == []

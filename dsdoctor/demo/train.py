"""Train a small T5-style encoder to undo a shuffled vocabulary, with DeepSpeed.

Large pre-trained T5 models have outlier features: for some tokens the gated feed-forward block of one layer produces
activations beyond 65504, the largest number of fp16, while bf16 and fp32 hold them easily. A model this small has no
such features, so `plant_outlier` gives the second block one, and the rare token that excites it turns up in the third
step. Everything else is as in any training script.
"""

import argparse
import math

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 48
RARE = VOCABULARY - 1
LENGTH = 24
WIDTH = 32


class Sentences(Dataset):
    """Random token sequences; the target of each token is its place in a fixed permutation."""

    def __init__(self, count=512, rare_from=8):
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, RARE, (count, LENGTH), generator=generator)
        self.tokens[rare_from:, 5] = RARE
        self.answer = torch.randperm(VOCABULARY, generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.answer[self.tokens[index]]


class T5LayerNorm(nn.Module):
    """Root mean square norm without a bias, computed in fp32 as T5 does."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        variance = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden.float() * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class SelfAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.relative_attention_bias = nn.Embedding(2 * LENGTH, heads)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        q, k, v = (
            part(hidden).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        places = torch.arange(length, device=hidden.device)
        bias = self.relative_attention_bias(places[None, :] - places[:, None] + LENGTH).permute(2, 0, 1)
        weights = torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).float(), -1).to(v.dtype)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))


class LayerSelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.SelfAttention = SelfAttention(width)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, hidden):
        return hidden + self.SelfAttention(self.layer_norm(hidden))


class DenseGatedGelu(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.wi_0 = nn.Linear(width, inner, bias=False)
        self.wi_1 = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden):
        return self.wo(self.act(self.wi_0(hidden)) * self.wi_1(hidden))


class LayerFF(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.DenseReluDense = DenseGatedGelu(width, 2 * width)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, hidden):
        return hidden + self.DenseReluDense(self.layer_norm(hidden))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.ModuleList([LayerSelfAttention(width), LayerFF(width)])

    def forward(self, hidden):
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class Encoder(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.ModuleList([Block(WIDTH) for _ in range(blocks)])
        self.final_layer_norm = T5LayerNorm(WIDTH)

    def forward(self, tokens):
        hidden = self.embed_tokens(tokens)
        for block in self.block:
            hidden = block(hidden)
        return self.final_layer_norm(hidden)


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, labels):
        logits = self.lm_head(self.encoder(tokens)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def plant_outlier(encoder, block=1, unit=3, gain=35.0):
    """Make one inner unit of a block's feed-forward answer strongly to the rare token, and to it alone.

    The rare token's embedding gets a direction of its own, which no other embedding uses.
    """
    encoder.embed_tokens.weight[:, 0] = 0
    encoder.embed_tokens.weight[RARE] = 0
    encoder.embed_tokens.weight[RARE, 0] = 4.0
    dense = encoder.block[block].layer[1].DenseReluDense
    for weight in (dense.wi_0.weight, dense.wi_1.weight):
        weight[unit] = 0
        weight[unit, 0] = gain
    dense.wo.weight[:, unit] = torch.linspace(0.5, 3.5, WIDTH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deepspeed_config", default="ds_config_fp16.json")
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = TokenModel()
    plant_outlier(model.encoder)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    for step, (tokens, labels) in enumerate(loader):
        if step == args.steps:
            break
        loss = engine(tokens.to(engine.device), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()

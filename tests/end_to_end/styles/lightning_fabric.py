"""A training loop of one's own under Lightning's Fabric, which steps DeepSpeed's optimizer, not its engine."""

import lightning as L
import torch
from torch import nn


def main():
    fabric = L.Fabric(accelerator="auto", devices=2, strategy="deepspeed", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for step in range(40):
        x = torch.randn(4, 16)
        loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

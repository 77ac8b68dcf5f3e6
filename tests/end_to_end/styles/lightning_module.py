"""A LightningModule with the DeepSpeed strategy; batches are random, as in Lightning's boring model."""

import argparse

import lightning as L
import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum(0, keepdim=True)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="deepspeed_stage_2")
    parser.add_argument("--config")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="bf16-mixed")
    args = parser.parse_args()
    L.seed_everything(1)
    strategy = args.strategy
    if args.config:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        strategy = DeepSpeedStrategy(config=args.config)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=2,
        strategy=strategy,
        precision=args.precision,
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regressor(), torch.utils.data.DataLoader(Rows(), batch_size=4))


if __name__ == "__main__":
    main()

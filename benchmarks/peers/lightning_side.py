"""Script for Lightning that follows its documentation.

The script uses `ModelCheckpoint(every_n_train_steps)`, `ckpt_path="last"`, torchmetrics and `accumulate_grad_batches`.
The position in an epoch is restored by torchdata's `StatefulDataLoader`, or with --plain-loader not at all.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, SumMetric

from benchmarks.peers.peer_commands import peer_settings, write_results
from benchmarks.peers.tagging import (
    IGNORED,
    Settings,
    as_they_are,
    eval_data,
    loss_of,
    new_model,
    new_optimizer,
    train_data,
)
from benchmarks.peers.watch import Watch

PRECISIONS = {"float32": "32-true", "float64": "64-true"}


class LitTagger(lightning.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.model = new_model(settings)
        self.watch = Watch()
        self.loss, self.accuracy, self.num_samples = MeanMetric(), MeanMetric(), SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.watch.seen(batch["index"], self.model)
        loss = loss_of(self.model(batch["tokens"]), batch["tags"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        scores, tags = self.model(batch["tokens"]), batch["tags"]
        counted = tags != IGNORED
        self.loss.update(loss_of(scores, tags, "none")[counted])
        self.accuracy.update((scores.argmax(2) == tags)[counted].to(scores.dtype))
        self.num_samples.update(len(tags))
        self.log_dict({"loss": self.loss, "accuracy": self.accuracy, "num_samples": self.num_samples}, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimizer(self.settings, self.model.parameters())


def main() -> None:
    settings, save_dir, asked = peer_settings(__doc__, "plain_loader")
    lightning.seed_everything(0, workers=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=settings.world,
        strategy="ddp" if settings.world > 1 else "auto",
        precision=PRECISIONS[settings.dtype],
        max_epochs=settings.epochs,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.max_grad_norm or None,
        callbacks=[ModelCheckpoint(save_dir, every_n_train_steps=settings.save_every or None, save_last=True)],
        limit_val_batches=0,
        default_root_dir=save_dir,
        enable_progress_bar=sys.stdout.isatty(),
    )
    loader = DataLoader if asked["plain_loader"] else StatefulDataLoader
    train = loader(train_data(settings), settings.micro_batch, shuffle=True, collate_fn=as_they_are)
    model = LitTagger(settings)
    trainer.fit(model, train, ckpt_path="last")
    weights = model.model.state_dict()

    trainer.limit_val_batches = 1.0
    held_out = DataLoader(eval_data(settings), settings.micro_batch, collate_fn=as_they_are)
    (metrics,) = trainer.validate(model, held_out)
    if trainer.is_global_zero:
        write_results(save_dir, weights, metrics)


if __name__ == "__main__":
    main()

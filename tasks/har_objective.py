"""Loss and evaluation of activity recognition, and loading of trained encoders."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.har.windows import HarDataset
from models.har.harnet import HarNet
from models.layers.ensemble import log_mean_probabilities
from models.layers.standardised import Standardised
from trainer.checkpoint.file import read_checkpoint
from trainer.common.errors import UserError
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys
from trainer.task import Objective, Sums

ENCODING_BATCH_SIZE = 256


class HarObjective(Objective):
    """Computes label-smoothed cross-entropy in training, and cross-entropy and a confusion matrix in evaluation."""

    model: Standardised

    def __init__(self, model: Standardised, label_smoothing: float) -> None:
        super().__init__(model)
        self.label_smoothing = label_smoothing

    def member_logits(self, batch: Batch) -> Tensor:
        """Returns logits (B, num_members, C), from "features" if the batch has them, otherwise from "signals"."""
        network = self.model.network
        if not isinstance(network, HarNet):
            return self.model(batch["signals"]).unsqueeze(1)
        return network.member_logits(
            batch["features"] if "features" in batch else features_of(self.model, batch["signals"])
        )

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        member_logits, label = self.member_logits(batch), batch["label"]
        logits = log_mean_probabilities(member_logits.detach())
        if not self.training:
            return evaluation_sums(logits, label)
        num_members = member_logits.shape[1]
        losses = F.cross_entropy(
            member_logits.flatten(0, 1),
            label.repeat_interleave(num_members),
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return {"loss": losses / num_members, "correct": (logits.argmax(dim=1) == label).sum()}


class HarEnsembleObjective(Objective):
    """Evaluates the averaged predictions of several trained models."""

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return evaluation_sums(self.model(batch["signals"]), batch["label"])


def evaluation_sums(logits: Tensor, label: Tensor) -> Sums:
    """Returns the summed cross-entropy and a confusion matrix (C, C), indexed by [true class, predicted class]."""
    num_classes = logits.shape[1]
    pairs = F.one_hot(label * num_classes + logits.argmax(dim=1), num_classes**2).sum(dim=0)
    loss = F.cross_entropy(logits, label, reduction="sum")
    return {"loss": loss, "confusion": pairs.view(num_classes, num_classes)}


def harnet_of(model: Standardised) -> HarNet:
    """Returns the model's network, which must be a HarNet."""
    assert isinstance(model.network, HarNet)
    return model.network


def load_encoder(model: Standardised, path: Path) -> None:
    """Loads a trained encoder from a file, and the input mean and standard deviation if the file contains them.

    path: a run's checkpoint, or a file that contains {"model": state dict of a HarNet or of its encoder}.

    Raises UserError if the file contains no encoder, or if the shapes of its tensors differ from the model's.
    """
    label = f"--encoder-path {path}"
    weights = read_checkpoint(path, label, only_weights=True)["model"]
    encoder = harnet_of(model).encoder
    expected = encoder.state_dict()
    prefixes = [p for p in ("network.encoder.", "encoder.", "") if all(p + name in weights for name in expected)]
    if not prefixes:
        raise UserError(f"{label}: contains no harnet encoder; give the checkpoint of a run with --model harnet")
    found = {name: weights[prefixes[0] + name] for name in expected}
    for name, value in found.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{label}: {name} has shape {tuple(value.shape)}, but this model expects shape "
                f"{tuple(expected[name].shape)}; give the --mode with which the encoder was trained"
            )
    encoder.load_state_dict(found)
    if "mean" in weights and "std" in weights:
        model.load_state_dict({"mean": weights["mean"], "std": weights["std"]}, strict=False)


def features_of(model: Standardised, signals: Tensor) -> Tensor:
    """Returns the encoder's features (B, num_members, F) of signals in physical units."""
    return harnet_of(model).features(model.standardise(signals))


@torch.no_grad()
def encode(model: Standardised, dataset: HarDataset) -> np.ndarray:
    """Returns the encoder's features of all windows, (N, num_members, F) float32.

    model: must be in eval mode and on the CPU.
    """
    parts = []
    for start in range(0, len(dataset), ENCODING_BATCH_SIZE):
        index = np.arange(start, min(start + ENCODING_BATCH_SIZE, len(dataset)))
        signals = dataset.__getitems__(SampleKeys(index, epoch=0))["signals"]
        parts.append(features_of(model, torch.from_numpy(signals)))
    return torch.cat(parts).numpy()


def refuse_other_encoder(model: Standardised, encoding: Standardised) -> None:
    """Raises UserError if `model` and `encoding`, the model that computed the features, have different encoders."""
    own, expected = (_encoding_weights(each) for each in (model, encoding))
    # statistics computed on another machine may differ in the last digits
    if not all(torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6) for name, value in own.items()):
        raise UserError(
            "--encoder-path: is not the encoder with which this run started; give the original file, or start "
            "over with --fresh"
        )


def _encoding_weights(model: Standardised) -> dict[str, Tensor]:
    """Returns every parameter and buffer that affects the encoder's features, as float32 on the CPU."""
    encoder = harnet_of(model).encoder
    weights = dict([*encoder.named_parameters(), *encoder.named_buffers(), ("mean", model.mean), ("std", model.std)])
    return {name: value.detach().to("cpu", torch.float32) for name, value in weights.items()}

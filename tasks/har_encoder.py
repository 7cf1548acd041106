"""A trained encoder in a new network: `--encoder-path`, and the features of a frozen one."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.har.windows import HarDataset
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from trainer.checkpoint.file import read_checkpoint
from trainer.common.errors import UserError
from trainer.loading.order import SampleKeys

ENCODING_BATCH_SIZE = 256


def harnet_of(model: Standardised) -> HarNet:
    """The network that the flags of the encoder belong to."""
    assert isinstance(model.network, HarNet)
    return model.network


def load_encoder(model: Standardised, path: Path) -> None:
    """Takes over a trained encoder, and with it the statistics that it standardises by, where the file has them.

    path: a checkpoint of a run, or {"model": the state dict of a HarNet or of its encoder}.

    Raises UserError when the file holds no encoder of this shape.
    """
    label = f"--encoder-path {path}"
    weights = read_checkpoint(path, label, only_weights=True)["model"]
    encoder = harnet_of(model).encoder
    expected = encoder.state_dict()
    prefixes = [p for p in ("network.encoder.", "encoder.", "") if all(p + name in weights for name in expected)]
    if not prefixes:
        raise UserError(f"{label}: holds no encoder of harnet; give the checkpoint of a run with --model harnet")
    found = {name: weights[prefixes[0] + name] for name in expected}
    for name, value in found.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{label}: its {name} has shape {tuple(value.shape)}, not {tuple(expected[name].shape)}; give the "
                "--mode that it was trained with"
            )
    encoder.load_state_dict(found)
    if "mean" in weights and "std" in weights:
        model.load_state_dict({"mean": weights["mean"], "std": weights["std"]}, strict=False)


def features_of(model: Standardised, signals: Tensor) -> Tensor:
    """What the heads of a HarNet see of windows in physical units: (B, num_members, F)."""
    return harnet_of(model).features(model.standardise(signals))


@torch.no_grad()
def encode(model: Standardised, dataset: HarDataset) -> np.ndarray:
    """The features of all windows, (N, num_members, F) float32. model: in eval mode, on the CPU."""
    parts = []
    for start in range(0, len(dataset), ENCODING_BATCH_SIZE):
        index = np.arange(start, min(start + ENCODING_BATCH_SIZE, len(dataset)))
        signals = dataset.__getitems__(SampleKeys(index, epoch=0))["signals"]
        parts.append(features_of(model, torch.from_numpy(signals)))
    return torch.cat(parts).numpy()


def refuse_other_encoder(model: Standardised, encoding: Standardised) -> None:
    """Raises UserError where a checkpoint has brought another encoder than `encoding`, which made the features."""
    own, expected = (_encoding_weights(each) for each in (model, encoding))
    # Statistics that another machine has computed anew may differ in their last digits.
    if not all(torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6) for name, value in own.items()):
        raise UserError(
            "--encoder-path: is not the encoder that this run began with; give it that file again, or start over with "
            "--fresh"
        )


def _encoding_weights(model: Standardised) -> dict[str, Tensor]:
    """All that features depend on, float32 on the CPU."""
    encoder = harnet_of(model).encoder
    weights = dict([*encoder.named_parameters(), *encoder.named_buffers(), ("mean", model.mean), ("std", model.std)])
    return {name: value.detach().to("cpu", torch.float32) for name, value in weights.items()}

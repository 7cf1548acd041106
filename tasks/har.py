"""Human activity recognition: what people do, from signals of sensors that they wear."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from data.har.augmentation import Augmentation
from data.har.clocks import is_same_rate, usual_rate_hz
from data.har.own_recordings import OwnRecordings, are_own, load_own_recordings, refuse_other_data
from data.har.recording import NewWindows, doubt_about_units, read_new_windows
from data.har.synthetic import load_synthetic_har
from data.har.uci_har import download_uci_har, is_uci_har, load_uci_har
from data.har.windows import (
    FeaturedDataset,
    HarDataset,
    HarRecordings,
    WindowFormat,
    named_subjects,
    rotated_subjects,
    split_by_subject,
    subject_folds,
    training_subjects,
    with_test_subjects,
)
from models.har.deepconvlstm import DeepConvLstm
from models.har.harnet import HarNet
from models.har.tinyhar import TinyHar
from models.layers.ensemble import Ensemble, log_mean_probabilities
from models.layers.standardised import Standardised
from tasks.confusion_matrix import draw_confusion_matrix
from tasks.har_encoder import encode, features_of, load_encoder, refuse_other_encoder
from tasks.har_flags import OF_OWN, HarFlags
from tasks.har_pictures import draw_windows, panels_of
from trainer.common.errors import UserError
from trainer.common.process import to_stderr, to_stdout
from trainer.config import given_flags
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.cache import digest_of
from trainer.task import Exported, Objective, Picture, Sums, Task

_MOST_VAL_SUBJECTS = 4
_MOST_SHOWN = 30
"""Classes, and people, that a line names."""


class HarObjective(Objective):
    """Cross-entropy; in evaluation without label smoothing, and with the confusion matrix.

    In training the mean of the losses of a HarNet's members, each on its own; in evaluation that of their answer.
    """

    model: Standardised

    def __init__(self, model: Standardised, label_smoothing: float) -> None:
        super().__init__(model)
        self.label_smoothing = label_smoothing

    def member_logits(self, batch: Batch) -> Tensor:
        """(B, num_members, C), from the signals, or from features of the frozen encoder where the batch brings them."""
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
    """The mean of trained models' predictions; for evaluation alone."""

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return evaluation_sums(self.model(batch["signals"]), batch["label"])


def evaluation_sums(logits: Tensor, label: Tensor) -> Sums:
    """Plain cross-entropy, and how often which class (rows) was taken for which (columns)."""
    num_classes = logits.shape[1]
    pairs = F.one_hot(label * num_classes + logits.argmax(dim=1), num_classes**2).sum(dim=0)
    loss = F.cross_entropy(logits, label, reduction="sum")
    return {"loss": loss, "confusion": pairs.view(num_classes, num_classes)}


def show_download(address: str, num_bytes: int | None, file: IO[bytes]) -> AbstractContextManager[Any]:
    """Says what is fetched, and shows a bar on a terminal while the file is written."""
    to_stdout(f"Downloading {address}" + ("" if num_bytes is None else f", {num_bytes / 1e6:.1f} MB"))
    return tqdm.wrapattr(
        file, "write", total=num_bytes, unit="B", unit_scale=True, leave=False, dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _seconds(times_s: list[float | None], later_s: float, rate_hz: float) -> list[str]:
    """Times as the table shows them; empty where they are not known."""
    digits = max(2, math.ceil(math.log10(rate_hz)))
    return ["" if time_s is None else f"{time_s + later_s:.{digits}f}" for time_s in times_s]


def _counts(recordings: HarRecordings) -> list[str]:
    """How many windows there are of each class, and of each person."""
    labels, subjects = np.bincount(recordings.labels), np.bincount(recordings.subjects)
    counted = {
        "Classes": [f"{name}: {count:,}" for name, count in zip(recordings.classes, labels, strict=True)],
        "People": [f"{name}: {count:,}" for name, count in zip(recordings.subject_names, subjects, strict=True)],
    }
    return [
        f"{what} ({len(each)}, windows of each): {', '.join(each[:_MOST_SHOWN])}"
        + (f", and {len(each) - _MOST_SHOWN} more." if len(each) > _MOST_SHOWN else ".")
        for what, each in counted.items()
    ]


def _four_digits(probabilities: Tensor) -> list[str]:
    return [f"{p:.4f}" for p in probabilities.tolist()]


class HarTask(Task):
    """Activities of people, split by subject; selected on validation accuracy."""

    Config = HarFlags
    monitor = ("val/accuracy", "max")
    defaults = {"epochs": 12}
    hold_out_flags = ("num_val_subjects", "val_subjects", "refit")
    headline = ("loss", "accuracy", "macro_f1")
    _new: NewWindows | None = None
    """Windows that `new_data` has read."""
    _has_doubted = False

    def splits(self) -> Mapping[str, KeyedDataset]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, KeyedDataset]:
        encoding = self._encoding
        if encoding is None:
            return self._windows
        return {name: FeaturedDataset(dataset, encode(encoding, dataset)) for name, dataset in self._windows.items()}

    @cached_property
    def _encoding(self) -> Standardised | None:
        """The model whose frozen encoder makes the features of all windows; None where they are not made beforehand."""
        config: HarFlags = self.config
        if not config.no_augmentation or not config.freeze_encoder:
            return None
        objective = self.build_objective()
        self.initialise(objective)
        return objective.eval().model

    @cached_property
    def _windows(self) -> Mapping[str, HarDataset]:
        config: HarFlags = self.config
        if config.refit:
            val_subjects = []
        elif config.val_subjects is not None:
            val_subjects = named_subjects(self._recordings, config.val_subjects)
        else:
            val_subjects = rotated_subjects(self._recordings, self.seed, config.num_val_subjects or self._usual_num_val)
        strengths = Augmentation(config.rotation_deg, config.scale_std, config.tempo_spread, config.jitter_std)
        augmentation = None if config.no_augmentation else strengths
        return split_by_subject(self._recordings, self.seed, val_subjects, augmentation)

    @property
    def _usual_num_val(self) -> int:
        if not self._has_own:
            return _MOST_VAL_SUBJECTS
        return min(_MOST_VAL_SUBJECTS, max(1, len(training_subjects(self._recordings)) // 5))

    @property
    def _has_own(self) -> bool:
        """Whether the recordings are, or were in training, a user's own."""
        if self.data_facts is not None:
            return "channels" in self.data_facts
        path = self.config.data_dir
        return path is not None and not self.config.download and are_own(path)

    @cached_property
    def _own(self) -> OwnRecordings:
        return load_own_recordings(self.config.data_dir, self.cache_dir, self.config.own_format)

    @cached_property
    def _recordings(self) -> HarRecordings:
        config: HarFlags = self.config
        if self._has_own:
            return with_test_subjects(self._own.recordings, config.test_subjects)
        path = config.data_dir
        if path is not None and not config.download and not is_uci_har(path):
            refuse_other_data(path)
        if given := given_flags(config, OF_OWN):
            advice = "give them by --data-dir" if path is None else f"--data-dir {path} is read as UCI HAR"
            raise UserError(f"{', '.join(given)}: for recordings of your own alone; {advice}")
        if config.download:
            path = path or self.cache_dir / "uci_har"
            download_uci_har(path, self.cache_dir, show_download)
        return load_synthetic_har(self.cache_dir) if path is None else load_uci_har(path, self.cache_dir)

    @cached_property
    def format(self) -> WindowFormat:
        """Of the windows of training, also where a trained model is used without them."""
        config: HarFlags = self.config
        if not self._has_own:
            return WindowFormat()
        own = self.data_facts or self._facts_of_own
        length, hop = config.window_and_hop
        rate_hz = config.rate or own.get("rate_hz", WindowFormat.rate_hz)
        return WindowFormat(tuple(own["channels"]), tuple(own["classes"]), length, hop, rate_hz)

    def describe_data(self) -> Mapping[str, Any]:
        """Channels and classes of a user's own recordings, and their rate where it is told by a clock alone."""
        if not self._has_own:
            return {}
        return self.data_facts or self._facts_of_own

    @cached_property
    def _facts_of_own(self) -> Mapping[str, Any]:
        recordings, told_hz = self._recordings, self._own.rate_hz
        facts: dict[str, Any] = {"channels": list(recordings.channels), "classes": list(recordings.classes)}
        # Not the usual rate: a resume needs equal facts, and older runs have no fact of a rate.
        if self.config.rate is None and told_hz is not None and not is_same_rate(told_hz, WindowFormat.rate_hz):
            facts["rate_hz"] = usual_rate_hz(told_hz)
        return facts

    def data_digest(self) -> str:
        """Digest of a user's own recordings, or of the published activities, and of who is held out."""
        parts = self._windows.values()
        if not self._has_own:
            return digest_of(*(array for part in parts for array in (part.rows, part.labels)))
        return digest_of(self._own.digest, *(part.rows for part in parts))

    def remarks(self) -> Sequence[str]:
        """On how a user's own recordings were read, or others that are to be labelled."""
        if self._new is not None:
            return self._new.remarks
        if not self._has_own or self.data_facts is not None:
            return ()
        recordings = self._recordings
        tested = sorted({recordings.name_of(subject) for subject in recordings.subjects[recordings.is_test].tolist()})
        found = [*self._own.remarks, *_counts(recordings), f"Held out for the test: {', '.join(tested)}."]
        found += self._doubts_about_rate()
        shown = set(self._windows["train"].labels.tolist())
        unseen = [name for label, name in enumerate(recordings.classes) if label not in shown]
        if unseen:
            names = ", ".join(unseen)
            found.append(f"Nobody trained on does {names}: hold out others, by --test-subjects or --val-subjects.")
        return found

    def _doubts_about_rate(self) -> list[str]:
        told_hz, rate_hz = self._own.rate_hz, self.format.rate_hz
        if told_hz is None or is_same_rate(told_hz, rate_hz):
            return []
        return [
            f"Warning: the clock shows {told_hz:.4g} rows a second, but --rate says {rate_hz:g}: times in the table "
            "of --predict depend on it; without --rate the clock counts."
        ]

    def build_objective(self) -> HarObjective:
        config: HarFlags = self.config
        network: nn.Module
        size = len(self.format.channels), len(self.format.classes)
        if config.model == "tinyhar":
            network = TinyHar(*size, config.dropout)
        elif config.model == "deepconvlstm":
            network = DeepConvLstm(*size, config.dropout)
        else:
            network = HarNet(config.mode, *size, config.hidden_dims, config.dropout, num_members=config.num_members)
            if config.freeze_encoder:
                network.freeze_encoder()
        return HarObjective(Standardised(network, size[0]), config.label_smoothing)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Those of the network; see `blocks` of each."""
        network = model.get_submodule("network")
        assert isinstance(network, HarNet | TinyHar | DeepConvLstm)
        return network.blocks

    def initialise(self, objective: Objective) -> None:
        """The statistics of the windows that are trained on, and the encoder of `--encoder-path`."""
        assert isinstance(objective, HarObjective)
        objective.model.set_statistics(*self._windows["train"].statistics)
        if self.config.encoder_path is not None:
            load_encoder(objective.model, self.config.encoder_path)

    def check_weights(self, objective: Objective) -> None:
        """The encoder must be the one that made the features."""
        assert isinstance(objective, HarObjective)
        if self._encoding is not None:
            refuse_other_encoder(objective.model, self._encoding)

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """`--val-subjects` with the people of each fold."""
        return [["--val-subjects", *fold] for fold in subject_folds(self._recordings, num_folds)]

    def ensemble(self, objectives: Sequence[Objective]) -> HarEnsembleObjective:
        return HarEnsembleObjective(Ensemble([objective.model for objective in objectives]))

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Loss and accuracy; in evaluation also macro-F1, the unweighted mean of the classes' F1, and each recall.

        A class that does not occur has no recall.
        """
        weight = sums["weight"]
        if "confusion" not in sums:
            return {"loss": float(sums["loss"] / weight), "accuracy": float(sums["correct"] / weight)}
        confusion = sums["confusion"]
        hits = confusion.diagonal()
        # A class that neither occurs nor is predicted has no F1, and does not count, as in scikit-learn.
        occurs = confusion.sum(0) + confusion.sum(1)
        f1 = (2 * hits / occurs)[occurs > 0]
        return {
            "loss": float(sums["loss"] / weight),
            "accuracy": float(hits.sum() / weight),
            "macro_f1": float(f1.mean()),
            **{
                f"recall/{name}": float(hit / count)
                for name, hit, count in zip(self.format.classes, hits, confusion.sum(1), strict=True)
                if count > 0
            },
        }

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """The confusion matrix: rows are the true classes, columns the predicted ones."""
        return {"classes": list(self.format.classes), "confusion_matrix": sums["confusion"].to(torch.int64).tolist()}

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        return {"confusion_matrix": draw_confusion_matrix(sums["confusion"], self.format.classes)}

    def new_data(self, path: Path) -> KeyedDataset:
        """See `data.har.recording.read_new_windows`."""
        config: HarFlags = self.config
        self._new = read_new_windows(path, self.format, config.subject_column, config.label_column)
        return self._new

    def _doubt_units(self, model: Standardised) -> None:
        """Says once, on standard error, where new numbers are not of the size of those that were trained on."""
        if self._new is not None and not self._has_doubted:
            self._has_doubted = True
            mean, std = (statistic.flatten().double().cpu().numpy() for statistic in (model.mean, model.std))
            if doubt := doubt_about_units(self._new, self.format.channels, mean, std):
                to_stderr(f"Warning: {self._new.where}: {doubt}.")

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Each window's place in its recording, activity and probabilities, rounded as a table wants it.

        Start and end are in seconds, and empty where the windows came without their recording.
        """
        assert isinstance(objective, HarObjective)
        self._doubt_units(objective.model)
        probabilities = objective.model(batch["signals"]).double().softmax(dim=1).cpu()
        confidence, predicted = probabilities.max(dim=1)
        index, window, new = batch["index"].tolist(), self.format, self._new
        start_s: list[float | None] = [None] * len(index)
        if new is not None and new.start_s is not None:
            start_s = new.start_s[index].tolist()
        return {
            "window": index,
            "start_s": _seconds(start_s, 0.0, window.rate_hz),
            "end_s": _seconds(start_s, (new and new.duration_s) or 0.0, window.rate_hz),
            "activity": [window.classes[i] for i in predicted],
            "confidence": _four_digits(confidence),
            **{name: _four_digits(column) for name, column in zip(window.classes, probabilities.T, strict=True)},
        }

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Signals in physical units to log-probabilities; HarNet takes windows of any length."""
        assert isinstance(objective, HarObjective)
        model, signals = objective.model, batch["signals"]
        lengths = {"x": (2,)} if isinstance(model.network, HarNet) else {}
        return Exported(model, {"x": signals}, model(signals), lengths)

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Windows in standard deviations of each channel, with the prediction."""
        assert isinstance(objective, HarObjective)
        confidence, predicted = objective.model(batch["signals"]).float().softmax(dim=1).max(dim=1)
        classes = self.format.classes
        return {
            "windows": draw_windows(
                objective.model.standardise(batch["signals"]),
                panels_of(self.format.channels),
                predicted=[classes[i] for i in predicted],
                confidence=confidence,
                true=[classes[i] for i in batch["label"]],
            )
        }

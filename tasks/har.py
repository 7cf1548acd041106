"""Human activity recognition from signals of wearable sensors."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.har.augmentation import Augmentation
from data.har.clocks import is_same_rate, usual_rate_hz
from data.har.own_recordings import OwnFormat, OwnRecordings, are_own, load_own_recordings, refuse_other_data
from data.har.recording import NewWindows, doubt_about_units, read_new_windows
from data.har.synthetic import VERSION, load_synthetic_har
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
from data.table_files import ENCODING, OnBad, Reading
from models.har.deepconvlstm import DeepConvLstm
from models.har.harnet import HarNet, Mode
from models.har.tinyhar import TinyHar
from models.layers.ensemble import Ensemble
from models.layers.standardised import Standardised
from models.simple.linear import ridge_classifier, window_statistics
from tasks.har_objective import HarEnsembleObjective, HarObjective, encode, load_encoder, refuse_other_encoder
from tasks.har_pictures import draw_windows, panels_of
from tasks.pictures import draw_confusion_matrix
from trainer.common.errors import UserError
from trainer.common.process import to_stderr, to_stdout
from trainer.config import FlagGroup, flag, given_flags
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.cache import cached_numbers, digest_of, key_of
from trainer.task import Baseline, Exported, Objective, Picture, Task

_OF_OWN = ("subject_column", "label_column", "channels", "encoding", "on_bad", "rate", "window", "hop", "test_subjects")
"""Flags that apply only to the user's own recordings."""
_SHORTEST_OF_LSTM = 17
_OF_HARNET = {"model": ("harnet",)}
_MOST_VAL_SUBJECTS = 4
_MOST_SHOWN = 30
"""Maximum number of classes or people to list on one line."""


@dataclass
class HarFlags(FlagGroup):
    """Task: human activity recognition (--task har)

    --predict takes the CSV file of one recording, whose header names the channels that
    the model was trained on, or a .npy array of windows (N, channels, rows). A recording
    is cut into windows as in training; an incomplete window at its end is dropped.
    UCI HAR has nine channels at 50 Hz and windows of 128 rows.
    """

    data_dir: Path | None = flag(
        None, "UCI HAR or your recordings; UCI HAR: its folder, the published zip, or a folder that contains one of "
        "these; your recordings: a CSV file with subject, label and channel columns, or a folder of such files "
        "(default: generated recordings; no download)", common=True, local=True,
    )  # fmt: skip
    download: bool = flag(
        False, "download UCI HAR (61 MB) and train on it; --data-dir names the zip, or the folder for it (default: a "
        "folder in --cache-dir); an earlier download is reused", common=True,
    )  # fmt: skip
    subject_column: str | None = flag(
        None, "with your recordings: subject column (default: recognised by its name)", metavar="COLUMN"
    )
    label_column: str | None = flag(
        None, "with your recordings: activity column (default: recognised by its name)", metavar="COLUMN"
    )
    channels: tuple[str, ...] | None = flag(
        None, "with your recordings: columns to use as channels (default: all columns of numbers, except subject, "
        "label, trial, time, row number, location and device)", metavar="COLUMN",
    )  # fmt: skip
    encoding: str | None = flag(None, f"with your recordings: {ENCODING}", metavar="NAME")
    on_bad: OnBad = flag(
        "refuse", "your recordings and --predict: what to do with a row that lacks a channel's value; refuse: stop "
        "with an error; drop: drop the row and split the recording there; interpolate: fill gaps of up to 25 rows, "
        "and drop longer gaps",
    )  # fmt: skip
    rate: float | None = flag(
        None, "with your recordings: sampling rate in rows per second (default: from a time column, otherwise 50)",
        metavar="HZ", above=0,
    )  # fmt: skip
    window: int | None = flag(None, "with your recordings: rows per window (default: 128)", metavar="ROWS", at_least=8)
    hop: int | None = flag(
        None, "with your recordings: rows from the start of one window to the next (default: half of --window)",
        metavar="ROWS", at_least=1,
    )  # fmt: skip
    test_subjects: tuple[str, ...] | None = flag(
        None, "with your recordings: subjects of the test set (default: every fifth subject)", metavar="ID"
    )
    num_val_subjects: int | None = flag(
        None, "number of training subjects to hold out for validation; --seed chooses them (default: 4; for your "
        "recordings, a fifth of the training subjects, but at most 4)", metavar="N", at_least=1,
        excludes=("refit", "val_subjects"),
    )  # fmt: skip
    val_subjects: tuple[str, ...] | None = flag(
        None,
        "subjects to hold out for validation; use it instead of --num-val-subjects",
        metavar="ID",
        excludes=("refit",),
    )
    refit: bool = flag(
        False, "train on all training subjects, without validation, and score the last weights on the test set",
        common=True,
    )  # fmt: skip
    no_augmentation: bool = flag(False, "train on windows as recorded, without random augmentation")
    rotation_deg: float = flag(
        45.0, "augmentation: maximum angle by which all sensors of a window are rotated about one random axis",
        metavar="DEGREES", at_least=0, at_most=180,
    )  # fmt: skip
    scale_std: float = flag(
        0.1, "augmentation: multiply each channel by a random factor of mean 1 and this standard deviation", at_least=0
    )
    tempo_spread: float = flag(
        0.15, "augmentation: change the speed of a window by up to this fraction", at_least=0, below=1
    )
    jitter_std: float = flag(
        0.0, "augmentation: standard deviation of added white noise, relative to the channel's standard deviation",
        at_least=0,
    )  # fmt: skip
    model: Literal["harnet", "tinyhar", "deepconvlstm"] = flag(
        "harnet", "network; harnet: small convolutional network of this project; tinyhar: Zhou et al., 2022, with "
        "batch norm (see --sync-bn); deepconvlstm: Ordonez and Roggen, 2016, slow on a CPU", common=True,
    )  # fmt: skip
    mode: Mode = flag(
        "early", "harnet: how to combine channels; early: one convolution over all channels (most accurate); flatten: "
        "encode channels separately and concatenate their features; average: encode channels separately and average "
        "their features; first: use only the first channel", needs=_OF_HARNET,
    )  # fmt: skip
    hidden_dims: tuple[int, ...] = flag(
        (128,), "harnet: width of each hidden layer after the encoder", at_least=1, needs=_OF_HARNET
    )
    num_members: int = flag(
        4, "harnet: number of small networks trained in parallel, each on its own loss; their probabilities are "
        "averaged", metavar="N", at_least=1, needs=_OF_HARNET,
    )  # fmt: skip
    dropout: float = flag(
        0.2, "dropout probability after the convolutions; tinyhar and deepconvlstm were published with 0.5", at_least=0,
        below=1,
    )  # fmt: skip
    label_smoothing: float = flag(
        0.1, "label smoothing: share of each training label that is spread over all classes", at_least=0, below=1
    )
    encoder_path: Path | None = flag(
        None, "harnet: initialise the encoder from a run's checkpoint or an encoder's state dict",
        needs=_OF_HARNET,
    )  # fmt: skip
    freeze_encoder: bool = flag(
        False, "freeze the encoder of --encoder-path and train only the head; with --no-augmentation, each window is "
        "encoded only once", needs={"encoder_path": None},
    )  # fmt: skip

    def problems(self) -> list[str]:
        found = []
        if self.data_dir is not None and not self.data_dir.exists() and not self.download:
            advice = "give recordings, or the UCI HAR folder or zip, or add --download to save UCI HAR there"
            found.append(f"--data-dir {self.data_dir}: no such file or folder; {advice}")
        if self.encoder_path is not None and not self.encoder_path.is_file():
            kind = "is not a file" if self.encoder_path.exists() else "does not exist"
            found.append(f"--encoder-path {self.encoder_path}: {kind}; give the checkpoint of a run, such as best.pth")
        if self.model == "deepconvlstm" and (self.window or _SHORTEST_OF_LSTM) < _SHORTEST_OF_LSTM:
            found.append(f"--window {self.window}: must be at least {_SHORTEST_OF_LSTM} for --model deepconvlstm")
        channels = self.channels or ()
        if twice := {name for name in channels if channels.count(name) > 1}:
            found.append(f"--channels: contains {', '.join(sorted(twice))} more than once; name each channel once")
        return found

    @property
    def reading(self) -> Reading:
        return Reading(self.encoding, self.on_bad)

    @property
    def own_format(self) -> OwnFormat:
        """Options for reading the user's own recordings."""
        length, hop = self.window_and_hop
        return OwnFormat(self.subject_column, self.label_column, self.channels, length, hop, self.reading)

    @property
    def window_and_hop(self) -> tuple[int, int]:
        """Window length, and distance between the starts of consecutive windows, in rows (time steps)."""
        length = self.window or WindowFormat.length
        return length, self.hop or max(1, length // 2)


def show_download(address: str, num_bytes: int | None, file: IO[bytes]) -> AbstractContextManager[Any]:
    """Prints the address and size of a download, and shows a progress bar on a terminal."""
    to_stdout(f"Downloading {address}" + ("" if num_bytes is None else f", {num_bytes / 1e6:.1f} MB"))
    return tqdm.wrapattr(
        file, "write", total=num_bytes, unit="B", unit_scale=True, leave=False, dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _seconds(times_s: list[float | None], later_s: float, rate_hz: float) -> list[str]:
    """Adds `later_s` to each time, and formats the results in seconds for the output of --predict; None becomes ""."""
    digits = max(2, math.ceil(math.log10(rate_hz)))
    return ["" if time_s is None else f"{time_s + later_s:.{digits}f}" for time_s in times_s]


def _counts(recordings: HarRecordings) -> list[str]:
    labels, subjects = np.bincount(recordings.labels), np.bincount(recordings.subjects)
    counted = {
        "Classes": [f"{name}: {count:,}" for name, count in zip(recordings.classes, labels, strict=True)],
        "People": [f"{name}: {count:,}" for name, count in zip(recordings.subject_names, subjects, strict=True)],
    }
    return [
        f"{what} ({len(each)}, with numbers of windows): {', '.join(each[:_MOST_SHOWN])}"
        + (f", and {len(each) - _MOST_SHOWN} more." if len(each) > _MOST_SHOWN else ".")
        for what, each in counted.items()
    ]


def _four_digits(probabilities: Tensor) -> list[str]:
    return [f"{p:.4f}" for p in probabilities.tolist()]


_MOST_WINDOWS_OF_RIDGE, _RIDGE_VERSION = 20_000, 1


class HarTask(Task):
    """Task that recognises human activities; each person is in only one of the training, validation and test sets."""

    Config = HarFlags
    monitor = ("val/accuracy", "max")
    defaults = {"epochs": 12}
    examples = (
        "--download --save-dir checkpoints/uci",
        "--save-dir checkpoints/uci --eval-only",
        "--save-dir checkpoints/uci --predict recording.csv --output labels.csv",
    )
    hold_out_flags = ("num_val_subjects", "val_subjects", "refit")
    predict_flags = ("encoding", "on_bad")
    headline = ("loss", "accuracy", "macro_f1")
    _new: NewWindows | None = None
    """Windows that `new_data` read for `--predict`."""
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
        """Model whose frozen encoder computes all features before training; None if features can change."""
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
        """Whether the user's own recordings are used, or were used to train the loaded checkpoint."""
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
        if given := given_flags(config, _OF_OWN):
            advice = "give recordings with --data-dir" if path is None else f"--data-dir {path} is read as UCI HAR"
            raise UserError(f"{' and '.join(given)}: only for your own recordings; {advice}")
        if config.download:
            path = path or self.cache_dir / "uci_har"
            download_uci_har(path, self.cache_dir, show_download)
        return load_synthetic_har(self.cache_dir) if path is None else load_uci_har(path, self.cache_dir)

    @cached_property
    def format(self) -> WindowFormat:
        """Format of the training windows, taken from the checkpoint if the training data are absent."""
        config: HarFlags = self.config
        if not self._has_own:
            return WindowFormat()
        own = self.data_facts or self._facts_of_own
        length, hop = config.window_and_hop
        rate_hz = config.rate or own.get("rate_hz", WindowFormat.rate_hz)
        return WindowFormat(tuple(own["channels"]), tuple(own["classes"]), length, hop, rate_hz)

    def describe_data(self) -> Mapping[str, Any]:
        """Returns channels and classes of the user's recordings, and the detected sampling rate unless it is 50 Hz."""
        if not self._has_own:
            return {}
        return self.data_facts or self._facts_of_own

    @cached_property
    def _facts_of_own(self) -> Mapping[str, Any]:
        recordings, told_hz = self._recordings, self._own.rate_hz
        facts: dict[str, Any] = {"channels": list(recordings.channels), "classes": list(recordings.classes)}
        # Resuming requires equal facts, and older versions recorded no rate, so the default rate is omitted.
        if self.config.rate is None and told_hz is not None and not is_same_rate(told_hz, WindowFormat.rate_hz):
            facts["rate_hz"] = usual_rate_hz(told_hz)
        return facts

    def data_digest(self) -> str:
        """Returns a digest of the recordings and of their split into data sets."""
        parts = self._windows.values()
        if not self._has_own:
            generator = [f"generator {VERSION}"] * (self.config.data_dir is None and not self.config.download)
            return digest_of(*generator, *(array for part in parts for array in (part.rows, part.labels)))
        return digest_of(self._own.digest, *(part.rows for part in parts))

    def remarks(self) -> Sequence[str]:
        """Returns notes for the user on how the training recordings, or the file of `--predict`, were read."""
        if self._new is not None:
            return self._new.remarks
        if not self._has_own or self.data_facts is not None:
            return ()
        recordings = self._recordings
        tested = sorted({recordings.name_of(subject) for subject in recordings.subjects[recordings.is_test].tolist()})
        found = [*self._own.remarks, *_counts(recordings), f"Test subjects: {', '.join(tested)}."]
        found += self._doubts_about_rate()
        shown = set(self._windows["train"].labels.tolist())
        unseen = [name for label, name in enumerate(recordings.classes) if label not in shown]
        if unseen:
            names = ", ".join(unseen)
            advice = "hold out other subjects with --test-subjects or --val-subjects"
            found.append(f"The training set has no windows of {names}; {advice}.")
        return found

    def _doubts_about_rate(self) -> list[str]:
        told_hz, rate_hz = self._own.rate_hz, self.format.rate_hz
        if told_hz is None or is_same_rate(told_hz, rate_hz):
            return []
        return [
            f"Warning: the clock shows {told_hz:.4g} rows per second, but --rate {rate_hz:g} determines the times in "
            "the output of --predict. Leave out --rate to use the clock."
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
        network = model.get_submodule("network")
        assert isinstance(network, HarNet | TinyHar | DeepConvLstm)
        return network.blocks

    def initialise(self, objective: Objective) -> None:
        """Sets the model's input statistics from training windows, and loads the `--encoder-path` file if given."""
        assert isinstance(objective, HarObjective)
        objective.model.set_statistics(*self._windows["train"].statistics)
        if self.config.encoder_path is not None:
            load_encoder(objective.model, self.config.encoder_path)

    def check_weights(self, objective: Objective) -> None:
        """Raises UserError if the model's encoder differs from the encoder that computed the stored features."""
        assert isinstance(objective, HarObjective)
        if self._encoding is not None:
            refuse_other_encoder(objective.model, self._encoding)

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """Returns the `--val-subjects` flag of each cross-validation fold."""
        return [["--val-subjects", *fold] for fold in subject_folds(self._recordings, num_folds)]

    def ensemble(self, objectives: Sequence[Objective]) -> HarEnsembleObjective:
        return HarEnsembleObjective(Ensemble([objective.model for objective in objectives]))

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns loss and accuracy. Evaluation adds macro-F1 (unweighted mean over classes) and recall per class.

        Recall is omitted for classes without windows.
        """
        weight = sums["weight"]
        if "confusion" not in sums:
            return {"loss": float(sums["loss"] / weight), "accuracy": float(sums["correct"] / weight)}
        confusion = sums["confusion"]
        hits = confusion.diagonal()
        # as in scikit-learn, macro-F1 ignores a class that neither occurs nor is predicted
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

    def baselines(self) -> Mapping[str, Baseline]:
        """Returns the scores of a ridge classifier that is trained on summary statistics of each window."""
        key = key_of("ridge", _RIDGE_VERSION, self.data_digest(), self.config.window_and_hop, self.format.rate_hz)
        return {"ridge on statistics": Baseline(cached_numbers(self.cache_dir, key, self._scores_of_ridge))}

    def _scores_of_ridge(self) -> dict[str, float]:
        parts, num_classes, metrics = self._windows, len(self.format.classes), dict[str, float]()
        train = parts["train"]
        some = slice(None, None, -(-len(train) // _MOST_WINDOWS_OF_RIDGE))
        classify = ridge_classifier(window_statistics(train.recorded[some]), train.labels[some], num_classes)
        for name in sorted(parts.keys() - {"train"}):
            predicted = classify(window_statistics(parts[name].recorded)).argmax(1)
            pairs = np.bincount(parts[name].labels * num_classes + predicted, minlength=num_classes**2)
            confusion = torch.from_numpy(pairs).double().view(num_classes, num_classes)
            no_loss = {"weight": confusion.sum(), "loss": torch.tensor(torch.nan)}
            scores = self.summarise({"confusion": confusion, **no_loss})
            del scores["loss"]
            metrics |= {f"{name}/{metric}": value for metric, value in scores.items()}
        return metrics

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Returns class names and the confusion matrix, with true classes in rows and predicted classes in columns."""
        return {"classes": list(self.format.classes), "confusion_matrix": sums["confusion"].to(torch.int64).tolist()}

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        return {"confusion_matrix": draw_confusion_matrix(sums["confusion"], self.format.classes)}

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads the windows to classify from a CSV recording or a .npy array."""
        config: HarFlags = self.config
        self._new = read_new_windows(path, self.format, config.subject_column, config.label_column, config.reading)
        return self._new

    def sample(self) -> Mapping[str, Sequence[Any]]:
        """Returns the signals of one test person by channel, as an example input of `--predict`."""
        recordings, hop = self._recordings, self.format.hop
        windows = recordings.signals[recordings.subjects == recordings.subjects[recordings.is_test][0]]
        rows = np.concatenate([window[:, :hop] for window in windows], axis=1)
        return {name: [f"{x:.6g}" for x in row.tolist()] for name, row in zip(recordings.channels, rows, strict=True)}

    def _doubt_units(self, model: Standardised) -> None:
        """Warns once if the signals to classify and the training data probably have different physical units."""
        if self._new is not None and not self._has_doubted:
            self._has_doubted = True
            mean, std = (statistic.flatten().double().cpu().numpy() for statistic in (model.mean, model.std))
            if doubt := doubt_about_units(self._new, self.format.channels, mean, std):
                to_stderr(f"Warning: {self._new.where}: {doubt}.")

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns columns with each window's index, start and end time, predicted activity and class probabilities.

        Times are in seconds, and empty for windows from a .npy file. The file's person and trial columns are copied.
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
            **{name: [cells[i] for i in index] for name, cells in (new.cells if new else {}).items()},
            "start_s": _seconds(start_s, 0.0, window.rate_hz),
            "end_s": _seconds(start_s, (new and new.duration_s) or 0.0, window.rate_hz),
            "activity": [window.classes[i] for i in predicted],
            "confidence": _four_digits(confidence),
            **{name: _four_digits(column) for name, column in zip(window.classes, probabilities.T, strict=True)},
        }

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Exports the model, which maps signals in physical units to logits; only HarNet accepts any window length."""
        assert isinstance(objective, HarObjective)
        model, signals = objective.model, batch["signals"]
        lengths = {"x": (2,)} if isinstance(model.network, HarNet) else {}
        return Exported(model, {"x": signals}, model(signals), lengths)

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Draws standardised windows with their predicted and true activities."""
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

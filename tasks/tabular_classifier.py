"""Tabular classifier that follows scikit-learn's conventions without depending on scikit-learn."""

import importlib
import io
import numbers
import signal
import sys
import tempfile
import threading
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch

from data.tabular.encoding import Encoding
from data.tabular.labels import Labels, refuse_unless_classes
from data.tabular.reader import MOST_COLUMNS
from data.tabular.scores import scores
from data.tabular.screening import screened
from data.tabular.table import Column, Table, table_of_array
from models.tabular.lora import merge_adapters
from models.tabular.predictor import TEMPERATURE, TabularModel, predict
from tasks.tabular import SHIPPED, TabularTask
from trainer.api import fit
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.manifest import STATE, read_json, read_state
from trainer.checkpoint.weights import TrainedRun, find_weights
from trainer.commands.weights import model_of
from trainer.common import forms
from trainer.common.errors import UserError
from trainer.common.files import written_as_a_whole
from trainer.config import flag_name
from trainer.logs.console import say
from trainer.parallel.devices import pick_device

_TUNING_BATCH = 16
"""Global batch size of tuning, in classification problems, for any number of devices."""
_OF_THE_MODEL = ("model", "width", "num_blocks", "num_heads", "thinking_rows", "max_classes")
_TUNING = threading.Lock()
"""Lock that lets a process run only one tuning at a time, because tuning silences standard output."""

_TIMES = "mM"
"""NumPy dtype kinds of durations and dates, which checkpoints cannot contain."""

Strategy = Literal["none", "base", "lora"]


class TabularClassifier:
    """Classifies rows of a table by in-context learning, with a network that was trained on synthetic tables.

    X: an array (n, m) or a data frame of numbers, strings and booleans; NaN and None are missing values. Strings that
    are not numbers or dates are categories. y: (n,), classes that can be sorted.

    Example:
        classifier = TabularClassifier().fit(X, y)
        probabilities = classifier.predict_proba(X_new)

    Attributes after `fit`: classes_ (num_classes,), sorted; n_features_in_; feature_names_in_, only for a data frame;
    notes_, with a line for each suspicious or ignored column.
    """

    def __init__(
        self,
        strategy: Strategy = "none",
        *,
        num_estimators: int = 8,
        max_context: int = 1024,
        temperature: float = TEMPERATURE,
        epochs: int = 20,
        learning_rate: float | None = None,
        num_devices: int = 1,
        device: str = "auto",
        weights: str | Path | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        """strategy: what `fit` trains: nothing ("none"), all weights ("base") or low-rank adapters ("lora"). Tuned
            weights are kept only if they outperform the initial weights on held-out rows.
        num_estimators: number of predictions to average. max_context: maximum number of labelled rows per prediction.
        temperature: divisor of the logits.
        epochs, learning_rate, num_devices: settings of tuning, which starts one process per device if num_devices > 1.
        device: "auto", "cpu" or "cuda". weights: a checkpoint of --task tabular (default: the built-in weights).
        verbose: whether tuning prints its log; with several devices, the log is always printed.
        """
        self.strategy = strategy
        self.num_estimators = num_estimators
        self.max_context = max_context
        self.temperature = temperature
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.num_devices = num_devices
        self.device = device
        self.weights = weights
        self.random_state = random_state
        self.verbose = verbose

    # --- scikit-learn's convention -------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        names = list(signature(TabularClassifier).parameters)
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> "TabularClassifier":
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{name}: no such parameter of TabularClassifier; the parameters are {', '.join(known)}"
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = TabularClassifier().__dict__
        given = [f"{name}={value!r}" for name, value in self.get_params().items() if value != defaults[name]]
        return f"TabularClassifier({', '.join(given)})"

    def __sklearn_tags__(self) -> Any:
        utils = importlib.import_module("sklearn.utils")
        return utils.Tags(
            estimator_type="classifier",
            target_tags=utils.TargetTags(required=True),
            classifier_tags=utils.ClassifierTags(),
            input_tags=utils.InputTags(string=True, categorical=True, allow_nan=True),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    # --- learning and predicting ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> "TabularClassifier":  # noqa: N803
        """Fits the classifier to rows with known classes. Raises UserError, a ValueError, if the data are unusable."""
        self._check_parameters()
        table = _table(X)
        classes, labels = _classes(y, table.num_rows)
        for learned in ("classes_", "feature_names_in_"):  # if this fit fails, no earlier fit remains
            self.__dict__.pop(learned, None)
        self.n_features_in_ = len(table.columns)
        if hasattr(X, "columns"):
            self.feature_names_in_ = np.array(table.names, dtype=object)
        known = Labels("y", tuple(map(str, classes.tolist())), labels)
        refuse_unless_classes(known.classes, len(labels), known.name)
        features, reports, warnings_ = screened(table, known, np.ones(len(labels), bool))
        noted = [f"{report.name}: {report.kind}: {report.note}" for report in reports if report.note]
        self.notes_ = (*warnings_, *noted)
        self._encoding = Encoding.fit(features, known)
        self._context, self._labels = torch.from_numpy(self._encoding.encode(table)), torch.from_numpy(labels)
        self._use(self._untuned() if self.strategy == "none" else self._tuned())
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Returns class probabilities in the order of `classes_`, (n, num_classes) float64."""
        table = self._checked(X)
        queries = torch.from_numpy(self._encoding.encode(table))
        found = predict(
            cast(TabularModel, self._model),
            self._context,
            self._labels,
            queries,
            len(self.classes_),
            num_estimators=int(self.num_estimators),
            seed=self._seed,
            temperature=float(self.temperature),
            max_context=int(self.max_context),
        )
        return found.numpy()

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Returns the most probable class of each row, (n,)."""
        places = self.predict_proba(X).argmax(axis=1)
        found: np.ndarray = self.classes_[places]
        return found

    def score(self, X: Any, y: Any) -> float:  # noqa: N803
        """Returns the accuracy of `predict(X)`, given the true classes y."""
        predicted = self.predict(X)
        return float(np.mean(predicted == _one_class_a_row(y, len(predicted))))

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:  # noqa: N803
        """Returns accuracy, auc, log_loss, brier and ece (`data.tabular.scores`). y: classes known to `fit`."""
        probabilities = self.predict_proba(X)
        places = {value: i for i, value in enumerate(self.classes_.tolist())}
        values = _one_class_a_row(y, len(probabilities)).tolist()
        if unknown := [value for value in values if value not in places]:
            raise ValueError(f"y contains {unknown[0]!r}, a class that fit has not seen; remove the rows of this class")
        return scores(np.array([places[value] for value in values]), probabilities)

    # --- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Saves everything that `predict_proba` needs; `load` reads it without executing code."""
        self._require_fitted()
        state = {
            "params": {
                name: _plain(value) for name, value in self.get_params().items() if name not in ("weights", "device")
            },
            "classes": _numbers_of_times(self.classes_).tolist(),
            "class_type": self.classes_.dtype.str,
            "num_features": self.n_features_in_,
            "names": list(getattr(self, "feature_names_in_", ())),
            "notes": list(self.notes_),
            "encoding": asdict(self._encoding),
            "context": self._context,
            "labels": self._labels,
            **{name: self._run.state[name] for name in ("model", "config")},
        }
        content = io.BytesIO()
        torch.save(state, content)
        with written_as_a_whole(Path(path), Path(f"{path}.tmp"), binary=True) as file:
            file.write(content.getbuffer())

    @classmethod
    def load(cls, path: str | Path) -> "TabularClassifier":
        """Loads a classifier from a file that `save` wrote. Raises UserError if the file is unusable."""
        state = read_checkpoint(Path(path), str(path), only_weights=True)
        if not {"params", "encoding", "context"} <= state.keys():
            raise UserError(f"{path}: was not written by TabularClassifier.save; give a file that this method wrote")
        loaded = cls(**state["params"])
        class_type = np.dtype(state["class_type"])
        loaded.classes_ = np.array(state["classes"], np.int64 if class_type.kind in _TIMES else None).astype(class_type)
        loaded.n_features_in_, loaded.notes_ = state["num_features"], tuple(state["notes"])
        if state["names"]:
            loaded.feature_names_in_ = np.array(state["names"], dtype=object)
        loaded._encoding = Encoding.from_dict(state["encoding"])
        loaded._context, loaded._labels = state["context"], state["labels"]
        loaded._use(TrainedRun(str(path), state, Path(path).parent))
        return loaded

    # --- the network ---------------------------------------------------------------------------------------------

    def _untuned(self) -> TrainedRun:
        path = SHIPPED if self.weights is None else Path(self.weights)
        run = find_weights(path.parent, {"weights": path}, say)
        if "config" not in run.state:
            raise UserError(
                f"weights {path}: contains only weights, without settings; give a checkpoint of --task tabular, "
                "such as best.pth"
            )
        return run

    def _tuned(self) -> TrainedRun:
        """Tunes the network with `trainer.fit` in a temporary folder; then re-raises any signal that stopped `fit`."""
        several = {"multi_gpu": forms.USUAL, "nproc": int(self.num_devices)} if self.num_devices > 1 else {}
        of_weights = self._flags_of_weights()
        quiet = nullcontext() if self.verbose else redirect_stdout(io.StringIO())
        with _TUNING, tempfile.TemporaryDirectory() as folder, quiet:
            path, run = Path(folder) / "table.npz", Path(folder) / "run"
            np.savez(path, X=self._context.numpy(), y=self._labels.numpy())
            try:
                fit(
                    TabularTask,
                    data_dir=path,
                    tune=self.strategy,
                    test_share=0.0,
                    epochs=int(self.epochs),
                    lr=self.learning_rate,
                    global_batch_size=_TUNING_BATCH,
                    batch_size=-(-_TUNING_BATCH // int(self.num_devices)),
                    device=self.device,
                    seed=self._seed,
                    num_estimators=int(self.num_estimators),
                    max_context=int(self.max_context),
                    init_from_partial=self.weights,
                    save_dir=run,
                    **several,
                    **of_weights,
                )
            except SystemExit:  # raised for stop signals other than Ctrl-C
                if read_state(run) != "preempted":
                    raise
            if read_state(run) == "finished":
                return find_weights(run, {}, say)
            stopped_by = read_json(run / STATE).get("signal")
        signal.raise_signal(stopped_by or signal.SIGINT)
        raise KeyboardInterrupt  # in case the signal's handler returns

    def _flags_of_weights(self) -> dict[str, Any]:
        if self.weights is None:
            return {}
        state = self._untuned().state
        if any("lora_" in name for name in state["model"]):
            raise UserError(
                f"weights {self.weights}: contains adapters from an earlier tuning; give the weights from which "
                "that tuning started"
            )
        config = state["config"]  # older weights lack --thinking-rows
        return {name: config[flag_name(name)] for name in _OF_THE_MODEL if flag_name(name) in config}

    @property
    def _seed(self) -> int:
        return int(self.random_state or 0)

    def _check_parameters(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy {self.strategy!r}: must be one of {', '.join(get_args(Strategy))}")
        for name in ("num_estimators", "max_context", "epochs", "num_devices"):
            if not isinstance(getattr(self, name), numbers.Integral) or getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be a whole number, at least 1")
        state, temperature = self.random_state, self.temperature
        if not (state is None or (isinstance(state, numbers.Integral) and state >= 0)):
            raise ValueError(f"random_state {state!r}: must be a whole number, at least 0, or None")
        if not (isinstance(temperature, numbers.Real) and 0 < temperature < float("inf")):
            raise ValueError(f"temperature {temperature!r}: must be a finite number above 0")
        if self.device not in ("auto", "cpu") and not (
            str(self.device).partition(":")[0] == "cuda" and torch.cuda.is_available()
        ):
            raise ValueError(f'device {self.device!r}: must be "auto" or "cpu", or "cuda" if there is a GPU')

    def _use(self, run: TrainedRun) -> None:
        """Builds the network of a training run on `device`, with adapters merged into its weights."""
        with torch.random.fork_rng(devices=[]):  # building the model draws random weights
            model = model_of(run, TabularTask)
        merge_adapters(model)
        self._run, self._model = run, model.to(pick_device(self.device), torch.float32)

    def _require_fitted(self) -> None:
        if not hasattr(self, "classes_"):
            raise _of_sklearn("NotFittedError", ValueError)(f"this {type(self).__name__} is not fitted; call fit first")

    def _checked(self, X: Any) -> Table:  # noqa: N803
        """Converts X to a table. Raises ValueError if X does not have as many columns as in `fit`.

        If only one of X and the table of `fit` has column names, columns are matched by position, as in scikit-learn.
        """
        self._require_fitted()
        table = _table(X)
        if len(table.columns) != self.n_features_in_:
            raise ValueError(
                f"X has {len(table.columns)} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input"
            )
        if hasattr(X, "columns") == hasattr(self, "feature_names_in_"):
            return table
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(len(table.columns))])
        return Table("X", tuple(replace(column, name=name) for column, name in zip(table.columns, names, strict=True)))


def _of_sklearn(name: str, otherwise: type[Any]) -> type[Any]:
    """Returns scikit-learn's exception or warning class `name` if scikit-learn is imported, else `otherwise`."""
    found: type[Any] = getattr(sys.modules.get("sklearn.exceptions"), name, otherwise)
    return found


def _table(X: Any) -> Table:  # noqa: N803
    """Converts X to a table. Raises ValueError or TypeError unless X is a data frame or a dense, real 2D array."""
    if hasattr(X, "columns"):
        columns = [Column.of_values(str(name), np.asarray(X[name])) for name in X.columns]
        _refuse_shape(len(columns[0].values) if columns else 0, len(columns))
        return Table("X", tuple(columns))
    if hasattr(X, "toarray"):
        raise TypeError("X is a sparse matrix, which is not supported; give X.toarray()")
    values = np.asarray(X)
    if values.dtype.kind == "c":
        raise ValueError("Complex data not supported: X contains complex numbers")
    if values.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {values.ndim}D array instead. Reshape your data: a row for each sample, a column "
            "for each feature"
        )
    _refuse_shape(*values.shape)
    return table_of_array(values, [f"x{i}" for i in range(values.shape[1])], "X")


def _refuse_shape(num_rows: int, num_columns: int) -> None:
    if 0 in (num_rows, num_columns):
        what = "sample" if num_columns else "feature"
        raise ValueError(
            f"Found array with 0 {what}(s) (shape={num_rows, num_columns}) while a minimum of 1 is required."
        )
    if num_columns > MOST_COLUMNS:
        raise ValueError(
            f"X has {num_columns:,} columns, but at most {MOST_COLUMNS:,} are supported; keep only relevant columns"
        )


def _classes(y: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted classes, and the class index of each row, (n,) int64.

    Raises ValueError unless y has one sortable class per row.
    """
    if y is None:
        raise ValueError("TabularClassifier requires y to be passed, but the target y is None")
    values = _one_class_a_row(y, num_rows)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("Input y contains NaN or infinity")
    if values.dtype.kind == "f" and (values != values.round()).any():
        raise ValueError("Unknown label type: continuous. y must contain class labels")
    try:
        classes, places = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise ValueError(f"y contains values that cannot be sorted ({error}); give classes of one type") from None
    return classes, places.astype(np.int64)


def _one_class_a_row(y: Any, num_rows: int) -> np.ndarray:
    """Converts y of shape (n,) or (n, 1) to (n,). Raises ValueError for any other shape or row count."""
    values = np.asarray(y)
    if values.ndim == 2 and values.shape[1] == 1:
        warnings.warn(
            "A column-vector y was passed when a 1d array was expected; its only column is used",
            _of_sklearn("DataConversionWarning", UserWarning),
            stacklevel=4,
        )
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(f"y should be a 1d array, got an array of shape {values.shape} instead")
    if len(values) != num_rows:
        raise ValueError(f"X has {num_rows} rows, but y has {len(values)}; give one class per row")
    return values


def _numbers_of_times(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) if values.dtype.kind in _TIMES else values


def _plain(value: Any) -> Any:
    """Converts a NumPy scalar, which a parameter search may pass, to a Python value."""
    return value.item() if isinstance(value, np.generic) else value

"""Tabular task: classifies rows by in-context learning, with a network that was pre-trained on synthetic tables."""

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.overview import overview
from data.table_files import ENCODING, ON_BAD, Reading
from data.tabular.labels import named_column
from data.tabular.other_generators import OtherTables
from data.tabular.own_table import OwnTable, split_table
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.tables import PriorTables, write_tables
from data.tabular.problems import Episodes, Rows
from data.tabular.reader import read_held_out, read_table
from data.tabular.scores import scores
from data.tabular.screening import HEADING, LabelledTable, labelled_table
from data.tabular.spelling import canonical
from data.tabular.table import Table
from models.simple.linear import logistic_regression
from models.tabular.lora import add_adapters, merged
from models.tabular.nano import NanoTabular
from models.tabular.predictor import TabularModel, predict
from models.tabular.tabicl import TabICL
from tasks.pictures import draw_confusion_matrix
from tasks.tabular_objective import TabularObjective, with_all_counts
from trainer.common.errors import UserError, printable
from trainer.config import FlagGroup, flag, flag_name, flags_without, given_flags, refuse
from trainer.loading.batch_orders import ConsecutiveBatches
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.order import SampleKeys
from trainer.task import Baseline, Exported, Objective, ParamGroup, Picture, Task

SHIPPED = Path(__file__).with_name("tabular_nano.pth")
_VALIDATION_SEED, _TEST_SEED = 2**40, 2**41
"""Seeds of validation and test tables, independent of --seed so that all runs are scored on the same tables."""
_TUNING_LR_SCALE = {"base": 0.03, "lora": 0.3}
"""Factors that multiply --lr, by value of --tune."""
_QUERY_SHARE = 0.25
"""Share of query rows in an episode (a training problem that consists of rows of the user's table)."""
_EPISODE_CELLS, _FEWEST_EPISODE_ROWS = 2**13, 32
"""Maximum number of cells (about 12 KiB each in training) and minimum number of rows of an episode."""
_ROW_STEP, _COLUMN_STEP = 64, 4
"""On a GPU, synthetic tables are padded to multiples of these numbers of rows and columns, to limit the number of
shapes. Padding is cheap, because kernel launches cost more than the cells of small tables.
"""
_EXPORT_ROWS = 64
"""Number of context rows in the example inputs with which a model is exported."""
_MOST_CLASSES_DRAWN = 30
_MOST_ROWS_OF_REGRESSION, _MOST_CATEGORIES_OF_REGRESSION = 50_000, 100
_OF_NANO, _OF_A_TABLE, _OF_TUNING, _OF_LORA = (
    {"model": ("nano",)},
    {"data_dir": None},
    {"tune": None},
    {"tune": ("lora",)},
)
_OF_PRIOR = (
    "num_tables",
    "num_val_tables",
    "prior_version",
    "min_rows",
    "max_rows",
    "min_features",
    "max_features",
    "prior_only",
)
_OF_PREDICTIONS = ("num_estimators", "max_context")
"""Flags that affect only predictions for a user's table; training on synthetic tables refuses them."""


@dataclass
class TabularFlags(FlagGroup):
    """Task: classification of tables by in-context learning (--task tabular)

    Without --data-dir, pre-trains a model on synthetic tables. With --data-dir, scores the task's pre-trained model on
    that table; --tune first tunes the model on it. --predict classifies the rows of a file with the same columns.
    """

    data_dir: Path | None = flag(
        None, "table to learn from; a CSV file with a line of column names, JSON lines, parquet, an .npz file with X "
        "and y, or a folder of train and test files (default: pre-train on synthetic tables)", common=True,
        local=True, displaces=_OF_PRIOR,
    )  # fmt: skip
    label: str | None = flag(
        None, "column to predict; optional for an .npz file, whose label is y", metavar="COLUMN", common=True,
        needs=_OF_A_TABLE,
    )  # fmt: skip
    test_data: Path | None = flag(
        None, "table to score on, including the label column; replaces the test rows held out from --data-dir",
        common=True, local=True, needs=_OF_A_TABLE,
    )  # fmt: skip
    id: str | None = flag(
        None, "column that identifies rows; not used as a feature, but copied to the output of --predict",
        metavar="COLUMN", common=True, needs=_OF_A_TABLE,
    )  # fmt: skip
    encoding: str | None = flag(None, ENCODING, metavar="NAME", needs=_OF_A_TABLE)
    on_bad: Literal["refuse", "drop"] = flag("refuse", ON_BAD, needs=_OF_A_TABLE)
    drop: tuple[str, ...] | None = flag(
        None, "columns to leave out of the features", metavar="COLUMN", needs=_OF_A_TABLE
    )
    test_share: float = flag(
        0.2, "share of rows held out for testing; 0 (only with --tune): hold out none, and score the validation rows",
        at_least=0, below=1, needs=_OF_A_TABLE, excludes=("test_data",),
    )  # fmt: skip
    tune: Literal["none", "base", "lora"] = flag(
        "none", "weights to tune; none: no weights (the model reads training rows as context when it predicts); "
        "base: all weights; lora: low-rank adapters", common=True, needs=_OF_A_TABLE,
    )  # fmt: skip
    val_share: float = flag(
        0.2, "with --tune: share of non-test rows held out to choose the best epoch; the untuned weights are kept "
        "if tuning does not help", above=0, below=1, needs=_OF_TUNING,
    )  # fmt: skip
    num_episodes: int = flag(
        64, "with --tune: number of training problems per epoch, each made of random rows of the table", at_least=1,
        needs=_OF_TUNING,
    )  # fmt: skip
    episode_rows: int = flag(
        512, "with --tune: maximum number of rows per training problem; a quarter of them are predicted from the rest",
        at_least=8, needs=_OF_TUNING,
    )  # fmt: skip
    lora_rank: int = flag(8, "with --tune lora: rank of the adapters", at_least=1, needs=_OF_LORA)
    lora_alpha: float = flag(16.0, "with --tune lora: scale the adapters by ALPHA / rank", above=0, needs=_OF_LORA)
    lora_targets: tuple[str, ...] = flag(
        ("*",), "with --tune lora: linear layers that get adapters, as patterns of names, for example *.query *.value",
        metavar="PATTERN", needs=_OF_LORA,
    )  # fmt: skip
    num_estimators: int = flag(
        8, "number of predictions to average per row; each uses its own order of columns and classes", at_least=1
    )
    max_context: int = flag(
        1024, "maximum number of rows that one prediction learns from; if the table has more, each prediction learns "
        "from its own random sample", at_least=16,
    )  # fmt: skip
    num_tables: int = flag(1600, "number of synthetic tables per epoch; every epoch has new tables", at_least=1)
    num_val_tables: int = flag(
        256, "number of synthetic tables in each validation set; the test set has twice this number", at_least=1
    )
    min_rows: int = flag(64, "minimum number of rows in a synthetic table", at_least=32)
    max_rows: int = flag(192, "maximum number of rows in a synthetic table", at_least=32)
    min_features: int = flag(2, "minimum number of columns in a synthetic table", at_least=1)
    max_features: int = flag(12, "maximum number of columns in a synthetic table", at_least=1)
    max_classes: int = flag(
        10, "maximum number of classes in a synthetic table and in one model call; a table with more classes "
        "needs several calls", at_least=2, at_most=10,
    )  # fmt: skip
    prior_version: Literal["1", "2"] = flag(
        "1", "generator of synthetic tables; 1: layers of random networks or trees; 2: random graphs of mixed functions"
    )
    prior_only: Path | None = flag(
        None, "do not train: write one epoch's synthetic tables to this .npz file", from_record="refused"
    )
    model: Literal["nano", "tabicl"] = flag(
        "nano", "network; nano: table cells attend to each other across columns and rows; tabicl: TabICL with 27 "
        "million parameters, which embeds columns, then rows, then the whole table", common=True,
    )  # fmt: skip
    width: int = flag(96, "nano: width of each cell's embedding", at_least=4, needs=_OF_NANO)
    num_blocks: int = flag(3, "nano: number of blocks", at_least=1, needs=_OF_NANO)
    num_heads: int = flag(4, "nano: number of attention heads", at_least=1, needs=_OF_NANO)
    thinking_rows: int = flag(
        0, "nano: number of learned rows that all rows of a table can attend to, for example 16", at_least=0,
        needs=_OF_NANO,
    )  # fmt: skip

    def problems(self) -> list[str]:
        found = []
        for low, high in (("min_rows", "max_rows"), ("min_features", "max_features")):
            if getattr(self, low) > getattr(self, high):
                values = [f"{flag_name(name)} {getattr(self, name)}" for name in (low, high)]
                found.append(f"{' and '.join(values)}: the first must not exceed the second")
        if self.data_dir is not None and self.label is None and self.data_dir.suffix.lower() != ".npz":
            found.append("--label: give the name of the column to predict")
        if self.data_dir is not None:
            given = given_flags(self, _OF_PRIOR)
            found += [
                f"{name}: applies only to synthetic tables; leave it out, or leave out --data-dir" for name in given
            ]
        if self.test_share == 0 and self.tune == "none":
            found.append("--test-share 0: leaves no rows to score; leave out --test-share, or add --tune")
        if self.model == "nano" and self.width % self.num_heads:
            found.append(f"--width {self.width}: must be a multiple of --num-heads {self.num_heads}")
        return found

    @property
    def reading(self) -> Reading:
        return Reading(self.encoding, self.on_bad)

    @property
    def prior(self) -> PriorSettings:
        return PriorSettings(
            version=int(self.prior_version),
            rows=(self.min_rows, self.max_rows),
            features=(self.min_features, self.max_features),
            classes=self.max_classes,
        )


def _with_few_lengths(batch: Batch, keys: SampleKeys) -> Batch:
    """Pads the tables of a batch to sizes that limit the number of distinct shapes."""
    (_, num_context, num_columns), num_queries = batch["context"].shape, batch["targets"].shape[1]
    rows, queries = (keys.padded_length(size, _ROW_STEP) - size for size in (num_context, num_queries))
    columns = keys.padded_length(num_columns, _COLUMN_STEP) - num_columns
    return {
        "context": F.pad(batch["context"], (0, columns, 0, rows)),
        "labels": F.pad(batch["labels"], (0, rows)),
        "queries": F.pad(batch["queries"], (0, columns, 0, queries)),
        "targets": F.pad(batch["targets"], (0, queries), value=-1),
    }


class TabularTask(Task):
    """Task that pre-trains a model on synthetic tables, or applies a pre-trained model to a user's table."""

    Config = TabularFlags
    examples = (
        "--data-dir train.csv --label y --predict new.csv",
        "--data-dir train.csv --label y --tune lora --save-dir checkpoints/tuned",
    )
    defaults = {
        "lr": 3e-3,
        "batch_size": 16,
        "eval_batch_size": 2048,
        "epochs": 20,
        "max_grad_norm": 1.0,
        "eval_start": True,
    }
    headline = ("loss", "auc", "accuracy")
    predict_flags = ("data_dir", "label", "id", "encoding", "on_bad", "drop", "num_estimators", "max_context")

    _notes: tuple[str, ...] = ()
    """Notes for the user on separate validation and test tables."""
    _of_new_rows: Sequence[str] = ()
    """Notes for the user on the table that `new_data` read."""
    _ids: Sequence[str] = ()
    """Ids of the rows that `new_data` read, if --id names a column."""

    @property
    def trains(self) -> bool:  # type: ignore[override]
        """Returns whether the run trains a model; with a user's table, it trains only if --tune is given."""
        return self.config.data_dir is None or self.config.tune != "none"

    @property
    def monitor(self) -> tuple[str, Literal["max", "min"]]:  # type: ignore[override]
        return ("val/prior/auc", "max") if self.config.data_dir is None else ("val/loss", "min")

    def other_work(self) -> str | None:
        """Writes an epoch of synthetic tables to the --prior-only file, if given, and returns a message."""
        path: Path | None = self.config.prior_only
        if path is None:
            return None
        tables = self.splits()["train"]
        assert isinstance(tables, PriorTables)
        write_tables(tables, path)
        return f"Wrote {len(tables)} synthetic tables to {path}."

    # --- data ---------------------------------------------------------------------------------------------------

    def splits(self) -> Mapping[str, KeyedDataset]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, KeyedDataset]:
        return self._synthetic_tables() if self.config.data_dir is None else self._parts_of_the_table()

    def _synthetic_tables(self) -> Mapping[str, KeyedDataset]:
        config: TabularFlags = self.config
        refuse(flags_without(config, "--data-dir", _OF_PREDICTIONS))
        return {
            "train": PriorTables(config.prior, self.seed, config.num_tables, fresh_each_epoch=True),
            "val/prior": PriorTables(config.prior, _VALIDATION_SEED, config.num_val_tables),
            "val/other": OtherTables(_VALIDATION_SEED, config.num_val_tables, most_classes=config.max_classes),
            "test": PriorTables(config.prior, _TEST_SEED, 2 * config.num_val_tables),
        }

    @cached_property
    def _table(self) -> LabelledTable:
        """Returns the user's table, split into features and labels. Raises UserError if it has no usable classes."""
        config: TabularFlags = self.config
        assert config.data_dir is not None
        table = read_table(config.data_dir, reading=config.reading)
        dropped = dict.fromkeys(config.drop or (), "--drop")
        if config.id is not None and config.id in table.names:
            dropped[config.id] = "--id"
        elif config.id is not None:
            self._notes += (f"Warning: {table.where}: --id {config.id}: no such column.",)
        found = labelled_table(table, config.label or "y", dropped)
        if self.data_facts:  # models tuned by older versions do not use dates
            known = {*self.data_facts["columns"], *table.names}
            others = [name for name in found.features.names if name not in known]
            found = replace(found, features=found.features.without(others))
        return found

    @cached_property
    def _held_out(self) -> dict[str, Table]:
        """Returns the "test" and "val" tables that are in separate files."""
        config: TabularFlags = self.config
        assert config.data_dir is not None
        tables, label = read_held_out(config.data_dir, config.reading), self._table.labels.name
        if config.test_data is not None:
            tables["test"] = read_table(config.test_data, "--test-data", config.reading)
        elif "test" in tables and label not in tables["test"].names:
            self._notes += (
                f"{tables.pop('test').where}: has no column {label!r}, so it is not scored; --predict can "
                "classify its rows.",
            )
        return tables

    @cached_property
    def _own(self) -> OwnTable:
        val_share = self.config.val_share if self.config.tune != "none" else 0.0
        return split_table(self._table, self._held_out, {"test": self.config.test_share, "val": val_share})

    def _parts_of_the_table(self) -> Mapping[str, KeyedDataset]:
        config: TabularFlags = self.config
        parts = self._own.parts
        num_train, num_val = len(parts["train"].labels), len(parts["val"].labels)
        val, test = Rows(*parts["val"], num_train), Rows(*parts["test"], num_train + num_val)
        if config.tune == "none":
            return {"train": Rows(*parts["train"], num_train), "test": test}
        num_columns = parts["train"].features.shape[1]
        num_rows = min(config.episode_rows, num_train, max(_FEWEST_EPISODE_ROWS, _EPISODE_CELLS // (num_columns + 1)))
        num_queries = max(1, round(_QUERY_SHARE * num_rows))
        episodes = Episodes(
            *parts["train"],
            config.num_episodes,
            num_context=num_rows - num_queries,
            num_queries=num_queries,
            max_classes=config.max_classes,
            seed=self.seed,
        )
        return {"train": episodes, "val": val, "test": test if len(test) > 0 else val}

    def describe_data(self) -> Mapping[str, Any]:
        if self.config.data_dir is None:
            return {}
        rows = hashlib.sha256(b"".join(values.tobytes() for values in self._own.context))
        return {**self._classes_and_columns, "rows": rows.hexdigest()}

    @property
    def _classes_and_columns(self) -> dict[str, Any]:
        return {"classes": list(self._table.labels.classes), "columns": list(self._table.features.names)}

    def remarks(self) -> Sequence[str]:
        """Returns a summary of the user's columns, and notes on validation, test and new tables."""
        if self.config.data_dir is None:
            return ()
        known, most = len(self._own.context.labels), self.config.max_context
        sampled = f"Each prediction learns from {most:,} of {known:,} rows with known classes (--max-context)."
        columns = overview(HEADING, [report.cells for report in self._table.reports])
        told = [printable(f"Columns of {self.config.data_dir}:"), *columns, *self._table.warnings]
        return [*told, *self._notes, *self._own.notes, *([sampled] if known > most else []), *self._of_new_rows]

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray] | None:
        """Returns batches of synthetic tables in index order, since consecutive tables have equal shapes."""
        if self.config.data_dir is not None:
            return None
        return ConsecutiveBatches(self.num_samples(phase), global_batch_size)

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns the indices of the largest batch of synthetic tables, or of the first samples of a user's table."""
        tables = self.splits()["train"]
        if isinstance(tables, PriorTables):
            return tables.largest(epoch, count)
        return super().largest_samples(phase, epoch, count)

    def collate(self, samples: Any, keys: SampleKeys) -> Batch:
        """Builds a batch; the "weight" of a table is its number of query rows, over which losses are averaged.

        Omits the counts of valid rows and columns if no table is padded, unless `keys.few_lengths` is set.
        """
        batch = super().collate(samples, keys)
        if "targets" not in batch:
            return batch
        batch["weight"] = (batch["targets"] >= 0).sum(1).float()
        if keys.few_lengths and "num_features" in batch:
            batch |= _with_few_lengths(batch, keys)
        else:
            for name, size in (("num_context", batch["context"].shape[1]), ("num_features", batch["context"].shape[2])):
                if name in batch and bool((batch[name] == size).all()):
                    del batch[name]
        return batch

    # --- model --------------------------------------------------------------------------------------------------

    def build_objective(self) -> Objective:
        config: TabularFlags = self.config
        model: nn.Module
        if config.model == "tabicl":
            model = TabICL(max_classes=config.max_classes)
        else:
            size = (config.width, config.num_blocks, config.num_heads, 2 * config.width)
            model = NanoTabular(*size, max_classes=config.max_classes, num_thinking_rows=config.thinking_rows)
        if config.tune == "lora":
            add_adapters(model, targets=config.lora_targets, rank=config.lora_rank, alpha=config.lora_alpha)
        return TabularObjective(model, None if config.data_dir is None else self._answer)

    def _answer(self, model: nn.Module, rows: Tensor, num_known: int) -> Tensor:
        config: TabularFlags = self.config
        features, labels = (torch.from_numpy(values[:num_known]) for values in self._own.context)
        probabilities = predict(
            cast(TabularModel, model),
            features,
            labels,
            rows,
            len(self._table.labels.classes),
            num_estimators=config.num_estimators,
            seed=0,  # independent of --seed, so that all runs predict from the same rows
            max_context=config.max_context,
        )
        return probabilities.to(rows.device)

    def shipped_weights(self) -> Path | None:
        """Returns the file of pre-trained weights for a user's table, or None for synthetic tables."""
        return None if self.config.data_dir is None else SHIPPED

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        """Lowers the learning rate of pre-trained weights during tuning."""
        scale = _TUNING_LR_SCALE[self.config.tune] if self.config.data_dir is not None else 1.0
        return [group | {"lr_scale": scale} for group in super().param_groups(objective, phase)]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        if isinstance(model, NanoTabular):
            return [*model.blocks, model.last_block]
        assert isinstance(model, TabICL)
        return [*model.columns.blocks, *model.rows.blocks, *model.blocks]

    # --- results ------------------------------------------------------------------------------------------------

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns loss, accuracy and mean AUC for synthetic tables, and the metrics of `scores` for a user's table."""
        metrics = {"loss": float(sums["loss"] / sums["weight"])}
        if "probabilities" in sums:
            rounded = scores(sums["label"].numpy(), sums["probabilities"].numpy())
            return metrics | rounded | {"log_loss": metrics["loss"]}
        metrics["accuracy"] = float(sums["correct"] / sums["weight"])
        return metrics | ({"auc": float(sums["area"] / sums["tables"])} if "area" in sums else {})

    def baselines(self) -> Mapping[str, Baseline]:
        """Scores logistic regression on a user's table; synthetic tables have no baseline."""
        if self.config.data_dir is None:
            return {}
        parts, metrics = self._own.parts, dict[str, float]()
        some = slice(None, None, -(-len(parts["train"].labels) // _MOST_ROWS_OF_REGRESSION))
        rows, labels = self._one_hot(parts["train"].features[some]), parts["train"].labels[some]
        classify = logistic_regression(rows, labels, len(self._table.labels.classes))
        sources = {"val": parts["val"], "test": parts["test"] if len(parts["test"].labels) else parts["val"]}
        for name, part in sources.items():
            if len(part.labels):
                found = scores(part.labels, classify(self._one_hot(part.features)))
                metrics |= {f"{name}/{metric}": value for metric, value in {**found, "loss": found["log_loss"]}.items()}
        return {"logistic regression": Baseline(metrics)}

    def _one_hot(self, features: np.ndarray) -> np.ndarray:
        """One-hot encodes the categories of rows (n, m), and drops columns with too many categories."""
        columns = []
        for code, values in zip(self._own.encoding.columns, features.T, strict=True):
            if code.categories is None:
                columns.append(values[:, None])
            elif len(code.categories) <= _MOST_CATEGORIES_OF_REGRESSION:
                columns.append((values[:, None] == np.arange(len(code.categories))).astype(np.float64))
        return np.concatenate([*columns, np.zeros((len(features), 0))], axis=1)

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        """Draws the confusion matrix of a user's table."""
        classes = () if self.config.data_dir is None else self._table.labels.classes
        if not 0 < len(classes) <= _MOST_CLASSES_DRAWN:
            return {}
        pairs = sums["label"] * len(classes) + sums["probabilities"].argmax(1)
        counts = torch.bincount(pairs, minlength=len(classes) ** 2).view(len(classes), -1)
        return {"confusion": draw_confusion_matrix(counts, classes)}

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Exports the model without ensembling; the model maps context and query rows to class logits."""
        assert isinstance(objective, TabularObjective)
        model = merged(objective.model)
        batch = batch if "context" in batch else self._with_context(batch["row"])
        inputs, table = with_all_counts(batch, self.config.max_classes), (1, 2)
        if inputs["context"].shape[2] == 1:  # torch.export makes a size of 1 constant, so padding is added
            inputs |= {name: F.pad(inputs[name], (0, 1)) for name in ("context", "queries")}
        return Exported(model, inputs, model(**inputs), {"context": table, "labels": (1,), "queries": table})

    def _with_context(self, rows: Tensor) -> Batch:
        """Builds a problem for each row, with labelled rows as context, and the row and its predecessor as queries."""
        features, labels = (torch.from_numpy(values[:_EXPORT_ROWS]).to(rows.device) for values in self._own.context)
        return {
            "context": features.to(rows.dtype).repeat(len(rows), 1, 1),
            "labels": (labels % self.config.max_classes).repeat(len(rows), 1),
            "queries": torch.stack([rows, rows.roll(1, dims=0)], dim=1),
        }

    # --- prediction ---------------------------------------------------------------------------------------------

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads the rows to classify. Raises UserError if the data are unusable or lack a feature of --data-dir."""
        if self.config.data_dir is None:
            raise UserError(
                f"--predict {path}: predictions need a table with known classes; add --data-dir and --label"
            )
        facts = dict(self.data_facts or {})
        if facts:  # runs of older versions may spell classes 0 and 1 as 0.0 and 1.0
            facts["classes"] = canonical(facts["classes"], np.ones(len(facts["classes"])))
        if facts and any(facts[name] != value for name, value in self._classes_and_columns.items()):
            raise UserError(
                f"--data-dir {self.config.data_dir}: differs in columns or classes from the table on which the run was "
                "tuned; give that table, or leave out --save-dir to use the built-in weights"
            )
        table = read_table(path, "--predict", self.config.reading)
        # predictions use all rows of --data-dir as context
        self._own = split_table(self._table, {name: t for name, t in self._held_out.items() if name != "test"}, {})
        self._notes = ()
        self._own.encoding.refuse_label(table)
        if (name := self.config.id) is not None:
            column = named_column(table, name, "--id")
            self._ids = np.array([*column.distinct_texts, ""])[column.places].tolist()
            table = table.without([name])
        self._of_new_rows = self._own.encoding.remarks(table)
        return Rows(self._own.encoding.encode(table), None, len(self._own.context.labels))

    def sample(self) -> Mapping[str, Sequence[Any]]:
        """Returns the first rows of --data-dir without the label column, or a synthetic table with label column y."""
        config: TabularFlags = self.config
        if config.data_dir is None:
            # two moons, which no linear classifier can separate
            table = OtherTables(_TEST_SEED, 2, num_context=400).__getitems__(SampleKeys(np.array([1]), 0))
            columns = dict(
                zip(string.ascii_letters, table["context"][0].T.astype(float).round(4).tolist(), strict=False)
            )
            return {**columns, "y": table["labels"][0].tolist()}
        rows = read_table(config.data_dir, reading=config.reading).without([config.label or "y"])
        rows = rows.take(np.arange(min(20, rows.num_rows)))
        return {c.name: ["" if v != v else c.texts[int(v)] if c.texts else v for v in c.values] for c in rows.columns}

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns columns with each row's id, if any, its most probable class and the probability of each class."""
        assert isinstance(objective, TabularObjective)
        probabilities = objective.probabilities(batch).cpu().numpy()
        classes = self._table.labels.classes
        shown = {
            f"p({name})": [f"{p:.4f}" for p in column] for name, column in zip(classes, probabilities.T, strict=True)
        }
        ids = {self.config.id: [self._ids[i] for i in batch["index"].tolist()]} if self._ids else {}
        return ids | {self._table.labels.name: [classes[i] for i in probabilities.argmax(1)]} | shown

"""The contract of a workload, all that the loop knows about it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.torch_private import SeesConversions
from trainer.common.validation import expanded
from trainer.config import FlagGroup
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.order import SampleKeys
from trainer.loading.streams import KeyedStream

Sums = dict[str, Tensor]
Rows = dict[str, Tensor]
ParamGroup = dict[str, Any]
ProgressBar = Callable[[Iterable[Any], str], Iterable[Any]]


class PerSample(NamedTuple):
    """Output per sample of an objective in eval mode, for metrics that do not add up: AUC, F1, BLEU.

    values: (B, ...), one row per sample, of the same row shape in all batches; any type.
    """

    values: Tensor


class Exported(NamedTuple):
    """A module for `--export`, with one call of it.

    inputs: by name and in the order of its forward's arguments. expected: the trained model's output: tensors, or
    tuples, lists or dictionaries of them. lengths: dynamic dimensions by input; dimensions that differ between the
    calls of several batches, such as the number of samples, are dynamic anyway.
    """

    program: nn.Module
    inputs: Mapping[str, Any]
    expected: Any
    lengths: Mapping[str, Sequence[int]] = {}


class Baseline(NamedTuple):
    """A simple method's scores on a run's data.

    metrics: by the names of the run's, such as "val/ndcg@10". flags: of the task, to train it by a command line; empty
    if it is not a model of the task.
    """

    metrics: Mapping[str, float]
    flags: str = ""


@dataclass
class NoFlags(FlagGroup):
    """Task: no flags of its own"""


class At(NamedTuple):
    """The run's position, available to a task as `at`.

    step, num_steps: optimizer steps done, over all phases, and in the whole run. epoch: the current one, from 0.
    progress: completed share of the run, from 0 to 1; in a step, at its middle. phase: of the step; "" between steps.
    split: the data set being evaluated, such as "val"; "train" in a step and for training metrics. state: last result
    of `Task.after_validation`.
    """

    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    progress: float = 0.0
    phase: str = ""
    split: str = "train"
    world_size: int = 1
    rank: int = 0
    state: Mapping[str, Any] = {}


Outputs = Mapping[str, Tensor | PerSample]
"""An objective's results by name; in train mode `Sums`."""
Picture = np.ndarray
"""An image for TensorBoard: (height, width, 3) uint8 RGB."""


class Objective(SeesConversions):
    """A model together with its loss.

    `model` owns every parameter and persistent buffer, so a checkpoint's `model` entry loads into the plain model
    without any trainer.

    In train mode `forward(batch, phase)` returns sums over the batch's samples, including "loss"; in eval mode
    `forward(batch)` returns addable statistics, and `PerSample` for what does not add up. A sum has any shape without a
    batch dimension.

    A loss that couples all samples of a step defines `outputs` and `joint_loss` instead of `forward`.

    `helpers` are modules that are neither trained nor saved, such as a teacher or a feature network of a loss. They
    follow the model's device and type, and stay frozen in eval mode. Checkpoints hold a digest of each.
    """

    model: nn.Module
    helpers: Mapping[str, nn.Module] = {}
    same_masks: ClassVar[bool] = False
    """Whether dropout draws the same numbers in all micro-batches and on all devices of a step.

    For a model that computes the same whole, such as all nodes of a graph, for any part of the global batch.
    """
    coupled: ClassVar[bool] = False
    """Whether the loss couples the samples of a batch on purpose, as a contrastive loss does.

    It then depends on the samples per forward, and the check that parts of a batch add up is skipped. A `joint_loss`
    does not depend on them and does not need this.
    """

    def __init__(self, model: nn.Module, helpers: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.model = model
        # not as submodules, which would be saved, trained and exchanged
        self.helpers = {name: helper.eval().requires_grad_(False) for name, helper in (helpers or {}).items()}

    def also_converted(self) -> Iterable[nn.Module]:
        return self.helpers.values()

    def forward(self, batch: Batch, phase: str = "train") -> Outputs:
        return self.joint_loss(self.outputs(batch, phase), phase)

    @property
    def is_joint(self) -> bool:
        """Returns whether the loss covers all rows of a step."""
        return type(self).joint_loss is not Objective.joint_loss

    def outputs(self, batch: Batch, phase: str = "train") -> Rows:
        """Returns what `joint_loss` needs of each sample: tensors (B, ...) by name, of the same row shape in all
        batches.

        With several micro-batches per step each is computed twice, with the same dropout.
        """
        raise self._lacks_methods()

    def joint_loss(self, rows: Rows, phase: str = "train") -> Sums:
        """Returns sums over the rows of a whole step, of all micro-batches on all devices, including "loss".

        rows: (n, ...) each, in the order of the global batch. The trainer divides the loss by the step's weight. It may
        use parameters of `model`; every process computes it with the same random numbers. In eval mode it gets the rows
        of one batch of one process, and may return `PerSample` too.
        """
        raise self._lacks_methods()

    def _lacks_methods(self) -> UserError:
        name, account = type(self).__name__, "which returns sums, or both `outputs` and `joint_loss`"
        return UserError(f"{name}: must have forward(batch, phase), {account}; see Objective in trainer/task.py")

    def after_step(self, phase: str, at: At) -> None:
        """Runs after each optimizer step, for example to move a teacher's weights towards the student's.

        at: the completed step; a method may omit this argument.

        Called on every process, without gradients, after the phase's parameters changed; on a GPU also after a step
        that was skipped for a non-finite loss or gradient and changed nothing.
        """

    def start_evaluation(self) -> None:
        """Computes what all batches of an evaluation share, such as all nodes of a graph, and keeps it in buffers.

        Called in eval mode before the first batch, without gradients, in the run's precision and with the weights to
        evaluate, on every process; also before `Task.predictions`. `Task.example_pictures` may call it.
        """

    def call_equally(self) -> None:
        """Makes the number of model calls per batch independent of its samples. Raises UserError if that is impossible.

        Called under `--multi-gpu fsdp`, where each call runs collectives, so every process must make it. Objectives
        that split their batches by size or content stop that, or refuse.
        """


class Task(ABC):
    """One workload: its data, its model with loss, its metrics.

    Example of a whole task, in a file sides.py, trained by `python main.py --task sides.py:Sides --num-points 500`:

        from dataclasses import dataclass

        import numpy as np
        import torch.nn.functional as F
        from torch import nn

        from trainer import FlagGroup, Objective, Task, flag

        @dataclass
        class SidesFlags(FlagGroup):
            '''Task: on which side of a line does a point lie?'''

            num_points: int = flag(1000, "training points", at_least=1)

        class Points:
            def __init__(self, num_points, seed):
                self.points = np.random.default_rng(seed).normal(size=(num_points, 2)).astype(np.float32)

            def __len__(self):
                return len(self.points)

            def __getitems__(self, keys):
                points = self.points[keys.index]
                return {"point": points, "side": (points.sum(axis=1) > 0).astype(np.int64)}

        class SidesObjective(Objective):
            def forward(self, batch, phase="train"):
                logits = self.model(batch["point"])
                loss = F.cross_entropy(logits, batch["side"], reduction="sum")
                return {"loss": loss, "correct": (logits.argmax(dim=1) == batch["side"]).sum()}

        class Sides(Task):
            Config = SidesFlags
            monitor = ("val/accuracy", "max")

            def splits(self):
                sizes = {"train": self.config.num_points, "val": 100, "test": 100}
                return {name: Points(size, self.seed + i) for i, (name, size) in enumerate(sizes.items())}

            def build_objective(self):
                return SidesObjective(nn.Linear(2, 2))

            def summarise(self, sums):
                names = {"loss": "loss", "accuracy": "correct"}
                return {name: float(sums[key] / sums["weight"]) for name, key in names.items()}
    """

    Config: ClassVar[type] = NoFlags
    """A dataclass of `trainer.config.flag` fields, each a command-line flag. Default: none."""
    monitor: tuple[str, Literal["max", "min"]] = ("val/loss", "min")
    """The validation metric that defines "best", such as ("val/accuracy", "max") or ("val/far/loss", "min")."""
    phases: tuple[str, ...] = ("train",)
    """Parts of training, each with its own data, loss, parameters and optimizers; may depend on the config.

    They follow one another within an epoch, unless `turns` says otherwise.
    """
    turns: tuple[int, ...] = ()
    """Optimizer steps of each phase before the next one's turn, such as (1, 1); empty: whole phases in turn.

    The first phase's data define the epoch; the others cycle through theirs, with their own epochs.
    """
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of the trainer's flags for this task, by field name: {"lr": 3e-4, "drop_last": True}."""
    examples: ClassVar[Sequence[str]] = ()
    """Flags that `--help` shows as commands, without `--task`: ("--data-dir log.csv --save-dir checkpoints/log",)."""
    predict_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` that `--predict` accepts again, such as the location of data or the content of its table."""
    hold_out_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` that choose the validation set; their flags exclude `--folds`, which chooses it too."""
    headline: tuple[str, ...] = ()
    """Metrics that the console shows, without their split: ("loss", "ndcg@10"). Empty: all.

    Files and TensorBoard get all metrics.
    """
    trains: bool = True
    """Whether this config has anything to train; if not, the command scores as with `--eval-only`."""
    fitted: bool = False
    """Whether `initialise` computes the whole model, for example by counting: it is scored and saved without steps."""
    at: At = At()
    """The run's position, for methods the run calls; not for `collate` and data sets, which are ahead of it."""
    data_facts: Mapping[str, Any] | None = None
    """Result of `describe_data` for a trained run used without its training data; None in training."""

    def __init__(self, config: Any, seed: int, cache_dir: Path) -> None:
        self.config = config
        self.seed = seed
        self._cache_dir = cache_dir

    @property
    def cache_dir(self) -> Path:
        """The folder of `--cache-dir`. Raises UserError if it is in the home of a user without one."""
        try:
            return expanded(self._cache_dir)
        except ValueError as error:
            raise UserError(f"--cache-dir {self._cache_dir}: {error}; name another folder with --cache-dir") from None

    @abstractmethod
    def splits(self) -> Mapping[str, KeyedDataset]:
        """Returns the data sets "train", "test", and for validation "val", any number of "val/NAME", or both.

        Without a validation set the last weights count as the best. Without a test set a run's scores are its best
        validation scores. May raise UserError. Called several times: cache the result.
        """

    @abstractmethod
    def build_objective(self) -> Objective:
        """Builds a freshly initialised model with its loss, on the CPU, in float32.

        It must not need the data, so that a trained model can be used without them; see `initialise`, and `data_facts`
        for a model whose size depends on them.
        """

    def describe_data(self) -> Mapping[str, Any]:
        """Returns what a trained model needs to know of its training data besides weights, such as an alphabet; plain
        values.

        Stored in every checkpoint. When one is used without the data, `data_facts` is set to it before
        `build_objective` and `new_data`; a run does not resume with data of different facts. Called after `splits`.
        """
        return {}

    def data_digest(self) -> str | None:
        """Returns a digest that changes with the training or held-out data; None, the default, if unknown.

        A run that resumes or is scored with a different digest says so. Called after `splits` on every process;
        processes with different digests do not train, so hash contents, not paths or times.
        """
        return None

    def remarks(self) -> Sequence[str]:
        """Returns sentences for the user about the data, such as dropped or suspicious samples; default: none.

        Shown at the start of a run, after `splits`; with `--predict` after `new_data`.
        """
        return ()

    def other_work(self) -> str | None:
        """Does what the flags request instead of training, such as writing data to a file, and returns a description.

        None, the default: nothing is requested. Called on rank 0 only. May raise UserError.
        """
        return None

    def initialise(self, objective: Objective) -> None:
        """Initialises a new model from elsewhere: statistics of the training data, a trained part.

        The raw objective is on its device. Not called if a checkpoint provides all weights. May raise UserError.
        """

    def check_weights(self, objective: Objective) -> None:
        """Raises UserError if the model's weights, for example of a checkpoint, do not fit the data.

        Called on every process with the raw objective on its device, before training and before `--eval-only`, once it
        has its initial weights.
        """

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Converts reduced sums (float64, CPU) to metrics. The trainer adds "weight", the number of loss terms.

        Default: each scalar sum divided by the weight, a mean.

        Gets the statistics of eval mode, and those of train mode unless `summarise_training` is overridden. `PerSample`
        results arrive as one CPU tensor (n, ...), each sample of the data set once, ordered by index. Called on rank 0
        only, whose metrics all ranks use. `at.split` names the data set.
        """
        return means_of(sums)

    def summarise_training(self, sums: dict[str, Tensor], phase: str) -> dict[str, float]:
        """Converts a phase's reduced sums in train mode to metrics.

        Default: `summarise` for a single phase; otherwise the means of scalar sums.
        """
        return self.summarise(sums) if len(self.phases) == 1 else means_of(sums)

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Returns final results for results.json besides metrics, such as a confusion matrix; plain values.

        With several validation sets (`--no-test`) each has its own entry there, by name.
        """
        return {}

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        """Returns images for TensorBoard by name, from the sums that `summarise` gets.

        Called on rank 0 only, after each validation and for the test.
        """
        return {}

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Returns images of a few samples for TensorBoard by name, the same samples each time.

        Called on rank 0 only, after each validation and for the test, with the raw objective in eval mode, without
        gradients, with that evaluation's weights and precision. batch: from `collate`, on the objective's device.
        """
        return {}

    def shipped_weights(self) -> Path | None:
        """Returns a checkpoint that comes with the task, for users with little data; default: none.

        A new run starts with its weights unless a flag names others; weights it lacks stay initialised. `--predict`,
        `--export` and `--eval-only` use it unless `--save-dir` is given and holds a run.
        """
        return None

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads a user's file for `--predict`: unlabelled samples, which `collate` makes into batches.

        Must not need the training data. Raises UserError for a problem with the file. Default: this task cannot label
        new data.
        """
        name = type(self).__name__
        raise UserError(f"--predict {path}: {name}, the task of this run, has no `new_data`: it cannot label files")

    def sample(self) -> Mapping[str, Sequence[Any]] | bytes | None:
        """Returns a sample file for `new_data`, written by `--sample`: CSV columns by name, or bytes; None for none."""
        return None

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the columns of the `--predict` table by name, with one value per sample.

        Called with the raw objective in eval mode, without gradients, in the command line's precision. batch: of
        `new_data`, from `collate`, on the objective's device. Every batch has the same columns.
        """
        raise NotImplementedError(f"{type(self).__name__} has new_data, and must have predictions too")

    def exported(self, objective: Objective, batch: Batch) -> Exported | None:
        """Returns the module that `--export` writes, with one call: the model, or an equivalent that can be exported.

        Called for several evaluation batches, with the raw objective in eval mode, without gradients, after
        `start_evaluation`; the first program is used. batch: from `collate`, on the objective's device.

        None, the default: the objective's `model`, as its forward calls it.
        """
        return None

    def baselines(self) -> Mapping[str, Baseline]:
        """Returns scores of simple methods by name, which a useful model should beat; default: none.

        They are shown, saved and plotted beside the run's, unless `--no-baselines` is given. Called on rank 0 only,
        before training; should take seconds.
        """
        return {}

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """Returns, for `--folds`, flags that hold each fold out of the training data as the validation set.

        Each fold's runs get them in addition to their other flags. May raise UserError. Default: no folds.
        """
        raise UserError(
            f"--folds {num_folds}: this task's data cannot be split into folds; leave it out (for your own task define "
            f"{type(self).__name__}.fold_flags)"
        )

    def ensemble(self, objectives: Sequence[Objective]) -> Objective | None:
        """Returns, for `--seeds`, an evaluation-only objective that scores the mean prediction of trained objectives.

        None, the default: no ensemble.
        """
        return None

    def training_data(self, phase: str) -> KeyedDataset:
        """Returns a phase's training data; default: the data set "train"."""
        return self.splits()["train"]

    def num_samples(self, phase: str) -> int:
        """Returns the samples per epoch of a phase; from more data each epoch takes a random subset."""
        return len(self.training_data(phase))

    def batch_size(self, phase: str, batch_size: int) -> int:
        """Returns the samples per device per forward of a phase. batch_size: of the command line, the default.

        Accumulation and devices multiply it equally in all phases; a phase with twice `--batch-size` also has twice
        `--global-batch-size`, so `--scale-lr` has one factor for all.
        """
        return batch_size

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray] | None:
        """Returns the samples of each optimizer step of an epoch, int64 arrays; a pure function of its arguments and
        `seed`.

        epoch: of the phase's own data, from 0. Batches may differ in size, but every epoch must have `num_samples`
        samples. None, the default: a permutation of all data in batches of global_batch_size. A lazy sequence gives the
        size of all but the last batch as `batch_size`.
        """
        return None

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns samples of the phase that form the largest batch of at most `count` samples: (count,) int64.

        epoch: as in `order`. Those of the last epoch are tried before training, to see whether they fit in memory.
        Default: any samples, assuming all are equally large; only then does cuDNN benchmark its algorithms and compute
        attention, which it plans for every new shape.
        """
        return np.arange(min(count, self.num_samples(phase)))

    def collate(self, samples: Any, keys: SampleKeys) -> Batch:
        """Makes a batch from the result of `__getitems__(keys)`; every tensor has the samples on dim 0.

        Must contain "index" (sample ids, int64) and "weight" (loss terms of each sample, float32). Pad ragged samples
        to `keys.padded_length`. Default: the arrays and tensors of a dictionary, with weight 1 unless "weight" is among
        them.
        """
        if not isinstance(samples, Mapping):
            raise UserError(
                f"Task.collate: `__getitems__` returned a {type(samples).__name__}, not a dictionary of arrays; return "
                "one, or override collate"
            )
        batch = {
            name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            for name, values in samples.items()
        }
        batch["index"] = torch.from_numpy(keys.index)
        batch.setdefault("weight", torch.ones(len(keys.index)))
        return batch

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        """Returns the parameters that a phase trains, in groups; frozen ones (`requires_grad_(False)`) are skipped.

        A group without "weight_decay" gets that of the command line.

        A group may have other settings of its optimizer, such as "betas", and "lr_scale", at least 0: a factor on the
        learning rate of every step; 0 freezes. Not "lr", which the schedule sets. A resumed run takes settings from
        here, not from its checkpoint. Parameters of sparse embeddings must not decay.

        Default: biases and normalisation gains (fewer than two dimensions) are not decayed.
        """
        trained = [p for p in objective.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() >= 2]
        vectors = [p for p in trained if p.dim() < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    def build_optimizers(
        self, phase: str, groups: list[ParamGroup], lr: float
    ) -> Sequence[torch.optim.Optimizer] | None:
        """Returns the optimizers of a phase, which together train each parameter of its groups once.

        groups: from `param_groups`, each with its "weight_decay"; may be split, with "lr_scale" kept. lr: `--lr`, to be
        passed on unchanged, since the schedule sets every group's rate before each step.

        None, the default: `--optimizer`, with SparseAdam for sparse embeddings.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the repeated blocks of the objective's `model`, in execution order; default: none.

        Each is a submodule that a forward calls as a whole, as `block(x)`. They share no modules or parameters.
        """
        return ()

    def lr_factor(self, step: int, total: int) -> float | None:
        """Returns the factor on `--lr` at an optimizer step, at least 0, including warm-up.

        step: optimizer steps done, over all phases. total: of the whole run, if all epochs are as long as the first;
        later steps use the last one's factor. Must depend only on these and `at`, for resumed runs to learn the same.

        None, the default: `--schedule`, the warm-up and `--min-lr`.
        """
        return None

    def after_validation(self, metrics: Mapping[str, float], state: dict[str, Any]) -> Mapping[str, Any]:
        """Makes decisions from validation scores; its result becomes `at.state`.

        metrics: of all validation sets, and of training since the last report. state: its last result, {} at first;
        plain values by name, stored in every checkpoint. Called on rank 0 only.
        """
        return state

    def on_epoch_start(self, objective: Objective, epoch: int, progress: ProgressBar) -> None:
        """Computes persistent buffers of the model before an epoch.

        Called on every process with the raw objective on its device, without gradients, in the run's precision; the
        results must agree. Not called again when a run resumes within an epoch. progress: `progress(items, "what")`
        iterates with a console bar.
        """


def validation_sets(splits: Iterable[str]) -> list[str]:
    """Returns the validation sets among the names of `Task.splits`, "val" and "val/NAME", sorted.

    Sorted so that all processes use one order.
    """
    return sorted(name for name in splits if name.partition("/")[0] == "val")


def training_streams(task: Task) -> dict[str, KeyedStream]:
    """Returns the training streams by phase."""
    datasets = {phase: task.training_data(phase) for phase in task.phases}
    return {phase: dataset for phase, dataset in datasets.items() if isinstance(dataset, KeyedStream)}


def means_of(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns each reduced scalar sum divided by the weight."""
    numbers = {name: value for name, value in sums.items() if name != "weight" and value.dim() == 0}
    return {name: float(value / sums["weight"]) for name, value in numbers.items()}


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Returns parameters with sparse gradients, those of embeddings built with sparse=True."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return [embedding.weight for embedding in embeddings]

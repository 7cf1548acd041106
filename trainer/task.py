"""Defines the interface between the training loop and a workload: `Task` and `Objective`."""

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
    """Per-sample output of an objective in eval mode, for metrics that are not sums over samples, such as AUC or BLEU.

    values: tensor of shape (B, ...) and any dtype, one entry per sample; only B may differ between batches.
    """

    values: Tensor


class Exported(NamedTuple):
    """A module for `--export`, with example inputs and their output.

    inputs: example values by argument name, in the order of the forward's arguments. expected: the trained model's
    output for `inputs`: tensors, or tuples, lists or dictionaries of tensors. lengths: dimensions to export as dynamic,
    by argument name; dimensions that differ between example batches, such as the batch dimension, are always dynamic.
    """

    program: nn.Module
    inputs: Mapping[str, Any]
    expected: Any
    lengths: Mapping[str, Sequence[int]] = {}


class Baseline(NamedTuple):
    """Scores of a simple method on a run's data.

    metrics: scores by metric name, such as "val/ndcg@10". flags: task flags for training this method, or "".
    """

    metrics: Mapping[str, float]
    flags: str = ""


@dataclass
class NoFlags(FlagGroup):
    """Task: no flags of its own"""


class At(NamedTuple):
    """Current position of a run; a task's methods read it as `self.at`.

    step: completed optimizer steps of all phases. num_steps: optimizer steps of the whole run. epoch: current epoch,
    from 0. progress: completed fraction of the run, from 0 to 1; the current step counts as half completed. phase: the
    step's training phase; "" between steps. split: the data set being evaluated, such as "val"; otherwise "train".
    state: last result of `Task.after_validation`.
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
"""Results of an objective by name. In train mode, all results are sums over samples."""
Picture = np.ndarray
"""An image for TensorBoard: (height, width, 3) uint8 RGB."""


class Objective(SeesConversions):
    """A model together with its loss.

    `model` owns every parameter and persistent buffer, so a checkpoint's entry `model` is the state dict of `model`.

    In train mode `forward(batch, phase)` returns sums over the batch's samples, including "loss". In eval mode
    `forward(batch)` returns sums, and a `PerSample` for each metric that is not a sum over samples. A sum is a tensor
    of any shape without a batch dimension.

    For a loss that depends jointly on all samples of a step, define `outputs` and `joint_loss` instead of `forward`.

    `helpers` are modules that are neither trained nor saved, such as a teacher or a loss's feature network. Helpers
    move to the model's device and dtype, and are always frozen and in eval mode. Checkpoints hold digests of helpers.
    """

    model: nn.Module
    helpers: Mapping[str, nn.Module] = {}
    same_masks: ClassVar[bool] = False
    """Whether dropout uses the same random numbers in all micro-batches and on all devices of a step.

    Use True for a model that processes the same input, such as a whole graph, in every micro-batch.
    """
    coupled: ClassVar[bool] = False
    """Whether the loss intentionally compares samples of a micro-batch with each other, as a contrastive loss does.

    A coupled loss depends on the micro-batch size, so the trainer skips its check that the losses of two half batches
    add up to the loss of the whole batch. Use False for a `joint_loss`, which does not depend on the micro-batch size.
    """

    given_as: ClassVar[Mapping[str, str]] = {}
    """Names in messages by method, for methods that `trainer.fit` builds from arguments; see `method_name`."""

    def __init__(self, model: nn.Module, helpers: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.model = model
        # a plain dictionary, because submodules would be saved, trained and synchronised
        self.helpers = {name: helper.eval().requires_grad_(False) for name, helper in (helpers or {}).items()}

    def also_converted(self) -> Iterable[nn.Module]:
        return self.helpers.values()

    def forward(self, batch: Batch, phase: str = "train") -> Outputs:
        return self.joint_loss(self.outputs(batch, phase), phase)

    @property
    def is_joint(self) -> bool:
        """Whether the objective defines `joint_loss`, a loss over all samples of a step."""
        return type(self).joint_loss is not Objective.joint_loss

    def outputs(self, batch: Batch, phase: str = "train") -> Rows:
        """Returns the inputs of `joint_loss` by name: tensors (B, ...); only B may differ between batches.

        With several micro-batches per step, each is passed to this method twice, with the same dropout masks.
        """
        raise self._lacks_methods()

    def joint_loss(self, rows: Rows, phase: str = "train") -> Sums:
        """Returns sums over all samples of an optimizer step, including "loss".

        rows: results of `outputs`, concatenated over all micro-batches and devices: tensors with one row per sample, in
        the order of the global batch. The trainer divides the loss by the total weight of the step. The method may use
        parameters of `model`. Random numbers drawn in this method are the same on every process. In eval mode `rows`
        contains one batch of one process, and `PerSample` results are allowed.
        """
        raise self._lacks_methods()

    def _lacks_methods(self) -> UserError:
        name, account = type(self).__name__, "which returns sums, or both `outputs` and `joint_loss`"
        return UserError(f"{name}: must have forward(batch, phase), {account}; see Objective in trainer/task.py")

    def after_step(self, phase: str, at: At) -> None:
        """Called after each optimizer step, for example to move a teacher's weights towards the student's.

        at: position during this step; an override may omit this argument.

        Every process calls it, with gradients disabled. On a GPU it is also called after a step that changed no weights
        because its loss or gradient was not finite.
        """

    def start_evaluation(self) -> None:
        """Computes buffers that all batches of an evaluation share, such as embeddings of all nodes.

        Every process calls it before the first batch of an evaluation and before `Task.predictions`. Gradients are
        disabled; the model is in eval mode and in the run's precision, and has the weights to evaluate. An override of
        `Task.example_pictures` may call it too.
        """

    def call_equally(self) -> None:
        """Makes the number of model calls equal for all batches.

        Called with `--multi-gpu fsdp`, where each model call runs collectives, so all processes must make the same
        number of calls. An objective that splits batches must stop splitting them, or raise UserError.
        """


def method_name(owner: object, method: str) -> str:
    """Returns what messages call a method: its own name, or the argument of `trainer.fit` that replaces it."""
    given_as: Mapping[str, str] = getattr(owner, "given_as", {})
    return given_as.get(method, f"{type(owner).__name__}.{method}")


class Task(ABC):
    """Defines a workload: its data, its model with a loss, and its metrics.

    Example: a complete task in a file sides.py, trained by `python main.py --task sides.py:Sides --num-points 500`:

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
    """Dataclass of the task's command-line flags; `flag` defines each field. Default: no flags."""
    monitor: tuple[str, Literal["max", "min"]] = ("val/loss", "min")
    """The validation metric that defines "best", such as ("val/accuracy", "max") or ("val/far/loss", "min")."""
    phases: tuple[str, ...] = ("train",)
    """Names of the training phases, each with its own data, loss, parameters and optimizers.

    An epoch trains the phases one after another, unless `turns` alternates them.
    """
    turns: tuple[int, ...] = ()
    """Consecutive optimizer steps per phase when phases alternate, such as (1, 1); empty: phases do not alternate.

    With alternating phases, an epoch ends when the first phase has used all its data; other phases repeat their data.
    """
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values that the task sets for the trainer's flags, by field name: {"lr": 3e-4, "drop_last": True}."""
    examples: ClassVar[Sequence[str]] = ()
    """Flags of example commands in `--help`, without `--task`: ("--data-dir log.csv --save-dir checkpoints/log",)."""
    predict_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` whose flags `--predict` accepts, such as a flag for the columns of the output table."""
    hold_out_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` that choose the validation set, as `--folds` does; so their flags exclude `--folds`."""
    headline: tuple[str, ...] = ()
    """Metrics that the console shows, named without the split: ("loss", "ndcg@10"). Empty: all metrics.

    Log files and TensorBoard contain all metrics.
    """
    trains: bool = True
    """Whether the command trains a model; if False, it evaluates as with `--eval-only`."""
    fitted: bool = False
    """Whether `initialise` computes the whole model, for example by counting, so that no training steps are needed."""
    at: At = At()
    """Current position of the run. `collate` and data sets must not read it, since they prepare batches in advance."""
    data_facts: Mapping[str, Any] | None = None
    """Result of `describe_data` in a checkpoint that is used without the training data; None during training."""

    def __init__(self, config: Any, seed: int, cache_dir: Path) -> None:
        self.config = config
        self.seed = seed
        self._cache_dir = cache_dir

    @property
    def cache_dir(self) -> Path:
        """Folder named by `--cache-dir`. Raises UserError if a "~" in its path cannot be expanded."""
        try:
            return expanded(self._cache_dir)
        except ValueError as error:
            raise UserError(f"--cache-dir {self._cache_dir}: {error}; name another folder with --cache-dir") from None

    @abstractmethod
    def splits(self) -> Mapping[str, KeyedDataset]:
        """Returns data sets by name: "train", and optionally "test" and validation sets named "val" or "val/NAME".

        Without a validation set the last weights count as the best. Without a test set the run reports its best
        validation scores. Called several times, so cache the result. Raises UserError for invalid data.
        """

    @abstractmethod
    def build_objective(self) -> Objective:
        """Builds a freshly initialised model with its loss, on the CPU, in float32.

        `--predict` and `trainer.load` build the model without the data: sizes that depend on the data must then come
        from `data_facts`. To set initial weights from the data, define `initialise`.
        """

    def describe_data(self) -> Mapping[str, Any]:
        """Returns facts about the training data that a trained model needs, such as an alphabet, as plain values.

        Called after `splits`. Checkpoints contain the result, which becomes `data_facts` when a checkpoint is used
        without the data. A run does not resume on data with different facts.
        """
        return {}

    def data_digest(self) -> str | None:
        """Returns a digest of the training and held-out data, or None, the default, to digest a few samples.

        A run that resumes or is evaluated on data with another digest prints a warning. Every process calls it after
        `splits`. Training does not start if digests differ between processes, so hash contents, not paths or times.
        """
        return None

    def remarks(self) -> Sequence[str]:
        """Returns sentences about the data to print at the start, for example about dropped samples; default: none.

        Called after `splits`, or with `--predict` after `new_data`.
        """
        return ()

    def other_work(self) -> str | None:
        """Performs work that flags request instead of training, such as writing data, and returns a description.

        Returns None, the default, if the flags request no such work. Called on rank 0 only. May raise UserError.
        """
        return None

    def initialise(self, objective: Objective) -> None:
        """Initialises a new model from statistics of the training data or from pretrained modules.

        objective: unwrapped, on this process's device. Not called if a checkpoint provides all weights. May raise
        UserError.
        """

    def check_weights(self, objective: Objective) -> None:
        """Raises UserError if the model's weights, for example from a checkpoint, do not fit the data.

        Every process calls it after weights are initialised or loaded, before training or the evaluation of
        `--eval-only`. objective: unwrapped, on this process's device.
        """

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Converts sums over a data set to metrics.

        Default: each scalar sum divided by "weight".

        sums: the objective's results, summed over batches and processes (float64, CPU), and "weight", the number of
        loss terms. A `PerSample` result is a CPU tensor (n, ...) that contains each sample of the data set once,
        ordered by index. Called on rank 0 only; all ranks use the result. `at.split` names the data set.
        """
        return means_of(sums)

    def summarise_training(self, sums: dict[str, Tensor], phase: str) -> dict[str, float]:
        """Converts sums over a training phase's batches to metrics.

        Default: the result of `summarise` if the task has one phase, otherwise each scalar sum divided by "weight".
        """
        return self.summarise(sums) if len(self.phases) == 1 else means_of(sums)

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Returns further final results for results.json, such as a confusion matrix, as plain values.

        With `--no-test` and several validation sets, results.json contains the details of each set by name.
        """
        return {}

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        """Returns images for TensorBoard by name, drawn from the sums that `summarise` also gets.

        Called on rank 0 only, after each validation and the final test.
        """
        return {}

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Returns images of a few samples for TensorBoard by name; all calls get the same samples.

        Called on rank 0 only, after each validation and the final test, with gradients disabled and the evaluation's
        weights and precision. objective: unwrapped, in eval mode. batch: result of `collate` on the objective's device.
        """
        return {}

    def shipped_weights(self) -> Path | None:
        """Returns the path of a pretrained checkpoint that comes with the task; default: None.

        A new run starts from these weights unless a flag names other weights. Parameters that the checkpoint lacks are
        newly initialised. `--predict`, `--export` and `--eval-only` use this file unless `--save-dir` names a run.
        """
        return None

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads the file of `--predict` and returns a data set of unlabelled samples, which `collate` can batch.

        This method must not read the training data. Raises UserError for an invalid file; the default always does.
        """
        name = type(self).__name__
        raise UserError(f"--predict {path}: the task {name} of this run has no `new_data`, so it cannot label files")

    def sample(self) -> Mapping[str, Sequence[Any]] | bytes | None:
        """Returns an example file for `--predict` as CSV columns by name, or as bytes; default: None, no example."""
        return None

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the columns of the `--predict` table by name, with one value per sample.

        Called with gradients disabled, in the precision of `--amp`. objective: unwrapped, in eval mode. batch: samples
        of `new_data`, from `collate`, on the objective's device. All batches must have the same columns.
        """
        raise NotImplementedError(f"{type(self).__name__} defines new_data, so it must also define predictions")

    def exported(self, objective: Objective, batch: Batch) -> Exported | None:
        """Returns the module that `--export` writes, with example inputs: the model, or an exportable equivalent.

        Called after `start_evaluation` for several evaluation batches, with gradients disabled. The first call's module
        is exported. objective: unwrapped, in eval mode. batch: result of `collate` on the objective's device.

        Returns None, the default, to export the objective's `model` with the inputs that the objective passes to it.
        """
        return None

    def baselines(self) -> Mapping[str, Baseline]:
        """Returns the scores of simple methods that a useful model should beat, by name; default: none.

        The scores are shown, saved and plotted together with the run's scores. Called on rank 0 only, before training,
        unless `--no-baselines` is given. This method should take only seconds.
        """
        return {}

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """Returns, for each fold of `--folds`, the flags that hold the fold out for validation.

        A fold's runs get these flags in addition to their other flags. May raise UserError; the default always does.
        """
        raise UserError(
            f"--folds {num_folds}: this task's data cannot be split into folds; leave --folds out, or define "
            f"{type(self).__name__}.fold_flags in your own task"
        )

    def ensemble(self, objectives: Sequence[Objective]) -> Objective | None:
        """Returns an objective that evaluates the mean prediction of several runs' models, for `--seeds`.

        Returns None, the default, if the task does not support ensembles.
        """
        return None

    def training_data(self, phase: str) -> KeyedDataset:
        """Returns the training data of a phase; default: the data set "train"."""
        return self.splits()["train"]

    def num_samples(self, phase: str) -> int:
        """Returns a phase's number of samples per epoch; if the data set has more, each epoch uses a random subset."""
        return len(self.training_data(phase))

    def batch_size(self, phase: str, batch_size: int) -> int:
        """Returns a phase's number of samples per forward pass on each device. batch_size: `--batch-size`, the default.

        A phase with twice the `--batch-size` also has twice the `--global-batch-size`, so `--scale-lr` computes the
        same factor for all phases.
        """
        return batch_size

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray] | None:
        """Returns the sample indices of each optimizer step of an epoch, as int64 arrays.

        The result must be a pure function of the arguments and `seed`. epoch: number of completed passes over the
        phase's data. Batches may differ in size, but every epoch must have at least `num_samples` samples. A sequence
        with an attribute `batch_size`, the size of all batches except the last, may compute its batches lazily. Returns
        None, the default, for a random permutation of the data in batches of global_batch_size.
        """
        return None

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns the indices of the samples in a phase's largest batch of at most `count` samples, as an int64 array.

        epoch: as in `order`. Before training on a GPU, the trainer tries the largest batch of an epoch to check that it
        fits in memory. Default: the first samples, assuming that all samples have the same size. Overriding this method
        turns off cuDNN benchmarking and cuDNN attention, which would choose algorithms again for each new shape.
        """
        return np.arange(min(count, self.num_samples(phase)))

    def collate(self, samples: Any, keys: SampleKeys) -> Batch:
        """Builds a batch from the result of `__getitems__(keys)`; dim 0 of every tensor is the batch dimension.

        The batch must contain "index" (`keys.index`, int64) and "weight" (each sample's number of loss terms, float32).
        Pad samples of different lengths to `keys.padded_length`. The default expects `samples` to be a dictionary of
        arrays and tensors, and sets "weight" to 1 unless it is given.
        """
        if not isinstance(samples, Mapping):
            raise UserError(
                f"`__getitems__` of the data set returned a {type(samples).__name__}, not a dictionary of arrays; "
                "return one, or override collate"
            )
        batch = {
            name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            for name, values in samples.items()
        }
        if "index" in batch:
            raise UserError("the data have a field 'index', the trainer's name for a sample's number; rename the field")
        batch["index"] = torch.from_numpy(keys.index)
        batch.setdefault("weight", torch.ones(len(keys.index)))
        return batch

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        """Returns the parameters that a phase trains, in groups; the trainer skips parameters without `requires_grad`.

        Called once, when a run starts or resumes, so the result must not depend on `at`. A group without "weight_decay"
        uses `--weight-decay` for all its parameters, biases and normalisation gains included.

        A group may set other options of its optimizer, such as "betas", and "lr_scale": a factor of at least 0 on the
        learning rate. With 0 a group keeps its weights, but its gradients count in `--max-grad-norm`; to freeze
        parameters, put them in no group. A group must not set "lr", which the schedule computes. A resumed run uses the
        result of this method, not its checkpoint's settings. Parameters with sparse gradients must have weight decay 0.

        Default: parameters with fewer than two dimensions (biases, normalisation gains) have weight decay 0.
        """
        trained = [p for p in objective.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() >= 2]
        vectors = [p for p in trained if p.dim() < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    def build_optimizers(
        self, phase: str, groups: list[ParamGroup], lr: float
    ) -> Sequence[torch.optim.Optimizer] | None:
        """Returns the optimizers of a phase; each parameter of the phase's groups must belong to exactly one optimizer.

        groups: result of `param_groups`, with "weight_decay" in each group. A group may be split if both parts keep its
        "lr_scale". lr: `--lr`, to be passed on unchanged: before each step, the schedule sets each group's rate.

        Returns None, the default, to use `--optimizer`, with SparseAdam for sparse embeddings.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the repeated blocks of the model, such as its transformer layers, in execution order; default: none.

        The model's forward must call each block as a whole, as `block(x)`. Blocks must not share modules or parameters.
        """
        return ()

    def lr_factor(self, step: int, total: int) -> float | None:
        """Returns the factor, at least 0, that multiplies `--lr` at an optimizer step; it also replaces the warm-up.

        step: completed optimizer steps of all phases. total: steps of the run if all epochs are as long as the first;
        later steps use the last factor. The result may depend only on `step`, `total` and `at`.

        Returns None, the default, to use `--schedule`, the flags for warm-up and `--min-lr`.
        """
        return None

    def after_validation(self, metrics: Mapping[str, float], state: dict[str, Any]) -> Mapping[str, Any]:
        """Returns the task's own state, updated from validation scores; the result becomes `at.state`.

        metrics: metrics of all validation sets, and training metrics since the previous validation or the start of the
        epoch, whichever is later. state: the previous result, at first {}. Checkpoints contain the result, which must
        map names to plain values. Called on rank 0 only.
        """
        return state

    def on_epoch_start(self, objective: Objective, epoch: int, progress: ProgressBar) -> None:
        """Updates persistent buffers of the model before an epoch.

        Every process calls it, with gradients disabled and in the run's precision, and must compute the same buffers.
        Not called when a run resumes within an epoch, so it must not change which parameters require gradients.
        objective: unwrapped, on this process's device. progress: `progress(items, "label")` iterates over items with a
        progress bar.
        """


def validation_sets(splits: Iterable[str]) -> list[str]:
    """Returns the sorted names of validation sets ("val" and "val/NAME") among the names of `Task.splits`."""
    return sorted(name for name in splits if name.partition("/")[0] == "val")


def training_streams(task: Task) -> dict[str, KeyedStream]:
    """Returns, by phase, the training data that are streams (`KeyedStream`)."""
    datasets = {phase: task.training_data(phase) for phase in task.phases}
    return {phase: dataset for phase, dataset in datasets.items() if isinstance(dataset, KeyedStream)}


def means_of(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns each scalar sum divided by the total weight."""
    return {name: float(value / sums["weight"]) for name, value in sums.items() if name != "weight" and not value.dim()}


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Returns the parameters with sparse gradients: weights of embeddings built with sparse=True."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return [embedding.weight for embedding in embeddings]

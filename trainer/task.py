"""The contract that a workload fulfils. The loop knows nothing else about it."""

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
    """What an objective returns in eval mode beside sums, for metrics that do not add up: AUC, F1, BLEU.

    values: (B, ...), a row for each sample of the batch, equally shaped in all batches; any type.
    """

    values: Tensor


class Exported(NamedTuple):
    """A module as `--export` writes it, with one call of it.

    inputs: by the names of its forward's arguments, in their order. expected: what the trained model answers: tensors,
    in tuples, lists or dictionaries if there are several. lengths: dimensions that may have any size, by input; those
    in which the calls of several batches differ may anyway, such as the number of samples.
    """

    program: nn.Module
    inputs: Mapping[str, Any]
    expected: Any
    lengths: Mapping[str, Sequence[int]] = {}


class Baseline(NamedTuple):
    """What a simple method reaches on the data of a run.

    metrics: by names such as "val/ndcg@10" and "test/ndcg@10", as those of the run. flags: of the task, as a command
    line needs them to make a run of it; empty where it is no model of the task.
    """

    metrics: Mapping[str, float]
    flags: str = ""


@dataclass
class NoFlags(FlagGroup):
    """Task: no flags of its own"""


class At(NamedTuple):
    """Where a run is, as a task finds it in `at`.

    step, num_steps: optimizer steps done before, over all phases, and of the whole run. epoch: the current one, from 0.
    progress: the share of the run that is done, from 0 to 1; of an optimizer step, at its middle. phase: of the step;
    empty between steps. split: the data set that is evaluated, as "val"; "train" in a step, and for what is summarised
    of training. state: what `Task.after_validation` returned last.
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
"""What an objective returns, by name; in train mode `Sums`."""
Picture = np.ndarray
"""What TensorBoard can show: (height, width, 3) uint8, red, green, blue."""


class Objective(SeesConversions):
    """A model together with its loss.

    `model` owns every parameter and persistent buffer, so that a checkpoint's `model` entry loads into the plain
    model without any trainer.

    In train mode `forward(batch, phase)` returns sums over the batch's samples, "loss" among them; in eval mode
    `forward(batch)` returns addable statistics, and `PerSample` what does not add up. A sum has any shape without a
    batch dimension.

    A loss that couples all samples of a step has `outputs` and `joint_loss` in the place of `forward`.

    `helpers` are modules that are neither trained nor saved, such as a teacher or a network whose features a loss
    compares: they go to the model's device and type, and stay frozen and in eval mode. A checkpoint has a digest of
    each.
    """

    model: nn.Module
    helpers: Mapping[str, nn.Module] = {}
    same_masks: ClassVar[bool] = False
    """Whether dropout draws the same in all micro-batches and on all devices of a step.

    For a model that computes the same whole, such as all nodes of a graph, for any part of the global batch.
    """
    coupled: ClassVar[bool] = False
    """Whether the loss couples the samples of a batch on purpose, as a contrastive one does.

    It then depends on how many samples a forward gets, and a start does not check that parts of a batch add up. A
    `joint_loss` depends on no such number, and needs no word of this.
    """

    def __init__(self, model: nn.Module, helpers: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.model = model
        # Not as submodules, which would be saved, trained and exchanged.
        self.helpers = {name: helper.eval().requires_grad_(False) for name, helper in (helpers or {}).items()}

    def also_converted(self) -> Iterable[nn.Module]:
        return self.helpers.values()

    def forward(self, batch: Batch, phase: str = "train") -> Outputs:
        return self.joint_loss(self.outputs(batch, phase), phase)

    @property
    def is_joint(self) -> bool:
        """Whether the loss is one of all rows of a step."""
        return type(self).joint_loss is not Objective.joint_loss

    def outputs(self, batch: Batch, phase: str = "train") -> Rows:
        """What `joint_loss` needs of each sample: tensors (B, ...) by name, equally shaped in all batches.

        Of several micro-batches a step each is computed twice, with the same dropout.
        """
        raise self._lacks_methods()

    def joint_loss(self, rows: Rows, phase: str = "train") -> Sums:
        """Sums over the rows of a whole step, of all its micro-batches on all devices; "loss" among them.

        rows: (n, ...) each, in the order of the global batch. The trainer divides the loss by the step's weight. It may
        use parameters of `model`; every process computes it, with the same random numbers. In eval mode it gets the
        rows of one batch of one process, and may return `PerSample` too.
        """
        raise self._lacks_methods()

    def _lacks_methods(self) -> UserError:
        name, account = type(self).__name__, "which returns sums, or both `outputs` and `joint_loss`"
        return UserError(f"{name}: must have forward(batch, phase), {account}; see Objective in trainer/task.py")

    def after_step(self, phase: str, at: At) -> None:
        """Does what follows each optimizer step, such as moving a teacher's weights towards the student's.

        at: of the step that is done; a method without this argument will do.

        Called on every process, without gradients, once the phase's step has changed the parameters; on a GPU also
        after a step that was left out for a loss or gradient that is not finite, which changes nothing.
        """

    def start_evaluation(self) -> None:
        """Computes what all batches of an evaluation share, such as all nodes of a graph; keeps it in buffers.

        Called in eval mode before the first batch, without gradients, in the run's precision and in the weights that
        are evaluated; on every process, and before `Task.predictions` too. `Task.example_pictures` may call it.
        """

    def call_equally(self) -> None:
        """Calls the model equally often for every batch from now on, whatever its samples. Raises UserError.

        Called under `--multi-gpu fsdp`, where each call exchanges weights, so that every process has to make it. An
        objective that cuts its batches by their size or content stops that, or refuses.
        """


class Task(ABC):
    """One workload: its data, its model with loss, its metrics.

    Example, a whole task. In a file sides.py, `python main.py --task sides.py:Sides --num-points 500` trains it:

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
    """A dataclass of `trainer.config.flag` fields; each becomes a command-line flag. By default there are none."""
    monitor: tuple[str, Literal["max", "min"]] = ("val/loss", "min")
    """The validation metric that defines "best", for example ("val/accuracy", "max") or ("val/far/loss", "min")."""
    phases: tuple[str, ...] = ("train",)
    """Parts of training, each with data, a loss, parameters and optimizers of its own; may depend on the config.

    They come one after another within an epoch, unless `turns` says otherwise.
    """
    turns: tuple[int, ...] = ()
    """Optimizer steps of each phase until the next one has its turn, for example (1, 1); empty: whole phases in turn.

    The first phase's data make the epoch; the others go through theirs again and again, with epochs of their own.
    """
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Other defaults of the trainer's own flags for this task, by field name: {"lr": 3e-4, "drop_last": True}."""
    examples: ClassVar[Sequence[str]] = ()
    """Flags that `--help` shows as commands, without `--task`: ("--data-dir log.csv --save-dir checkpoints/log",)."""
    predict_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` that `--predict` takes anew: where data lie that it needs, what its table shows."""
    hold_out_flags: ClassVar[tuple[str, ...]] = ()
    """Fields of `Config` that say what the validation set is; `--folds`, which says it too, excludes their flags."""
    headline: tuple[str, ...] = ()
    """The metrics that the console shows, without their split: ("loss", "ndcg@10"). Empty shows all.

    The files and TensorBoard get all of them.
    """
    trains: bool = True
    """Whether there is anything to train with this config. If not, the command scores, as `--eval-only` does."""
    fitted: bool = False
    """Whether `initialise` gives the model all that it has, by counting say: it is scored and saved without a step."""
    at: At = At()
    """Where the run is, for the methods that it calls: not for `collate` and data sets, which are ahead of it."""
    data_facts: Mapping[str, Any] | None = None
    """What `describe_data` returned for a trained run that is used without its training data; None in training."""

    def __init__(self, config: Any, seed: int, cache_dir: Path) -> None:
        self.config = config
        self.seed = seed
        self._cache_dir = cache_dir

    @property
    def cache_dir(self) -> Path:
        """`--cache-dir`. Raises UserError where it is in the home of a user who has none."""
        try:
            return expanded(self._cache_dir)
        except ValueError as error:
            raise UserError(f"--cache-dir {self._cache_dir}: {error}; name another folder by --cache-dir") from None

    @abstractmethod
    def splits(self) -> Mapping[str, KeyedDataset]:
        """The data sets "train", those to validate on, "val", or any number of "val/NAME", or both, and "test".

        Without any to validate on the weights after the last epoch count as the best. Without a test set the scores of
        a run are its best ones on the validation set. May raise UserError. Called several times: keep the result.
        """

    @abstractmethod
    def build_objective(self) -> Objective:
        """A freshly initialised model with its loss, on the CPU, in float32.

        It does not need the data, so that a trained model can be used without them; see `initialise`, and for a model
        whose size depends on them `data_facts`.
        """

    def describe_data(self) -> Mapping[str, Any]:
        """What a trained model has to know of its training data besides weights, such as an alphabet; plain values.

        Kept in every checkpoint. Where one is used without the data, `data_facts` is set to it before `build_objective`
        and `new_data`; a run does not go on with data of which other facts are told. Called after `splits`.
        """
        return {}

    def data_digest(self) -> str | None:
        """Differs where what is trained on or held out differs; None, as by default, where that is not told.

        A run that resumes with data of another digest, or is scored on them, says so. Called after `splits`, on every
        process, and processes that come to different ones do not train: a digest is of contents, not of paths or times.
        """
        return None

    def remarks(self) -> Sequence[str]:
        """Sentences that the user should read about the data: what is left out, what looks wrong; by default none.

        Shown at the start of a run, after `splits`; with `--predict` after `new_data`.
        """
        return ()

    def other_work(self) -> str | None:
        """Does what the flags ask for in place of training, such as writing data to a file, and returns what it did.

        None, as by default, where they ask for nothing else. Called on the main process alone. May raise UserError.
        """
        return None

    def initialise(self, objective: Objective) -> None:
        """Gives a new model what it takes from elsewhere: statistics of the training data, a trained part.

        The raw objective is on its device. Not called where a checkpoint brings all of that. May raise UserError.
        """

    def check_weights(self, objective: Objective) -> None:
        """Raises UserError where the model's weights do not go with the data: those of a checkpoint, say.

        Called on every process with the raw objective on its device, before training and before `--eval-only`, once it
        has the weights to begin with.
        """

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Turns reduced sums (float64, CPU) into metrics. The trainer adds "weight", the number of loss terms.

        By default a metric for each sum that is a single number: divided by the weight, a mean.

        Gets the statistics of eval mode, and those of train mode too unless `summarise_training` does. What eval mode
        returns as `PerSample` comes as one tensor (n, ...) on the CPU, each sample of the data set once, in order of
        index. Called on the main process alone, whose metrics count on all of them. `at.split` says of which data set.
        """
        return means_of(sums)

    def summarise_training(self, sums: dict[str, Tensor], phase: str) -> dict[str, float]:
        """Turns a phase's reduced sums in train mode into metrics.

        By default `summarise` does it where there is one phase; of several, the means of all that are single numbers.
        """
        return self.summarise(sums) if len(self.phases) == 1 else means_of(sums)

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """What results.json holds of the final scores besides metrics, for example a confusion matrix; plain values.

        Of several validation sets (`--no-test`) each has its own there, by its name.
        """
        return {}

    def pictures(self, sums: dict[str, Tensor]) -> Mapping[str, Picture]:
        """What TensorBoard shows of an evaluation besides metrics, by name; from the sums that `summarise` gets.

        Called on the main process alone, after each validation and for the test.
        """
        return {}

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """What TensorBoard shows of a few samples, by name: the same ones after each validation, and for the test.

        Called on the main process alone, with the raw objective in eval mode, without gradients, in the weights and
        the precision of the evaluation before it. batch: as `collate` makes it, on the objective's device.
        """
        return {}

    def shipped_weights(self) -> Path | None:
        """A checkpoint that comes with the task, for users who have little data of their own; by default none.

        A new run begins with its weights unless a flag names others; what the model has beside them stays initialised.
        `--predict`, `--export` and `--eval-only` take it unless `--save-dir` is given and holds a run.
        """
        return None

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads a user's file for `--predict`: samples without labels, which `collate` makes into batches.

        Must not need the training data. Raises UserError for whatever is wrong with the file. By default that this task
        cannot label new data.
        """
        name = type(self).__name__
        raise UserError(f"--predict {path}: {name}, the task of this run, has no `new_data`: it cannot label files")

    def sample(self) -> Mapping[str, Sequence[Any]] | bytes | None:
        """A file such as `new_data` reads, for `--sample`: the columns of a CSV by name, or bytes; None for no such."""
        return None

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """The columns of the table that `--predict` writes, by name; one value per sample in each.

        Called with the raw objective in eval mode, without gradients, in the precision of the command line. batch: of
        `new_data`, as `collate` makes it, on the objective's device. Every batch gives the same columns.
        """
        raise NotImplementedError(f"{type(self).__name__} has new_data, and must have predictions too")

    def exported(self, objective: Objective, batch: Batch) -> Exported | None:
        """What `--export` writes, with one call of it: the model, or the same function in a form that can be exported.

        Called for several batches of an evaluation, with the raw objective in eval mode, without gradients, after
        `start_evaluation`; the first program is taken. batch: as `collate` makes it, on the objective's device.

        None, as by default: the objective's `model`, as its forward calls it.
        """
        return None

    def baselines(self) -> Mapping[str, Baseline]:
        """Simple methods by name, which a model that is worth its training is better than; by default none.

        Their scores are shown, kept and drawn beside those of the run, unless `--no-baselines` is given. Called on the
        main process alone, before training; it should take seconds.
        """
        return {}

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """For `--folds`: command-line flags that hold each fold out of the training data as a validation set.

        Every run of a fold gets them beside its other flags. May raise UserError. By default this task has no folds.
        """
        raise UserError(
            f"--folds {num_folds}: this task's data cannot be divided into folds; leave it out (for a task of your own "
            f"write `fold_flags` of {type(self).__name__})"
        )

    def ensemble(self, objectives: Sequence[Objective]) -> Objective | None:
        """For `--seeds`: an objective for evaluation alone, which scores the mean of the predictions of trained ones.

        None, as by default, if there is no such thing.
        """
        return None

    def training_data(self, phase: str) -> KeyedDataset:
        """What a phase trains on; by default the data set "train"."""
        return self.splits()["train"]

    def num_samples(self, phase: str) -> int:
        """Samples in one epoch of the phase; where its data has more, each epoch takes a random part of them."""
        return len(self.training_data(phase))

    def batch_size(self, phase: str, batch_size: int) -> int:
        """Samples of the phase per device per forward. batch_size: that of the command line, taken by default.

        Accumulation and devices multiply it alike in all phases; a phase that takes twice `--batch-size` also takes
        twice `--global-batch-size`. So the factor of `--scale-lr` is one for all.
        """
        return batch_size

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray] | None:
        """The samples of each optimizer step of an epoch, a function of nothing but these and `seed`: int64 arrays.

        epoch: of the phase's own data, from 0. The batches may differ in size, but every epoch has `num_samples`
        samples in all. None, as by default: a permutation of all data in batches of global_batch_size. A sequence
        that makes its batches when they are asked for has the size of all but the last as `batch_size`.
        """
        return None

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """The samples of the phase that together make the largest batch of at most `count`: (count,) int64.

        epoch: as in `order`. Those of the last epoch are tried before training, to find out whether they fit into
        memory. By default any, which is right where all samples are equally large; only then does cuDNN measure which
        of its algorithms is fastest for their shape, and compute attention, for which it plans anew for every shape.
        """
        return np.arange(min(count, self.num_samples(phase)))

    def collate(self, samples: Any, keys: SampleKeys) -> Batch:
        """A batch from what `__getitems__(keys)` returned; every tensor has the samples on dim 0.

        Carries "index" (sample ids, int64) and "weight" (number of loss terms of each sample, float32). Ragged samples
        are padded to `keys.padded_length`. By default of the arrays and tensors of a dictionary, each sample with a
        weight of 1 unless "weight" is among them.
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
        """Parameters that the phase trains, but for those that `build_objective` has frozen by `requires_grad_(False)`.

        A group without "weight_decay" gets that of the command line.

        A group may carry any other setting of its optimizer too, such as "betas", and "lr_scale", at least 0: a factor
        on the learning rate of every step, 0 freezes. Not "lr", which the schedule sets. Settings are taken from here
        when a run resumes, not from its checkpoint. Parameters of sparse embeddings must not decay.

        By default biases and normalisation gains (everything of fewer than two dimensions) are not decayed.
        """
        trained = [p for p in objective.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() >= 2]
        vectors = [p for p in trained if p.dim() < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    def build_optimizers(
        self, phase: str, groups: list[ParamGroup], lr: float
    ) -> Sequence[torch.optim.Optimizer] | None:
        """The optimizers of the phase, which together train each parameter of its groups once.

        groups: of `param_groups`, each with its "weight_decay"; may be divided, and "lr_scale" must stay with its
        parameters. lr: `--lr`, to pass on as it is, since the schedule sets every group's rate before each step.

        None, as by default, if the flags shall say: `--optimizer`, with SparseAdam for parameters of sparse embeddings.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of the objective's `model`, in the order in which they run; by default none.

        Each is a submodule that a forward calls as a whole, as `block(x)`. No two share a module or a parameter.
        """
        return ()

    def lr_factor(self, step: int, total: int) -> float | None:
        """The factor on `--lr` at an optimizer step, at least 0, warm-up included.

        step: optimizer steps done before it, over all phases. total: of the whole run, if all epochs have as many as
        the first; what comes later has the factor of the last step of these. A function of these and of `at` alone, or
        a resumed run would learn something else.

        None, as by default, if the flags shall say: `--schedule`, the warm-up and `--min-lr`.
        """
        return None

    def after_validation(self, metrics: Mapping[str, float], state: dict[str, Any]) -> Mapping[str, Any]:
        """Decides by the scores of a validation, and returns what is to be known of it from now on, as `at.state`.

        metrics: of all validation sets, and of training since the last report. state: what it returned last, {} at
        first; plain values by name, which every checkpoint keeps. Called on the main process alone.
        """
        return state

    def on_epoch_start(self, objective: Objective, epoch: int, progress: ProgressBar) -> None:
        """Computes before an epoch what the model keeps in persistent buffers.

        Called on the raw objective on its device, without gradients, in the run's precision; on every process, where it
        must give the same. Not called again when a run resumes in mid-epoch. progress: `progress(items, "what")` goes
        through the items with a bar on the console.
        """


def validation_sets(splits: Iterable[str]) -> list[str]:
    """Those of the names of `Task.splits` that are validated on: "val" and "val/NAME".

    Sorted, since all processes must go through them in one order, whatever that of `splits` is on each.
    """
    return sorted(name for name in splits if name.partition("/")[0] == "val")


def training_streams(task: Task) -> dict[str, KeyedStream]:
    """The data of each phase that trains on a stream."""
    datasets = {phase: task.training_data(phase) for phase in task.phases}
    return {phase: dataset for phase, dataset in datasets.items() if isinstance(dataset, KeyedStream)}


def means_of(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Each reduced sum that is a single number, divided by the weight."""
    numbers = {name: value for name, value in sums.items() if name != "weight" and value.dim() == 0}
    return {name: float(value / sums["weight"]) for name, value in numbers.items()}


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """Those whose gradients are sparse, if they get any: of embeddings built with sparse=True."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return [embedding.weight for embedding in embeddings]

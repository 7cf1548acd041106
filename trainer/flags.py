"""All flags of the trainer, grouped as in `--help`. A task defines its own flags in `Task.Config`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

from trainer.common import forms
from trainer.common.errors import UserError
from trainer.common.files import require_regular
from trainer.common.validation import split_name
from trainer.config import FlagGroup, flag, flag_name, shown

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep"
MOST_SAMPLES = 2**31 - 1
"""Largest batch size; products of larger batch sizes would overflow int64."""
MOST_THREADS = 1024
"""Largest number of threads per process; starting far more threads fails silently."""
MOST_PROCESSES = 1024
"""Largest number of processes per machine."""
LOGGERS = ("wandb", "mlflow")
"""Names that `--logger` accepts, in addition to FILE:CLASS."""
RETIRED = {
    "--hang-timeout-s": "was removed: --dist-timeout-s is the only time limit; leave this flag out",
    "--straggler-factor": "was removed: ranks over 1.3 times the median time are reported; leave this flag out",
    "--take-over-lock": "was removed: a lock that is not renewed is taken over automatically; leave this flag out",
    "--whole-histories": "was removed: whole histories are used unless --last-items-only is given; leave this flag out",
    "--job-id": "was removed: a lock that is not renewed is taken over automatically; leave this flag out",
    "--unreadable": "was renamed; use --on-bad, with drop instead of skip",
}
"""Messages for retired flags. The trainer ignores retired flags in config files and checkpoints."""
Schedule = Literal["cosine", "linear", "constant", "wsd", "plateau"]
OptimizerName = Literal["adamw", "adam", "sgd", "muon"]


class OptimizerFacts(NamedTuple):
    """Facts about one of PyTorch's optimizers.

    type: class, or () if this torch lacks it. settings: flags that set its arguments. state: its state tensors with the
    shape of their parameter, each with the setting that creates it, or None. has_fused: whether it has a fused step,
    which CUDA graphs can capture.
    """

    type: Any
    settings: tuple[str, ...]
    state: Mapping[str, str | None]
    has_fused: bool = False


_ADAM = (("betas", "eps"), {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"})
_OF_RMSPROP = {"square_avg": None, "grad_avg": "centered", "momentum_buffer": "momentum"}
OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(torch.optim.AdamW, *_ADAM, has_fused=True),
    "adam": OptimizerFacts(torch.optim.Adam, *_ADAM, has_fused=True),
    "sgd": OptimizerFacts(torch.optim.SGD, ("momentum", "nesterov"), {"momentum_buffer": "momentum"}, has_fused=True),
    "muon": OptimizerFacts(getattr(torch.optim, "Muon", ()), ("momentum",), {"momentum_buffer": None}),
    "sparse": OptimizerFacts(torch.optim.SparseAdam, *_ADAM),
    "rmsprop": OptimizerFacts(torch.optim.RMSprop, (), _OF_RMSPROP),
}
"""Optimizers by `--optimizer`; "sparse" trains sparse embeddings, and only a task can choose "rmsprop"."""
SETTINGS = tuple(dict.fromkeys(name for facts in OPTIMIZERS.values() for name in facts.settings))


def _with(setting: str, *more: OptimizerName) -> dict[str, tuple[str, ...]]:
    """Returns the `needs` of a flag that sets an optimizer's argument. more: other optimizers that use the flag."""
    return {"optimizer": tuple(n for n in get_args(OptimizerName) if n in more or setting in OPTIMIZERS[n].settings)}


ADAM = _with("betas", "muon")
FSDP = {"multi_gpu": forms.SHARDING}
NOT_WITH_A_USE = ("fresh", "init_from", "init_from_partial", "eval_only")
"""Fields whose flags cannot be combined with `--predict`, `--sample` or `--export`, since these do not train."""


@dataclass
class RunFlags(FlagGroup):
    """What to train"""

    task: str = flag(
        "", "built-in task, or path/to/file.py:ClassName; ClassName is your own task class", common=True, local=True,
        from_record="refused",
    )  # fmt: skip
    epochs: int | None = flag(
        None, "passes over the training data (default: 20)", common=True, excludes=("max_steps",), at_least=1
    )
    max_steps: int | None = flag(
        None, "stop after STEPS optimizer steps instead of after --epochs, even within an epoch", at_least=1
    )
    max_minutes: float = flag(
        0.0, "save and exit after MINUTES of training; earlier sessions count too; 0: no limit", common=True, at_least=0
    )
    eval_every: int | None = flag(
        None, "validate every EPOCHS epochs and after the last epoch (default: 1)", metavar="EPOCHS",
        excludes=("eval_every_steps",), at_least=1,
    )  # fmt: skip
    eval_every_steps: int | None = flag(
        None, "validate every STEPS optimizer steps, instead of --eval-every", metavar="STEPS", at_least=1
    )
    eval_start: bool = flag(
        False, "also validate the initial weights; they are saved as best if training does not improve on them"
    )
    seed: int = flag(
        0, "random seed; it sets initial weights, sample order, augmentation and dropout", common=True, at_least=0,
        below=2**63,
    )  # fmt: skip
    num_workers: int | Literal["auto"] = flag(
        "auto", "data-loading processes per rank; 0: load in the training process, which is fastest for arrays in "
        "memory; auto: 0 on the CPU, up to 8 on a GPU if they save time in the first steps", local=True, at_least=0,
    )  # fmt: skip
    data_on: Literal["auto", "host", "device"] = flag(
        "auto", "where to keep data sets and build batches; host: in CPU memory; device: on the GPU; auto: on the GPU "
        "if the data sets take at most a quarter of its free memory", local=True,
    )  # fmt: skip
    cache_dir: Path = flag(
        DEFAULT_CACHE, "folder in which parsed data sets are cached for all ranks and runs; a data file counts as "
        "changed if its path, size or modification time differs", local=True,
    )  # fmt: skip
    log_interval: int = flag(50, "log every STEPS optimizer steps", metavar="STEPS", at_least=1)
    logger: tuple[str, ...] | None = flag(
        None, "also log to wandb, mlflow or your own path/to/file.py:ClassName; several loggers may be given",
        metavar="LOGGER", local=True, from_record="refused",
    )  # fmt: skip
    no_baselines: bool = flag(False, "do not score the task's simple baseline models")
    check_task: bool = flag(
        False, "do not train: check in float64 that loss and metrics do not depend on how batches are split",
        from_record="ignored",
    )  # fmt: skip
    no_test: bool = flag(
        False, "score the last weights on the validation set instead of the test set; for comparing settings"
    )

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            self.epochs = 20
        if self.eval_every is None and self.eval_every_steps is None:
            self.eval_every = 1

    def problems(self) -> list[str]:
        found = []
        for logger in [each for each in self.logger or () if each not in LOGGERS]:
            try:
                split_name(logger, "--logger")
            except UserError as error:
                found.append(str(error))
        return found

    @property
    def length_flag(self) -> str:
        return "--epochs" if self.max_steps is None else "--max-steps"


@dataclass
class BatchFlags(FlagGroup):
    """Batches and learning"""

    batch_size: int = flag(
        32, "samples per device and forward pass; halved if GPU memory runs out, while the global batch stays the "
        "same", metavar="SIZE", common=True, at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip
    grad_accum_steps: int = flag(
        1, "forward/backward passes accumulated per optimizer step", at_least=1, at_most=MOST_SAMPLES
    )
    global_batch_size: int | None = flag(
        None, "samples per optimizer step on all devices together; sets --grad-accum-steps", metavar="SIZE",
        common=True, excludes=("grad_accum_steps",), at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip
    parts: int = flag(
        0, "get bit-identical results on 1 to N devices; N and the number of devices must be powers of two; each "
        "global batch is split into N parts, whose gradients are added in a fixed order; the global batch defaults to "
        "N times --batch-size; 0: off", metavar="N", common=True, excludes=("grad_accum_steps",), at_least=0,
        at_most=MOST_SAMPLES,
    )  # fmt: skip
    drop_last: bool = flag(False, "drop the last global batch of an epoch if it is incomplete")
    eval_batch_size: int | None = flag(
        None, "samples per device and forward pass in evaluation; does not change metrics (default: --batch-size)",
        at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [f"--parts {self.parts}: must be a power of two"] if self.parts & (self.parts - 1) else []


@dataclass
class LearningFlags(FlagGroup):
    """Batches and learning"""

    optimizer: OptimizerName = flag(
        "adamw", "optimizer; muon: Muon for the weight matrices of hidden layers, AdamW for other parameters; a task "
        "may define its own optimizer", common=True, displaces=SETTINGS,
    )  # fmt: skip
    lr: float = flag(1e-3, "learning rate after warm-up", common=True, above=0)
    min_lr: float = flag(
        0.0, "final learning rate, or lower bound of --schedule plateau; must be 0 with --schedule constant", at_least=0
    )
    schedule: Schedule = flag(
        "cosine", "learning-rate schedule after warm-up; wsd: constant, then a 1 - sqrt decay over the last fifth of "
        "the run; plateau: reduced when the validation score stops improving", common=True,
    )  # fmt: skip
    plateau_factor: float = flag(
        0.1, "factor by which --schedule plateau multiplies the learning rate", needs={"schedule": ("plateau",)},
        above=0, below=1,
    )  # fmt: skip
    plateau_patience: int = flag(
        10, "validations without improvement before --schedule plateau reduces the learning rate",
        needs={"schedule": ("plateau",)}, at_least=1,
    )  # fmt: skip
    warmup_epochs: float | None = flag(
        None, "epochs of linear warm-up; fractions are allowed (default: a tenth of the run)", common=True,
        excludes=("warmup_steps",), at_least=0,
    )  # fmt: skip
    warmup_steps: int | None = flag(None, "optimizer steps of linear warm-up, instead of --warmup-epochs", at_least=0)
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "scale --lr; linear: by global batch / one device's batch; sqrt: by the square root of this ratio"
    )
    weight_decay: float = flag(
        0.01, "weight decay; not applied to norm layers and biases, except in a task's own param_groups; adamw and "
        "muon: decoupled; adam and sgd: added to the gradient", common=True, at_least=0,
    )  # fmt: skip
    betas: tuple[float, ...] | None = flag(
        None, "betas of adamw, adam and muon's AdamW part (default: 0.9 0.999)", needs=ADAM, at_least=0, below=1
    )
    eps: float | None = flag(None, "epsilon of adamw, adam and muon's AdamW part (default: 1e-08)", needs=ADAM, above=0)
    momentum: float | None = flag(
        None, "momentum of sgd and muon (default: 0 for sgd, 0.95 for muon)", needs=_with("momentum"), at_least=0,
        below=1,
    )  # fmt: skip
    nesterov: bool = flag(False, "sgd: use Nesterov momentum; muon always uses it", needs=_with("nesterov"))
    max_grad_norm: float = flag(1.0, "clip the global gradient norm to NORM; 0: no clipping", at_least=0)
    sam_rho: float = flag(
        0.0, "radius of sharpness-aware minimisation (SAM), for example 0.05; each step uses the gradient at weights "
        "moved uphill by this distance; 0: off", at_least=0,
    )  # fmt: skip
    ema_decay: float = flag(
        0.0, "decay of an exponential moving average of the weights, for example 0.999, and at most (1 + n) / (10 + n) "
        "after n steps; averaged weights are evaluated and saved; 0: off", at_least=0, below=1,
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop", "what to do if a loss or gradient is not finite; stop: exit with an error; skip: omit the step"
    )
    early_stopping_patience: int = flag(
        0, "stop training after N validations without improvement; 0: never", metavar="N", at_least=0
    )

    def problems(self) -> list[str]:
        found = []
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: must not be above --lr {self.lr}")
        if self.min_lr > 0 and self.schedule == "constant":
            found.append(f"--min-lr {self.min_lr}: --schedule constant never reaches it; omit one of the two flags")
        if self.betas is not None and len(self.betas) != 2:
            found.append(f"--betas {shown(self.betas)}: must be two values")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            found.append("--nesterov: needs --momentum above 0; add --momentum")
        return found


@dataclass
class PrecisionFlags(FlagGroup):
    """Devices, precision and speed"""

    amp: Literal["auto", "bf16", "fp16", "off"] = flag(
        "auto", "mixed precision; auto: bf16 on GPUs that support it, fp16 on older GPUs, off on the CPU", common=True
    )
    no_amp: bool = flag(False, "the same as --amp off", hidden=True, excludes=("amp",))
    dtype: Literal["float32", "float64"] = flag("float32", "data type of the parameters")
    deterministic: bool = flag(
        False, "on GPUs, use only deterministic algorithms, which are slower; operators that have none raise an error"
    )

    def __post_init__(self) -> None:
        if self.no_amp and self.amp == "auto":
            self.amp = "off"

    def problems(self) -> list[str]:
        if self.dtype == "float64" and self.amp in ("bf16", "fp16"):
            return [f"--amp {self.amp}: needs --dtype float32; leave out --amp or --dtype"]
        return []


@dataclass
class BlockFlags(FlagGroup):
    """Devices, precision and speed"""

    compile: bool = flag(
        False, "compile each block of the model with torch.compile; steps on a GPU become faster, but compiling "
        "may take minutes",
    )  # fmt: skip
    cuda_graphs: Literal["auto", "on", "off"] = flag(
        "off", "run steps as CUDA graphs; small models train faster, with bit-identical results; auto: only "
        "if measured to be faster", common=True, local=True,
    )  # fmt: skip
    grad_checkpointing: bool = flag(
        False, "trade speed for memory: recompute block activations in the backward pass; results are bit-identical"
    )


@dataclass
class DeviceFlags(FlagGroup):
    """Devices, precision and speed"""

    device: str = flag("auto", "device to use: cpu, cuda, cuda:N or auto; auto: a GPU if one is available", common=True)
    num_threads: int | None = flag(
        None, "CPU threads per process (default: OMP_NUM_THREADS if you set it, else 1 with a GPU or --parts, else all "
        "cores divided among this machine's ranks)", local=True, at_least=1, at_most=MOST_THREADS,
    )  # fmt: skip

    def problems(self) -> list[str]:
        known = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,6}))?", self.device)
        if known is None:
            apple = "Apple's GPUs are not supported; use cpu" if self.device.startswith("mps") else ""
            return [f"--device {self.device}: {apple or 'must be auto, cpu, cuda or cuda:N'}"]
        num_gpus = torch.cuda.device_count()
        if self.device.startswith("cuda") and int(known[1] or 0) >= num_gpus:
            return [f"--device {self.device}: {_visible_gpus(num_gpus)}; choose another or --device cpu"]
        return []


def _visible_gpus(count: int) -> str:
    return "no GPU is visible" if not count else f"the visible GPUs are 0 to {count - 1}"


@dataclass
class CheckpointFlags(FlagGroup):
    """The run directory"""

    save_dir: Path = flag(
        Path("checkpoints"), "folder of the run; an unfinished run in it is resumed; the default is named after the "
        "task", common=True, from_record="ignored",
    )  # fmt: skip
    save_every_steps: int = flag(0, "also save a checkpoint every STEPS optimizer steps; 0: off", at_least=0)
    save_every_minutes: float = flag(0.0, "also save a checkpoint every MINUTES; 0: off", at_least=0)
    keep_checkpoints: int = flag(3, "number of newest checkpoints to keep; 0: keep all", metavar="N", at_least=0)
    keep_best: int = flag(1, "also keep the K checkpoints with the best validation scores", metavar="K", at_least=1)
    resume_from: Path | None = flag(
        None, "resume from this checkpoint instead of the newest in --save-dir", metavar="CHECKPOINT",
        from_record="refused", excludes=("init_from", "init_from_partial"),
    )  # fmt: skip
    init_from: Path | None = flag(
        None, "initialise the weights from this file; it may be a state dict or a checkpoint; nothing else "
        "in it is used", metavar="CHECKPOINT", common=True, from_record="refused", excludes=("init_from_partial",),
    )  # fmt: skip
    init_from_partial: Path | None = flag(
        None, "load only the weights in this file whose names and shapes match the model's, and print which "
        "weights were loaded and which were not", metavar="CHECKPOINT", from_record="refused",
    )  # fmt: skip
    fresh: bool = flag(
        False, "start a new run instead of resuming; any existing run is first moved to a subfolder previous-N of "
        "--save-dir", common=True, from_record="ignored", excludes=("resume_from",),
    )  # fmt: skip
    eval_only: bool = flag(
        False, "do not train: score the best weights of --save-dir; the scores are computed on the validation and test "
        "sets; --resume-from selects other weights", common=True, from_record="ignored",
        excludes=("fresh", "init_from_partial"), displaces=("resume_from", "init_from"),
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [
            f"{flag_name(name)} {path}: {'is not a file' if path.exists() else 'does not exist'}; name a file"
            for name in ("resume_from", "init_from", "init_from_partial")
            if (path := getattr(self, name)) is not None and not path.is_file()
        ]


@dataclass
class SeveralFlags(FlagGroup):
    """The run directory"""

    recorded: ClassVar = False
    seeds: int = flag(
        1, "train N runs with consecutive seeds; the first seed is --seed; report the mean and standard deviation of "
        "the scores, and the ensemble's scores; each GPU trains one run at a time; on the CPU, each run takes one "
        "core, or --num-threads cores", metavar="N", common=True, at_least=1,
    )  # fmt: skip
    folds: int = flag(
        0, "train K runs for K-fold cross-validation; each run is scored on the fold of the training data that it "
        "holds out; the test set is not used; 0: off", metavar="K", common=True, at_least=0,
    )  # fmt: skip

    def problems(self) -> list[str]:
        return ["--folds 1: must be at least 2, or 0 for none"] if self.folds == 1 else []

    @property
    def wanted(self) -> bool:
        return self.seeds > 1 or self.folds > 0

    @property
    def as_given(self) -> str:
        given = [f"--seeds {self.seeds}"] * (self.seeds > 1) + [f"--folds {self.folds}"] * (self.folds > 0)
        return " ".join(given)


@dataclass
class PredictFlags(FlagGroup):
    """Using a finished run"""

    recorded: ClassVar = False
    predict: Path | None = flag(
        None, "do not train: predict the samples in this file; the run in --save-dir provides the flags and the best "
        "weights; --resume-from selects other weights", metavar="FILE", common=True, from_record="refused",
        excludes=(*NOT_WITH_A_USE, "export"), displaces=("resume_from",),
    )  # fmt: skip
    sample: Path | None = flag(
        None, "do not train: write an example input file for --predict, from the task's data", metavar="FILE",
        from_record="refused", excludes=(*NOT_WITH_A_USE, "export", "predict"),
    )  # fmt: skip
    output: Path | None = flag(
        None, "CSV file that --predict writes (default: standard output)", metavar="FILE", common=True,
        from_record="refused",
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.predict is not None and self.predict.exists() and not self.predict.is_dir():
            try:
                require_regular(self.predict)
            except OSError as error:
                return [f"--predict {self.predict}: {error.strerror}; give a file or a folder"]
        if self.output is None:
            return []
        given, target = f"--output {self.output}", self.output.resolve()
        if self.predict is None:
            return [f"{given}: works only with --predict; leave it out"]
        if target == self.predict.resolve():
            return [f"{given}: would overwrite the input; name another file"]
        return _problems_of_target(given, self.output)


@dataclass
class ExportFlags(FlagGroup):
    """Using a finished run"""

    recorded: ClassVar = False
    export: Path | None = flag(
        None, "do not train: export the model to this .pt2 file; a program of torch.export that runs without this "
        "trainer, with the best weights of --save-dir or, if given, the weights of --resume-from", metavar="FILE",
        common=True, from_record="refused", excludes=NOT_WITH_A_USE, displaces=("resume_from",),
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.export is None:
            return []
        given = f"--export {self.export}"
        if self.export.suffix != ".pt2":
            return [f"{given}: must end in .pt2 (torch.onnx.export converts a .pt2 file to .onnx)"]
        return _problems_of_target(given, self.export)


def _problems_of_target(given: str, path: Path) -> list[str]:
    target = path.resolve()
    if str(path) == "-" or (path.exists() and not path.is_file()):  # such as /dev/stdout, if it is a pipe
        return [f"{given}: is not a file; name a file"]
    if not target.parent.is_dir():
        return [f"{given}: there is no folder {target.parent}; create it first"]
    if not os.access(target.parent, os.W_OK):
        return [f"{given}: cannot be written: no permission to write to {target.parent}; name another file"]
    return []


@dataclass
class ConfigFlags(FlagGroup):
    """What to train"""

    recorded: ClassVar = False
    config: tuple[Path, ...] | None = flag(
        None, "read flags from TOML files or a run's config.json; later files override earlier files, and the command "
        "line overrides files; a config.json repeats the run that wrote it", metavar="FILE", common=True,
    )  # fmt: skip
    print_config: bool = flag(False, "do not train: print all settings as a TOML file for --config")


@dataclass
class MultiDeviceFlags(FlagGroup):
    """Several devices"""

    multi_gpu: forms.FormName | None = flag(None, forms.HELP, common=True)
    gpu_ids: tuple[int, ...] | None = flag(
        None, "visible GPUs to use, such as 0,1,2 (default: all)", metavar="ID", common=True, local=True
    )
    nproc: int | None = flag(
        None, "number of processes to start; for ddp and fsdp without torchrun (default: one per GPU; 1 on the CPU)",
        common=True, needs={"multi_gpu": forms.PER_PROCESS}, at_least=1, at_most=MOST_PROCESSES,
    )  # fmt: skip
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "backend for communication between processes (default: nccl on GPUs, gloo on the CPU)"
    )
    dist_timeout_s: float = flag(
        600.0, "seconds to wait for another rank before failing with an error that names it", metavar="SECONDS", above=0
    )
    lockstep_every: int = flag(
        500, "check every STEPS optimizer steps and before each save that all ranks have bit-identical weights; 0: off",
        metavar="STEPS", at_least=0,
    )  # fmt: skip
    sync_bn: bool = flag(False, "ddp on GPUs: compute the batch-norm statistics of a micro-batch over all devices")
    find_unused_parameters: bool = flag(
        False, "ddp: allow parameters that some forward passes do not use", needs={"multi_gpu": (forms.USUAL,)}
    )
    reshard: Literal["always", "never"] = flag(
        "always", "fsdp: whether to free a block's gathered parameters after its forward pass; never: keep them until "
        "its backward pass ends, which is faster but takes more memory", needs=FSDP,
    )  # fmt: skip
    shard_size: int | None = flag(
        None, "fsdp: number of ranks that share one copy of the model, for example one machine's ranks; must "
        "evenly divide the number of ranks (default: all)", needs=FSDP, at_least=1,
    )  # fmt: skip
    local_rank: int | None = flag(None, "set by torch.distributed.launch", hidden=True, local=True)

    def problems(self) -> list[str]:
        found = []
        num_gpus = torch.cuda.device_count()
        if self.multi_gpu is None:
            given = [flag_name(field.name) for field in fields(self) if getattr(self, field.name) != field.default]
            advice = f"leave {', '.join(given)} out" if given else "run main.py"
            found.append(f"--multi-gpu: needs a value: dp, ddp or fsdp; to train on one device, {advice}")
        if self.gpu_ids is not None:
            shown = f"--gpu-ids {','.join(map(str, self.gpu_ids))}"
            absent = [i for i in self.gpu_ids if not 0 <= i < num_gpus]
            if absent:
                found.append(f"{shown}: there is no GPU {', '.join(map(str, absent))}; {_visible_gpus(num_gpus)}")
            if len(set(self.gpu_ids)) < len(self.gpu_ids):
                found.append(f"{shown}: names a GPU twice; name each GPU once")
        return found

    @property
    def form(self) -> forms.Form | None:
        return forms.FORMS.get(self.multi_gpu or "")

    @property
    def has_processes(self) -> bool:
        return self.form is not None and self.form.has_processes


@dataclass
class TrainerFlags:
    """Values of the trainer's flags, one attribute per group; `multi` is None in single-device programs."""

    run: RunFlags
    batch: BatchFlags
    learning: LearningFlags
    devices: DeviceFlags
    precision: PrecisionFlags
    blocks: BlockFlags
    checkpoint: CheckpointFlags
    several: SeveralFlags
    prediction: PredictFlags
    exporting: ExportFlags
    files: ConfigFlags
    multi: MultiDeviceFlags | None


GROUPS: dict[str, type[FlagGroup]] = {
    field.name: (get_args(field.type) or (field.type,))[0] for field in fields(TrainerFlags)
}
TRAINER_GROUPS = tuple(GROUPS.values())
"""Groups of flags in the order of `--help`; multi-device flags come last."""

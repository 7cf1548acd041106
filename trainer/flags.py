"""All flags of the trainer, grouped as in `--help`. A task defines its own flags in `Task.Config`."""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal, get_args

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
"""Names that `--logger` accepts, besides FILE:CLASS."""
RETIRED = {
    "--hang-timeout-s": "was removed: --dist-timeout-s is the only time limit; leave it out",
    "--straggler-factor": "was removed: a rank is slow above 1.3 times the median; leave it out",
    "--take-over-lock": "was removed: a lock that is not renewed is taken over automatically; leave it out",
    "--whole-histories": "was removed: whole histories are trained on unless --last-items-only is given",
    "--job-id": "was removed: a lock that is not renewed is taken over automatically; leave it out",
    "--unreadable": "was renamed to --on-bad, with drop instead of skip",
}
"""Messages for retired flags. Config files and checkpoints that contain a retired flag are read without it."""
Schedule = Literal["cosine", "linear", "constant", "wsd", "plateau"]


ADAM = {"optimizer": ("adamw", "adam", "muon")}
FSDP = {"multi_gpu": forms.SHARDING}
NOT_WITH_A_USE = ("fresh", "init_from", "init_from_partial", "eval_only")
"""Fields that exclude `--predict`, `--sample` and `--export`, which use weights without training."""


@dataclass
class RunFlags(FlagGroup):
    """What to train"""

    task: str = flag(
        "", "workload, or path/to/file.py:ClassName; the class is a task of your own", common=True, local=True,
        from_record="refused",
    )  # fmt: skip
    epochs: int | None = flag(
        None, "passes over the training data (default: 20)", common=True, excludes=("max_steps",), at_least=1
    )
    max_steps: int | None = flag(
        None, "length of the run in optimizer steps, instead of --epochs; it may end within an epoch", at_least=1
    )
    max_minutes: float = flag(
        0.0, "save and exit after MINUTES of training; summed over restarts; 0: no limit", common=True, at_least=0
    )
    eval_every: int | None = flag(
        None, "epochs between validations; the last epoch is always validated (default: 1)", metavar="EPOCHS",
        excludes=("eval_every_steps",), at_least=1,
    )  # fmt: skip
    eval_every_steps: int | None = flag(
        None, "optimizer steps between validations, instead of --eval-every", metavar="STEPS", at_least=1
    )
    eval_start: bool = flag(
        False, "also validate before the first step; the initial weights stay the best if training does not improve "
        "them",
    )  # fmt: skip
    seed: int = flag(
        0, "random seed; of initial weights, sample order, augmentation and dropout", common=True, at_least=0,
        below=2**63,
    )  # fmt: skip
    num_workers: int | Literal["auto"] = flag(
        "auto", "data-loading processes per rank; 0: load in the training process, fastest where a batch is only "
        "gathered from memory; auto: 0 on the CPU, up to 8 with a GPU if the first steps show that they save time",
        local=True, at_least=0,
    )  # fmt: skip
    data_on: Literal["auto", "host", "device"] = flag(
        "auto", "where data sets are kept and batches made; auto: on the GPU if they take at most a quarter of its "
        "free memory", local=True,
    )  # fmt: skip
    cache_dir: Path = flag(DEFAULT_CACHE, "folder for parsed data sets; all ranks and runs share it", local=True)
    log_interval: int = flag(50, "optimizer steps between two log lines", metavar="STEPS", at_least=1)
    logger: tuple[str, ...] | None = flag(
        None, "also log to wandb, mlflow, or a logger of your own: path/to/file.py:ClassName; several are allowed",
        metavar="LOGGER", local=True, from_record="refused",
    )  # fmt: skip
    no_baselines: bool = flag(False, "do not score the simple methods that a task compares the run with")
    check_task: bool = flag(
        False, "check in float64 that the task's sums do not depend on how a batch is divided, then exit",
        from_record="ignored",
    )  # fmt: skip
    no_test: bool = flag(
        False, "do not score the test set; the last weights are scored on the validation set, for comparing settings"
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
        32, "samples per device and forward; halved if they do not fit into GPU memory", metavar="SIZE", common=True,
        at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip
    grad_accum_steps: int = flag(1, "forwards per optimizer step", at_least=1, at_most=MOST_SAMPLES)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step on all devices; sets --grad-accum-steps", metavar="SIZE", common=True,
        excludes=("grad_accum_steps",), at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip
    parts: int = flag(
        0, "get the same bits on 1, 2, 4, ... up to N devices; each global batch is cut into N parts with a backward "
        "each, added in a fixed order. N is a power of two; without --global-batch-size a global batch is N times "
        "--batch-size; 0: off", metavar="N", common=True, excludes=("grad_accum_steps",), at_least=0,
        at_most=MOST_SAMPLES,
    )  # fmt: skip
    drop_last: bool = flag(False, "drop the last global batch of an epoch if it is short")
    eval_batch_size: int | None = flag(
        None, "samples per device and forward in evaluation; changes no metric (default: --batch-size)", at_least=1,
        at_most=MOST_SAMPLES,
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [f"--parts {self.parts}: must be a power of two"] if self.parts & (self.parts - 1) else []


@dataclass
class LearningFlags(FlagGroup):
    """Batches and learning"""

    optimizer: Literal["adamw", "adam", "sgd", "muon"] = flag(
        "adamw", "optimizer; muon: Muon for hidden matrices, AdamW for the rest; a task may define its own",
        common=True, displaces=("betas", "eps", "momentum", "nesterov"),
    )  # fmt: skip
    lr: float = flag(1e-3, "learning rate after warm-up", common=True, above=0)
    min_lr: float = flag(0.0, "final learning rate of every schedule but constant; lower bound of plateau", at_least=0)
    schedule: Schedule = flag(
        "cosine", "learning-rate schedule; after warm-up; wsd: constant, then falls as 1 - sqrt over the last fifth "
        "of the run; plateau: lowered when the validation score stops improving", common=True,
    )  # fmt: skip
    plateau_factor: float = flag(
        0.1, "factor by which --schedule plateau lowers the learning rate", needs={"schedule": ("plateau",)}, above=0,
        below=1,
    )  # fmt: skip
    plateau_patience: int = flag(
        10, "evaluations without a better score before --schedule plateau lowers the learning rate",
        needs={"schedule": ("plateau",)}, at_least=1,
    )  # fmt: skip
    warmup_epochs: float | None = flag(
        None, "epochs of linear warm-up; fractions are allowed (default: a tenth of the run)", common=True,
        excludes=("warmup_steps",), at_least=0,
    )  # fmt: skip
    warmup_steps: int | None = flag(None, "optimizer steps of linear warm-up, instead of --warmup-epochs", at_least=0)
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "multiply --lr by global batch / one-device batch (linear), by its square root (sqrt), or not at all"
    )
    weight_decay: float = flag(
        0.01, "weight decay; not of norms and biases; decoupled in adamw and muon, added to the gradient in adam and "
        "sgd", common=True, at_least=0,
    )  # fmt: skip
    betas: tuple[float, ...] | None = flag(
        None, "two decay rates of adamw and adam, also within muon (default: 0.9 0.999)", needs=ADAM, at_least=0,
        below=1,
    )  # fmt: skip
    eps: float | None = flag(None, "epsilon of adamw and adam, also within muon (default: 1e-08)", needs=ADAM, above=0)
    momentum: float | None = flag(
        None, "momentum of sgd and muon (default: 0 for sgd, 0.95 for muon)", needs={"optimizer": ("sgd", "muon")},
        at_least=0, below=1,
    )  # fmt: skip
    nesterov: bool = flag(False, "sgd: Nesterov momentum; muon always has it", needs={"optimizer": ("sgd",)})
    max_grad_norm: float = flag(1.0, "clip the global gradient norm to this; 0: no clipping", at_least=0)
    sam_rho: float = flag(
        0.0, "radius of sharpness-aware minimisation, for example 0.05; each step takes its gradient at weights moved "
        "uphill by this distance; 0: off", at_least=0,
    )  # fmt: skip
    ema_decay: float = flag(
        0.0, "decay of averaged weights, for example 0.999; the average is evaluated and saved; 0: off",
        at_least=0, below=1,
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop", "stop the run, or skip the optimizer step, when a loss or gradient is not finite"
    )
    early_stopping_patience: int = flag(
        0, "stop after N evaluations without a better score; 0: never", metavar="N", at_least=0
    )

    def problems(self) -> list[str]:
        found = []
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: must not be above --lr {self.lr}")
        if self.min_lr > 0 and self.schedule == "constant":
            found.append(f"--min-lr {self.min_lr}: --schedule constant never decays; leave one of them out")
        if self.betas is not None and len(self.betas) != 2:
            found.append(f"--betas {shown(self.betas)}: must be two values")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            found.append("--nesterov: needs --momentum above 0")
        return found


@dataclass
class PrecisionFlags(FlagGroup):
    """Devices, precision and speed"""

    amp: Literal["auto", "bf16", "fp16", "off"] = flag(
        "auto", "mixed precision; auto: bf16 on GPUs that have it, fp16 on older ones, off on the CPU", common=True
    )
    no_amp: bool = flag(False, "the same as --amp off", hidden=True, excludes=("amp",))
    dtype: Literal["float32", "float64"] = flag("float32", "type of the parameters")
    deterministic: bool = flag(
        False, "use deterministic algorithms on GPUs too, where they are slower; refuse an operator without one, of "
        "which the CPU only warns otherwise",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.no_amp and self.amp == "auto":
            self.amp = "off"

    def problems(self) -> list[str]:
        if self.dtype == "float64" and self.amp in ("bf16", "fp16"):
            return [f"--amp {self.amp}: needs --dtype float32; leave it out with float64"]
        return []


@dataclass
class BlockFlags(FlagGroup):
    """Devices, precision and speed"""

    compile: bool = flag(
        False, "compile each block of the model with torch.compile; faster steps on GPUs, after up to minutes of "
        "compiling", common=True,
    )  # fmt: skip
    cuda_graphs: Literal["auto", "on", "off"] = flag(
        "off", "launch steps as CUDA graphs; small models no longer wait for the host, and learn the same bits; auto: "
        "where it is faster", common=True, local=True,
    )  # fmt: skip
    grad_checkpointing: bool = flag(
        False, "recompute each block's activations in the backward pass; less memory, longer steps, the same bits"
    )


@dataclass
class DeviceFlags(FlagGroup):
    """Devices, precision and speed"""

    device: str = flag("auto", "cpu, cuda, cuda:N or auto; auto: a GPU if there is one", common=True)
    num_threads: int | None = flag(
        None, "CPU threads per process; OMP_NUM_THREADS counts too if you set it (default: all cores, shared evenly "
        "by this machine's ranks; 1 with a GPU)", local=True, at_least=1, at_most=MOST_THREADS,
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
    return "this machine shows no GPU" if not count else f"the visible GPUs are 0 to {count - 1}"


@dataclass
class CheckpointFlags(FlagGroup):
    """The run directory"""

    save_dir: Path = flag(
        Path("checkpoints"), "folder of the run; an unfinished run in it is resumed; named after the task unless given",
        common=True, from_record="ignored",
    )  # fmt: skip
    save_every_steps: int = flag(0, "also save every STEPS optimizer steps; 0: off", at_least=0)
    save_every_minutes: float = flag(0.0, "also save every MINUTES; 0: off", at_least=0)
    keep_checkpoints: int = flag(3, "newest checkpoints to keep; 0: all", metavar="N", at_least=0)
    keep_best: int = flag(1, "also keep the K checkpoints with the best validation scores", metavar="K", at_least=1)
    resume_from: Path | None = flag(
        None, "resume from this checkpoint; not from the newest in --save-dir", metavar="CHECKPOINT",
        from_record="refused", excludes=("init_from", "init_from_partial"),
    )  # fmt: skip
    init_from: Path | None = flag(
        None, "start from the weights of this file; nothing else of a checkpoint is used; a plain state dict works too",
        metavar="CHECKPOINT", common=True, from_record="refused", excludes=("init_from_partial",),
    )  # fmt: skip
    init_from_partial: Path | None = flag(
        None, "start from those weights of this checkpoint whose names and shapes match, and list them",
        metavar="CHECKPOINT", from_record="refused",
    )  # fmt: skip
    fresh: bool = flag(
        False, "start over; the run in --save-dir moves to previous-N inside it", common=True, from_record="ignored",
        excludes=("resume_from",),
    )  # fmt: skip
    eval_only: bool = flag(
        False, "do not train: score the best weights of --save-dir; --resume-from chooses others; on validation and "
        "test sets", common=True, from_record="ignored", excludes=("fresh", "init_from_partial"),
        displaces=("resume_from", "init_from"),
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [
            f"{flag_name(name)} {path}: {'is not a file' if path.exists() else 'does not exist'}"
            for name in ("resume_from", "init_from", "init_from_partial")
            if (path := getattr(self, name)) is not None and not path.is_file()
        ]


@dataclass
class SeveralFlags(FlagGroup):
    """The run directory"""

    recorded: ClassVar = False
    seeds: int = flag(
        1, "train with N seeds, from --seed on; shows mean, deviation and ensemble; one run per GPU at a time, on the "
        "CPU one per core, each with one thread unless --num-threads says otherwise", metavar="N", common=True,
        at_least=1,
    )  # fmt: skip
    folds: int = flag(
        0, "cross-validate in K runs; each is scored on the part of the training data that it holds out; the test set "
        "is not used; 0: off", metavar="K", common=True, at_least=0,
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
        None, "do not train: label this file; uses the best weights of --save-dir, or --resume-from, and the flags of "
        "that run", metavar="FILE", common=True, from_record="refused", excludes=(*NOT_WITH_A_USE, "export"),
        displaces=("resume_from",),
    )  # fmt: skip
    sample: Path | None = flag(
        None, "do not train: write a file such as --predict takes, from the generated or given data", metavar="FILE",
        from_record="refused", excludes=(*NOT_WITH_A_USE, "export", "predict"),
    )  # fmt: skip
    output: Path | None = flag(
        None, "CSV table that --predict writes (default: standard output)", metavar="FILE", common=True,
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
            return [f"{given}: belongs to --predict; leave it out"]
        if target == self.predict.resolve():
            return [f"{given}: would overwrite the input; name another file"]
        return _problems_of_target(given, target)


@dataclass
class ExportFlags(FlagGroup):
    """Using a finished run"""

    recorded: ClassVar = False
    export: Path | None = flag(
        None, "do not train: write a .pt2 of torch.export; it holds the best weights of --save-dir, or --resume-from, "
        "and runs without this trainer", metavar="FILE", common=True, from_record="refused", excludes=NOT_WITH_A_USE,
        displaces=("resume_from",),
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.export is None:
            return []
        given, target = f"--export {self.export}", self.export.resolve()
        if target.suffix != ".pt2":
            return [f"{given}: must end in .pt2 (torch.onnx.export converts that to .onnx)"]
        return _problems_of_target(given, target)


def _problems_of_target(given: str, target: Path) -> list[str]:
    if target.exists() and not target.is_file():
        return [f"{given}: is not a file; name one"]
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
        None, "settings from TOML or a run's config.json; later files override earlier ones, and flags override "
        "files; a config.json repeats its run", metavar="FILE", common=True,
    )  # fmt: skip
    print_config: bool = flag(False, "do not train: print all settings as a TOML file for --config")


@dataclass
class MultiDeviceFlags(FlagGroup):
    """Several devices"""

    multi_gpu: forms.FormName | None = flag(None, forms.HELP, common=True)
    gpu_ids: tuple[int, ...] | None = flag(
        None, "visible GPUs to use, for example 0,1,2 (default: all)", metavar="ID", common=True, local=True
    )
    nproc: int | None = flag(
        None, "processes to start without torchrun; for ddp and fsdp (default: one per GPU; 1 on the CPU)", common=True,
        needs={"multi_gpu": forms.PER_PROCESS}, at_least=1, at_most=MOST_PROCESSES,
    )  # fmt: skip
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "communication backend between processes (default: nccl on GPUs, gloo on the CPU)"
    )
    dist_timeout_s: float = flag(
        600.0, "seconds after which a rank stops waiting for another one and names it", metavar="SECONDS", above=0
    )
    lockstep_every: int = flag(
        500, "optimizer steps between bitwise comparisons of all ranks' weights; every save is preceded by one too; "
        "0: off", metavar="STEPS", at_least=0,
    )  # fmt: skip
    sync_bn: bool = flag(False, "ddp on GPUs: batch norm over the micro-batches of all devices")
    find_unused_parameters: bool = flag(
        False, "ddp: allow parameters that some forwards do not use", needs={"multi_gpu": forms.TAKING_UNUSED}
    )
    reshard: Literal["always", "never"] = flag(
        "always", "fsdp: free a block's parameters after its forward; never: keep them until its backward, which is "
        "faster and shards only gradients and optimizer state", needs=FSDP,
    )  # fmt: skip
    shard_size: int | None = flag(
        None, "fsdp: ranks that share one sharded copy of the model, for example those of one machine; must divide "
        "the number of ranks (default: all)", needs=FSDP, at_least=1,
    )  # fmt: skip
    local_rank: int | None = flag(None, "set by torch.distributed.launch", hidden=True, local=True)

    def problems(self) -> list[str]:
        found = []
        num_gpus = torch.cuda.device_count()
        if self.multi_gpu is None:
            found.append("--multi-gpu: needs a value, dp, ddp or fsdp; to train on one device run main.py")
        if self.gpu_ids is not None:
            shown = f"--gpu-ids {','.join(map(str, self.gpu_ids))}"
            absent = [i for i in self.gpu_ids if not 0 <= i < num_gpus]
            if absent:
                found.append(f"{shown}: there is no GPU {', '.join(map(str, absent))}; {_visible_gpus(num_gpus)}")
            if len(set(self.gpu_ids)) < len(self.gpu_ids):
                found.append(f"{shown}: names a GPU twice")
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

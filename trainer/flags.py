"""Every flag of the trainer, in the groups of `--help`. A task has its own, in its `Config`."""

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
"""Largest batch: products of larger numbers are beyond what arrays can be indexed with."""
MOST_THREADS = 1024
"""Most threads of a process: with far more, starting them fails silently."""
MOST_PROCESSES = 1024
"""Most processes of a machine."""
LOGGERS = ("wandb", "mlflow")
"""What `--logger` takes beside a file and a class."""
RETIRED = {
    "--hang-timeout-s": "is no flag any more: --dist-timeout-s is the only time limit; leave it out",
    "--straggler-factor": "is no flag any more: a rank is slow above 1.3 times the median; leave it out",
    "--take-over-lock": "is no flag any more: a lock that nobody renews is taken over by itself; leave it out",
    "--whole-histories": "is no flag any more: whole histories are trained on unless --last-items-only is given",
    "--job-id": "is no flag any more: a lock that nobody renews is taken over by itself; leave it out",
    "--unreadable": "is called --on-bad, with drop for skip; give that",
}
"""What is said to who gives a flag of earlier versions. Files and records that hold one are read without it."""
Schedule = Literal["cosine", "linear", "constant", "wsd", "plateau"]


ADAM = {"optimizer": ("adamw", "adam", "muon")}
FSDP = {"multi_gpu": forms.SHARDING}
NOT_WITH_A_USE = ("fresh", "init_from", "init_from_partial", "eval_only")
"""Excluded where weights are used, and nothing is trained."""


@dataclass
class RunFlags(FlagGroup):
    """What to train"""

    task: str = flag(
        "", "a workload, or a task of your own: path/to/file.py:ClassName", local=True,
        from_record="refused",
    )  # fmt: skip
    epochs: int | None = flag(None, "passes over the training data (default: 20)", excludes=("max_steps",), at_least=1)
    max_steps: int | None = flag(
        None, "optimizer steps of the whole run, instead of --epochs; it may end within an epoch", at_least=1
    )
    max_minutes: float = flag(
        0.0, "pause the run, with everything saved, when it has been trained for so long over all its starts; 0 is off",
        at_least=0,
    )  # fmt: skip
    eval_every: int | None = flag(
        None, "score the validation set after every so many epochs, and after the last (default: 1)", metavar="EPOCHS",
        excludes=("eval_every_steps",), at_least=1,
    )  # fmt: skip
    eval_every_steps: int | None = flag(
        None, "the same in optimizer steps, also within an epoch", metavar="STEPS", at_least=1
    )
    eval_start: bool = flag(
        False, "score the validation set before the first step too: weights that training does not improve are kept",
    )  # fmt: skip
    seed: int = flag(0, "of initial weights, sample order, augmentation and dropout", at_least=0, below=2**63)
    num_workers: int | Literal["auto"] = flag(
        "auto", "data-loading processes per rank; 0 loads in the trainer, which is fastest where a batch is only "
        "gathered from memory; auto: 0 on the CPU, beside a GPU up to 8 if the first steps show that they save time",
        local=True, at_least=0,
    )  # fmt: skip
    data_on: Literal["auto", "host", "device"] = flag(
        "auto", "where data sets lie that can lie on a GPU, and their batches are made; auto: on the GPU if they take "
        "at most a quarter of its free memory", local=True,
    )  # fmt: skip
    cache_dir: Path = flag(DEFAULT_CACHE, "where parsed data sets are kept, shared by all ranks and runs", local=True)
    log_interval: int = flag(50, "optimizer steps between two log lines", metavar="STEPS", at_least=1)
    logger: tuple[str, ...] | None = flag(
        None, "also log to wandb, mlflow, or a logger of your own: path/to/file.py:ClassName; several are allowed",
        metavar="LOGGER", local=True, from_record="refused",
    )  # fmt: skip
    no_baselines: bool = flag(False, "leave out the simple methods whose scores a task shows beside those of the run")
    check_task: bool = flag(
        False, "check in float64 that a task's sums do not depend on how a batch is divided, and end",
        from_record="ignored",
    )  # fmt: skip
    no_test: bool = flag(
        False, "leave the test set alone, and score the validation set with the last weights instead: for comparing "
        "settings",
    )  # fmt: skip

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
    """Batches"""

    batch_size: int = flag(
        32, "samples per device per forward; halved if they do not fit into a GPU's memory", at_least=1,
        at_most=MOST_SAMPLES,
    )  # fmt: skip
    grad_accum_steps: int = flag(1, "forwards per optimizer step", at_least=1, at_most=MOST_SAMPLES)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step over all devices; --grad-accum-steps then follows from it",
        excludes=("grad_accum_steps",), at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip
    parts: int = flag(
        0, "cut each global batch into N parts, each with a backward of its own, and add them up in one order: the "
        "same bits on 1, 2, 4, ... up to N devices. A power of two; without --global-batch-size a global batch is N "
        "times --batch-size; 0 is off", metavar="N", excludes=("grad_accum_steps",), at_least=0, at_most=MOST_SAMPLES,
    )  # fmt: skip
    drop_last: bool = flag(False, "leave out the last global batch of an epoch where it would be short")
    eval_batch_size: int | None = flag(
        None, "samples per device per forward in evaluation; no metric depends on it (default: --batch-size)",
        at_least=1, at_most=MOST_SAMPLES,
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [f"--parts {self.parts}: must be a power of two"] if self.parts & (self.parts - 1) else []


@dataclass
class LearningFlags(FlagGroup):
    """Learning"""

    optimizer: Literal["adamw", "adam", "sgd", "muon"] = flag(
        "adamw", "what makes a step of a gradient; muon: hidden matrices by Muon, the rest by adamw; a task may "
        "bring another",
        displaces=("betas", "eps", "momentum", "nesterov"),
    )  # fmt: skip
    lr: float = flag(1e-3, "learning rate after warm-up", above=0)
    min_lr: float = flag(
        0.0, "learning rate at the end, of every schedule but constant; of plateau the least", at_least=0
    )
    schedule: Schedule = flag(
        "cosine", "the learning rate after warm-up; wsd (warm-up, stable, decay): constant, then down to --min-lr as "
        "1 - sqrt over the last fifth of the run, about the least that ends as well as a cosine; plateau: lowered "
        "when the validation score does not improve",
    )  # fmt: skip
    plateau_factor: float = flag(
        0.1, "by what --schedule plateau multiplies the rate, down to --min-lr", needs={"schedule": ("plateau",)},
        above=0, below=1,
    )  # fmt: skip
    plateau_patience: int = flag(
        10, "after how many evaluations without a better score it does so, and each time after as many more",
        needs={"schedule": ("plateau",)}, at_least=1,
    )  # fmt: skip
    warmup_epochs: float | None = flag(
        None, "epochs of linear warm-up; fractions are allowed (default: a tenth of the run)",
        excludes=("warmup_steps",), at_least=0,
    )  # fmt: skip
    warmup_steps: int | None = flag(None, "the same in optimizer steps", at_least=0)
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "multiply --lr by global batch / one-device batch, by its root, or not at all"
    )
    weight_decay: float = flag(
        0.01, "not applied to norms and biases; decoupled in adamw and muon, added to the gradient in adam and sgd",
        at_least=0,
    )  # fmt: skip
    betas: tuple[float, ...] | None = flag(
        None, "two decay rates of adamw and adam, also within muon (default: 0.9 0.999)", needs=ADAM, at_least=0,
        below=1,
    )  # fmt: skip
    eps: float | None = flag(None, "added to the denominator by the same ones (default: 1e-08)", needs=ADAM, above=0)
    momentum: float | None = flag(
        None, "of sgd (default: 0) and muon (default: 0.95)", needs={"optimizer": ("sgd", "muon")}, at_least=0, below=1
    )
    nesterov: bool = flag(False, "sgd: Nesterov's momentum, which muon always has", needs={"optimizer": ("sgd",)})
    max_grad_norm: float = flag(1.0, "clip the norm of the whole gradient to this; 0 does not clip", at_least=0)
    sam_rho: float = flag(
        0.0, "sharpness-aware minimisation: take each step's gradient at weights that are moved so far uphill, for "
        "example 0.05; 0 is off", at_least=0,
    )  # fmt: skip
    ema_decay: float = flag(
        0.0,
        "evaluate and keep an exponential moving average of the weights, for example 0.999; 0 is off",
        at_least=0,
        below=1,
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop", "when a loss or gradient is not finite: end the run, or leave that optimizer step out"
    )
    early_stopping_patience: int = flag(
        0, "stop after so many evaluations without a better validation score; 0 never stops early", at_least=0
    )

    def problems(self) -> list[str]:
        found = []
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: must not be above --lr {self.lr}")
        if self.min_lr > 0 and self.schedule == "constant":
            found.append(f"--min-lr {self.min_lr}: --schedule constant never comes down; leave one of them out")
        if self.betas is not None and len(self.betas) != 2:
            found.append(f"--betas {shown(self.betas)}: must be two values")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            found.append("--nesterov: needs --momentum above 0")
        return found


@dataclass
class PrecisionFlags(FlagGroup):
    """Precision"""

    amp: Literal["auto", "bf16", "fp16", "off"] = flag(
        "auto", "mixed precision; auto: bf16 on GPUs that have it, fp16 on older ones, off on the CPU"
    )
    no_amp: bool = flag(False, "the same as --amp off", hidden=True, excludes=("amp",))
    dtype: Literal["float32", "float64"] = flag("float32", "type of the parameters")
    deterministic: bool = flag(
        False,
        "only deterministic algorithms, on GPUs too, where they are slower; on the CPU they are taken anyway, and "
        "an operator that has none is warned of; with this flag it is refused",
    )

    def __post_init__(self) -> None:
        if self.no_amp and self.amp == "auto":
            self.amp = "off"

    def problems(self) -> list[str]:
        if self.dtype == "float64" and self.amp in ("bf16", "fp16"):
            return [f"--amp {self.amp}: is for --dtype float32; with float64 leave it out"]
        return []


@dataclass
class BlockFlags(FlagGroup):
    """Speed and memory"""

    compile: bool = flag(
        False, "compile the model by torch.compile, each of its blocks by itself: quicker steps on GPUs, after a start "
        "of up to minutes",
    )  # fmt: skip
    cuda_graphs: Literal["auto", "on", "off"] = flag(
        "off", "record what a training step launches on a GPU, and launch it by one call: small models no longer wait "
        "for the host, and learn the same to the bit; auto: where it is faster", local=True,
    )  # fmt: skip
    grad_checkpointing: bool = flag(
        False, "keep of each block of the model its inputs alone, and compute the rest anew in the backward: less "
        "memory, longer steps, the same result to the bit",
    )  # fmt: skip


@dataclass
class DeviceFlags(FlagGroup):
    """Devices"""

    device: str = flag("auto", "where to train: auto (a GPU if there is one), cpu, cuda or cuda:N")
    num_threads: int | None = flag(
        None, "CPU threads per process; a value of OMP_NUM_THREADS that you set counts too (default: all cores, shared "
        "evenly by this machine's ranks; 1 beside a GPU)", local=True, at_least=1, at_most=MOST_THREADS,
    )  # fmt: skip

    def problems(self) -> list[str]:
        known = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,6}))?", self.device)
        if known is None:
            apple = "Apple's GPUs are not supported; take cpu" if self.device.startswith("mps") else ""
            return [f"--device {self.device}: {apple or 'must be auto, cpu, cuda or cuda:N'}"]
        num_gpus = torch.cuda.device_count()
        if self.device.startswith("cuda") and int(known[1] or 0) >= num_gpus:
            return [f"--device {self.device}: {_visible_gpus(num_gpus)}; choose another or --device cpu"]
        return []


def _visible_gpus(count: int) -> str:
    return "this machine shows no GPU" if not count else f"the visible GPUs are 0 to {count - 1}"


@dataclass
class CheckpointFlags(FlagGroup):
    """The run directory: saving, resuming, evaluating"""

    save_dir: Path = flag(
        Path("checkpoints"),
        "everything of this run; an unfinished run in it is resumed; if not given, a folder named after the task",
        from_record="ignored",
    )
    save_every_steps: int = flag(0, "also save every so many steps; 0 is off", at_least=0)
    save_every_minutes: float = flag(
        0.0, "also save when so much time has passed since the last checkpoint; 0 is off", at_least=0
    )
    keep_checkpoints: int = flag(3, "newest checkpoints to keep; 0 keeps all", metavar="N", at_least=0)
    keep_best: int = flag(1, "of those with the best validation scores so many are kept too", metavar="K", at_least=1)
    resume_from: Path | None = flag(
        None, "go on from this checkpoint file instead of the newest in --save-dir", from_record="refused",
        excludes=("init_from", "init_from_partial"),
    )  # fmt: skip
    init_from: Path | None = flag(
        None, "start with the weights of this checkpoint file, and nothing else of it; a plain state dict will do",
        from_record="refused", excludes=("init_from_partial",),
    )  # fmt: skip
    init_from_partial: Path | None = flag(
        None, "the same with as many of its weights as the model has by name and shape; says which these are",
        from_record="refused",
    )  # fmt: skip
    fresh: bool = flag(
        False, "start over; what --save-dir holds is moved to a folder previous-N inside it", from_record="ignored",
        excludes=("resume_from",),
    )  # fmt: skip
    eval_only: bool = flag(
        False, "do not train: score the best weights of --save-dir (or --resume-from FILE), on validation and test "
        "sets", from_record="ignored", excludes=("fresh", "init_from_partial"), displaces=("resume_from", "init_from"),
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [
            f"{flag_name(name)} {path}: {'is not a file' if path.exists() else 'does not exist'}"
            for name in ("resume_from", "init_from", "init_from_partial")
            if (path := getattr(self, name)) is not None and not path.is_file()
        ]


@dataclass
class SeveralFlags(FlagGroup):
    """Several runs"""

    recorded: ClassVar = False
    seeds: int = flag(
        1, "train with so many seeds, from --seed on, each in a folder of --save-dir; then show mean, deviation and "
        "ensemble. One run per GPU at a time; on the CPU as many at once as there are cores, with --num-threads 1 "
        "unless you give another number: small models run better side by side than on several threads each",
        metavar="N", at_least=1,
    )  # fmt: skip
    folds: int = flag(
        0, "cross-validate: so many runs in the same manner, each scored on a part of the training data that it holds "
        "out; the test set is left alone; 0 is off", metavar="K", at_least=0,
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
    """Labelling new data"""

    recorded: ClassVar = False
    predict: Path | None = flag(
        None, "do not train: label this file with the best weights of --save-dir (or --resume-from FILE), by the flags "
        "of that run; what it holds, the task says", metavar="FILE", from_record="refused",
        excludes=(*NOT_WITH_A_USE, "export"), displaces=("resume_from",),
    )  # fmt: skip
    sample: Path | None = flag(
        None, "do not train: write a file such as --predict takes, of the generated or given data, to try it with",
        metavar="FILE", from_record="refused", excludes=(*NOT_WITH_A_USE, "export", "predict"),
    )  # fmt: skip
    output: Path | None = flag(
        None, "of --predict: the CSV table to write (default: it goes to standard output)", metavar="FILE",
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
            return [f"{given}: would overwrite what is to be labelled; name another file"]
        return _problems_of_target(given, target)


@dataclass
class ExportFlags(FlagGroup):
    """Taking the model elsewhere"""

    recorded: ClassVar = False
    export: Path | None = flag(
        None, "do not train: write the model with the best weights of --save-dir (or --resume-from FILE), by the flags "
        "of that run, as a program that runs without this trainer: a .pt2 of torch.export", metavar="FILE",
        from_record="refused", excludes=NOT_WITH_A_USE, displaces=("resume_from",),
    )  # fmt: skip

    def problems(self) -> list[str]:
        if self.export is None:
            return []
        given, target = f"--export {self.export}", self.export.resolve()
        if target.suffix != ".pt2":
            return [f"{given}: must end in .pt2, of which torch.onnx.export makes an .onnx"]
        return _problems_of_target(given, target)


def _problems_of_target(given: str, target: Path) -> list[str]:
    if target.exists() and not target.is_file():
        return [f"{given}: is not a file; name one"]
    if not target.parent.is_dir():
        return [f"{given}: there is no folder {target.parent}; create it first"]
    if not os.access(target.parent, os.W_OK):
        return [f"{given}: cannot be written: no permission to write into {target.parent}; name another file"]
    return []


@dataclass
class ConfigFlags(FlagGroup):
    """Settings in files"""

    recorded: ClassVar = False
    config: tuple[Path, ...] | None = flag(
        None, "take settings from these files: TOML, or a run's config.json, which repeats that run; a later file goes "
        "before an earlier one, and the command line before all", metavar="FILE",
    )  # fmt: skip
    print_config: bool = flag(False, "do not train: print all settings as a TOML file for --config")


@dataclass
class MultiDeviceFlags(FlagGroup):
    """Several devices"""

    multi_gpu: forms.FormName | None = flag(None, forms.HELP)
    gpu_ids: tuple[int, ...] | None = flag(
        None, "which of the visible GPUs to use, as 0,1,2 (default: all)", metavar="ID", local=True
    )
    nproc: int | None = flag(
        None, "ddp, fsdp: without torchrun, start this many processes (default: one per GPU, or 1 on CPU)",
        needs={"multi_gpu": forms.PER_PROCESS}, at_least=1, at_most=MOST_PROCESSES,
    )  # fmt: skip
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "carries gradients between processes (default: nccl on GPUs, gloo on CPU)"
    )
    dist_timeout_s: float = flag(
        600.0, "seconds after which a process that waits for another one gives up, and names it", above=0
    )
    lockstep_every: int = flag(
        500, "compare the weights of all processes to the bit after every so many optimizer steps, and before every "
        "save; 0 is off", metavar="STEPS", at_least=0,
    )  # fmt: skip
    sync_bn: bool = flag(False, "ddp on GPUs: batch norm over the whole micro-batch of all devices")
    find_unused_parameters: bool = flag(
        False, "ddp: allow parameters that take no part in some forwards", needs={"multi_gpu": forms.TAKING_UNUSED}
    )
    reshard: Literal["always", "never"] = flag(
        "always", "fsdp: free a block's parameters after its forward; never: keep them until its backward (faster, but "
        "only gradients and moments stay in parts)", needs=FSDP,
    )  # fmt: skip
    shard_size: int | None = flag(
        None, "fsdp: divide the model among so many processes, as those of one machine, and copy it across the others; "
        "a divisor of their number (default: among all)", needs=FSDP, at_least=1,
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
    """The flags that every task has, group by group; multi: of several devices alone."""

    run: RunFlags
    batch: BatchFlags
    learning: LearningFlags
    precision: PrecisionFlags
    blocks: BlockFlags
    devices: DeviceFlags
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
"""In the order of `--help`; those of several devices come last."""

"""Trains from Python: `fit` takes settings and either a task or a model; it returns the metrics and the run.

Settings are command-line flags, and run directories have the same format as on the command line.
"""

import json
import os
import pickle
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.checkpoint.directory import METRICS
from trainer.checkpoint.manifest import RESULTS, read_json, read_state
from trainer.cli import read_command_line, run_command, run_process, start_processes, starts_processes
from trainer.commands.build import CUBLAS_WORKSPACE, start_strategy
from trainer.commands.flags import Flags
from trainer.commands.parse import names_several_devices
from trainer.commands.weights import trained_model
from trainer.common import forms
from trainer.common.errors import UserError
from trainer.common.files import with_nan
from trainer.common.process import to_stderr
from trainer.config import arguments_of, refuse
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, Failure
from trainer.failure.signals import STOP_SIGNALS, LeftAtOnce, handlers_restored, ignore_until_exit
from trainer.flags import RETIRED, TRAINER_GROUPS, ExportFlags, MultiDeviceFlags, PredictFlags, SeveralFlags
from trainer.loading.torch_datasets import draws_put_back
from trainer.parallel.environment import RankEnvironment, is_launched
from trainer.parallel.launch import (
    EXIT_UNGUARDED,
    imports_script_of_parent,
    num_processes,
    was_started_by_multiprocessing,
)
from trainer.registry import find_task, name_of, source_file
from trainer.script import Outputs, Script, predicted, task_of
from trainer.task import Task

LOADS_WITHIN_S = 60.0
"""Seconds that `load` waits for another thread's `load` or `fit` before it raises UserError."""
NOT_OF_ONE_RUN = (
    "task",
    "eval_only",
    "print_config",
    *(field.name for group in (SeveralFlags, PredictFlags, ExportFlags) for field in fields(group)),
)
"""Fields of flags that request work other than training one run; `fit` refuses these flags."""
_calls = count()
_rank: "_Rank | None" = None
_outcomes: "dict[int, dict[str, float] | Exception]" = {}
"""Metrics or exception of each call of `fit`, by index, for ranks that rerun the script up to a later call."""
_in_use = threading.Lock()
ONE_RUN = "fit trains one run of the given task class; leave this setting out"


@dataclass(frozen=True)
class SavedRun:
    """A saved run; each property reads a file of the run directory when it is accessed.

    task: task class that `load` uses; None: the class recorded in the run.
    """

    path: Path
    task: type[Task] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # a string, for example

    def __reduce__(self) -> tuple[type["SavedRun"], tuple[Path, type[Task] | None]]:
        """Pickles the run; leaves out a class that no other process can import, as fit(model, ...) defines one."""
        return SavedRun, (self.path, self.task if self.task is not None and _is_importable(self.task) else None)

    def __deepcopy__(self, memo: object) -> "SavedRun":
        return self

    @property
    def state(self) -> str | None:
        """State in state.json, such as "finished", "preempted" or "paused"; None if the file does not exist."""
        return read_state(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """Content of results.json; {} until the run has finished."""
        return read_json(self.path / RESULTS)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of results.json, such as "test/loss", with NaN for infinity; {} until the run has finished."""
        return with_nan(self.results.get("metrics", {}))

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl in training order; the entry "event" of a record names its kind."""
        path, records = self.path / METRICS, []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with suppress(RecursionError, ValueError):  # the last line may be half-written
                records.append(json.loads(line))
        return records

    def load(self) -> nn.Module:
        """Loads the run's trained model, as `trainer.load` does."""
        return load(self.path, self.task)

    def predict(self, dataset: Any, outputs: Outputs | None = None, batch_size: int = 256) -> Tensor:
        """Returns the trained model's outputs for the items of a data set, in order, as a CPU tensor (n, ...).

        The model runs in eval mode, on a GPU if there is one. dataset: as for `fit`; its items may lack trailing
        elements, such as labels. outputs: maps the model and a batch to a tensor (B, ...); default: the model applied
        to the batch's first tensor. batch_size: samples per forward pass. Raises UserError for runs of fit(task, ...).
        """
        if self.task is None or not issubclass(self.task, Script):
            raise UserError(
                f"{self.path}: predict() needs the run that fit(model, ...) returned; for a run of a task, use "
                "main.py --predict"
            )
        return predicted(self.task, self.load(), dataset, outputs, batch_size)


class Fitted(NamedTuple):
    """Result of `fit`. metrics: metrics by name, such as "test/loss"; {} if the run has not finished."""

    metrics: dict[str, float]
    run: SavedRun


def fit(task: type[Task] | str | nn.Module, /, *script: Any, **settings: Any) -> Fitted:
    """Trains as the command line does: resumes an unfinished run in `save_dir`, and returns a finished run unchanged.

    To train a task:

        metrics, run = trainer.fit(Spirals, save_dir="runs/spirals", epochs=40, hidden_units=64)
        model = run.load()

    task: a subclass of `Task`, or a value of `--task` such as "har". settings: flags of the trainer and of
    `task.Config`, by field name. A switch takes True or False; a flag with several values takes a list or tuple. None
    means "not given": task flags and `seed` then come from the run in `save_dir`, other flags from their defaults.

    To train a model with a loss function, call fit(model, train, loss, *, val, test, names, collate, optimizer):

        def loss(model, batch):
            return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

        metrics, run = trainer.fit(Net(), train, loss, val=val, names=("x", "y"), epochs=10, lr=1e-3)

    model: `fit` trains a copy of it. train, val, test: torch data sets or DataLoaders; of a DataLoader, only its data
    set, batch_size, drop_last, num_workers and collate_fn are used. loss: maps the model and a batch to a tensor (B,),
    one number per sample, or to a dictionary of tensors (B,): "loss" is minimised, and the other entries are metrics. A
    sample may contain its number of loss terms as "weight"; sums are divided by the total weight. names, collate:
    as in `from_dataset`. optimizer: a value of `--optimizer`, a class, or a functools.partial of a class without lr.

    Under a launcher such as torchrun, all processes call `fit` and train together. Without a launcher,
    `multi_gpu="ddp"` starts processes, which import the task's class or, for a model, rerun the script up to this call.

    Ctrl-C during training saves the run and returns it with the state "preempted" and no metrics. A second Ctrl-C, or a
    Ctrl-C before training, raises KeyboardInterrupt at once. Other stop signals, such as SIGTERM, and any stop under a
    launcher save the run and end the script (SystemExit) with the command line's exit status. A run stopped by
    `max_minutes` has the state "paused" and no metrics. At its end, `fit` restores signal handlers, random number
    generators and other process state.

    Raises a UserError that lists all errors in the settings, or the exception that the task raised. If one of several
    processes fails, the other processes raise Failure.
    """
    if imports_script_of_parent():
        sys.exit(EXIT_UNGUARDED)  # the parent prints the reason
    try:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise UserError(
                "fit: torch.autocast is on, and would keep old copies of weights; call fit outside, with amp="
            )
        task_type, number = _task_of(task, script, settings), next(_calls)
        argv, problems, several_devices = _command_line(task_type, settings)
        if _rank is not None and number == _rank.number:
            sys.exit(
                run_process(_rank.argv, True, _rank.environment, task_type)
            )  # only the original process runs the rest of the script
        flags, environment = read_command_line(argv, several_devices, task_type=task_type, problems=problems)
        run = SavedRun(flags.checkpoint.save_dir, task_type)
        if _rank is not None:  # the parent process has run this call already
            outcome = _rank.outcomes[number]
            if isinstance(outcome, Exception):
                raise outcome
            return Fitted(outcome, run)
        with _outcome_kept(number):
            _refuse_other_than_one_run(flags)
            if starts_processes(flags.multi, environment):
                fitted = _fit_in_processes(flags.multi, flags.devices.device, argv, run, number)
            else:
                fitted = _fit_here(flags, argv, environment, run)
            _outcomes[number] = fitted.metrics
        return fitted
    except UserError as error:
        end: BaseException = UserError(str(error))
    except Failure as failure:
        end = UserError(str(failure)) if failure.status == EXIT_BAD_INPUT else failure.__cause__ or failure
    except LeftAtOnce:
        end = KeyboardInterrupt()  # after a second Ctrl-C
    try:
        raise end  # raised outside the except blocks, so that a task's exception keeps its cause
    finally:
        del end  # otherwise the exception's traceback would keep the run in memory


def load(run_directory: str | Path, task: type[Task] | None = None) -> nn.Module:
    """Loads a run's trained model: an nn.Module with the best weights, in eval mode on the CPU.

    The best weights come from the best epoch, or from the last epoch if there was no validation; with `ema_decay` they
    are the moving average. task: the task's class; None: the class recorded in the run, which must be a built-in task
    or defined in this process, since `load` does not execute files recorded in a run. Raises UserError.
    """
    try:
        with process_restored(wait_s=LOADS_WITHIN_S):
            return trained_model(Path(run_directory).expanduser(), task)
    except UserError as error:
        refusal = str(error)
    raise UserError(refusal)


def _task_of(task: Any, script: Sequence[Any], settings: dict[str, Any]) -> type[Task]:
    """Returns the task class for the first argument of `fit`; for a model, leaves only flags in `settings`."""
    if isinstance(task, type) and issubclass(task, nn.Module):
        raise UserError(f"fit: {task.__name__} is a class, not a model; pass an instance, such as {task.__name__}(...)")
    if isinstance(task, nn.Module):
        if len(script) != 2:
            raise UserError("fit(model, train, loss): pass training data and a loss function after the model")
        train, loss = script
        return task_of(task, train, loss, settings)
    found = find_task(task) if isinstance(task, str) else task
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"fit: {found!r}: must be an nn.Module, a subclass of trainer.Task, or the name of a task")
    if script:
        raise UserError("fit: too many positional arguments after the task; pass settings by keyword")
    return found


def _command_line(task: type[Task], settings: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
    """Returns the settings as a command line, their errors, and whether they request several devices."""
    given = {name: value for name, value in settings.items() if value is not None}
    if is_launched(os.environ):
        given = {"multi_gpu": forms.USUAL, **given}
    elsewhere = [name for name in NOT_OF_ONE_RUN if given.pop(name, None) is not None]
    argv, problems = arguments_of([*TRAINER_GROUPS, task.Config], given, RETIRED)
    problems += [f"{name}: {ONE_RUN}" for name in elsewhere]
    several_devices = any(field.name in given for field in fields(MultiDeviceFlags)) or names_several_devices(argv)
    return [f"--task={name_of(task)}", *argv], problems, several_devices


def _refuse_other_than_one_run(flags: Flags) -> None:
    groups = (flags.several, flags.prediction, flags.exporting)
    found = [field.name for group in groups for field in fields(group) if getattr(group, field.name) != field.default]
    found += ["eval_only"] * flags.checkpoint.eval_only
    refuse([f"{name}, set in a config file: {ONE_RUN}" for name in found])


def _fit_here(flags: Flags, argv: Sequence[str], environment: RankEnvironment | None, run: SavedRun) -> Fitted:
    with process_restored():
        strategy = start_strategy(flags, environment)
        strategy.group.diagnosis.prints = environment is not None  # a single process raises the error
        with strategy.group.in_use():
            status = run_command(flags, argv, strategy)
            metrics, state = strategy.group.on_main(lambda: (_metrics_at_end(run), run.state))
    if state == "preempted" and (environment is not None or status != EXIT_INTERRUPTED):
        if environment is not None:
            ignore_until_exit()
        sys.exit(status)
    return Fitted(metrics, run)


def _fit_in_processes(multi: MultiDeviceFlags, device: str, argv: Sequence[str], run: SavedRun, number: int) -> Fitted:
    """Trains in new processes. Raises UserError for mistakes in the input, and Failure for other errors."""
    task, form = run.task, f"multi_gpu {multi.multi_gpu}"
    assert task is not None
    if issubclass(task, Script):
        return _ended(_run_script_again(multi, device, argv, number), form, run)
    if not _is_importable(task):
        raise UserError(
            f"{form}: the processes that it starts cannot import {task.__qualname__} from a notebook, an "
            "interactive prompt or a function; move the class into a file and import it, or leave multi_gpu out"
        )
    status = start_processes(multi, device, argv, partial(_main_in_own_session, task_type=task))
    if status == EXIT_UNGUARDED:
        raise UserError(
            f"{form}: the processes that it starts import this script and call fit again; put the call "
            'below `if __name__ == "__main__":`'
        )
    return _ended(status, form, run)


def _run_script_again(multi: MultiDeviceFlags, device: str, argv: Sequence[str], number: int) -> int:
    """Reruns this script once per rank, and returns the exit status. Raises UserError if there is no script file."""
    if was_started_by_multiprocessing():
        raise UserError(
            f"multi_gpu {multi.multi_gpu}: multiprocessing started this process, so it cannot rerun the script once "
            "per rank; call fit outside the pool, or leave multi_gpu out"
        )
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or not Path(file).is_file():
        raise UserError(
            f"multi_gpu {multi.multi_gpu}: a notebook or an interactive prompt cannot run once per rank; put the "
            f"code in train.py and run: torchrun --standalone --nproc_per_node={num_processes(multi, device)} train.py"
        )
    sys.modules["__main__"] = ModuleType("__main__")  # otherwise new processes would also import the script as a module
    try:
        run_rank = partial(_run_as_rank, file, None if spec is None else spec.name, number, _outcomes)
        return start_processes(multi, device, argv, run_rank)
    finally:
        sys.modules["__main__"] = main


class _Rank(NamedTuple):
    """Rank of this process in a run that its parent started. number: zero-based index of the `fit` call that trains.

    outcomes: `_outcomes` of the parent process.
    """

    number: int
    outcomes: Mapping[int, dict[str, float] | Exception]
    argv: Sequence[str]
    environment: RankEnvironment


def _run_as_rank(
    file: str,
    module: str | None,
    number: int,
    outcomes: Mapping[int, dict[str, float] | Exception],
    argv: Sequence[str],
    several_devices: bool,
    environment: RankEnvironment,
) -> int:
    """Reruns a script up to its `fit` call with index `number`, in a session that Ctrl-C does not reach."""
    global _rank
    os.setsid()
    _rank = _Rank(number, outcomes, argv, environment)
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(file, run_name="__main__")
    place = f"rank {environment.rank} did not reach call {number + 1} of fit, or went on after it"
    to_stderr(f"{file}: {place}; let all ranks reach the call, and do not catch its SystemExit")
    return EXIT_BAD_INPUT


@contextmanager
def _outcome_kept(number: int) -> Iterator[None]:
    """Context that keeps an exception of a call of `fit` in `_outcomes`, without its traceback.

    Another exception than the trainer's becomes RuntimeError, since a user's exception may not be picklable.
    """
    try:
        yield
    except BaseException as error:
        kept: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(error, UserError | Failure):
            kept = Failure(str(error), error.status) if isinstance(error, Failure) else UserError(str(error))
        _outcomes[number] = kept
        raise


def _ended(status: int, form: str, run: SavedRun) -> Fitted:
    if status == EXIT_BAD_INPUT:
        raise UserError(f"{form}: the processes that it started failed; see their messages on standard error")
    if status == EXIT_INTERRUPTED and run.state != "preempted":
        raise KeyboardInterrupt
    if status - 128 in STOP_SIGNALS and status != EXIT_INTERRUPTED:
        sys.exit(status)
    if status not in (0, EXIT_INTERRUPTED):
        raise Failure(f"{form}: its processes ended with status {status}; see their messages", status)
    return Fitted(_metrics_at_end(run), run)


def _metrics_at_end(run: SavedRun) -> dict[str, float]:
    """Returns a finished run's metrics; {} for a stopped run, whose results.json may belong to an earlier run."""
    return run.metrics if run.state == "finished" else {}


def _is_importable(task: type[Task]) -> bool:
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError):  # the class is defined in a function, or has been redefined
        return False
    return source_file(task) is not None


def _main_in_own_session(
    argv: Sequence[str], several_devices: bool, environment: RankEnvironment, task_type: type[Task]
) -> int:
    """Calls `run_process` in a session that Ctrl-C does not reach.

    A terminal or notebook server sends Ctrl-C to the whole process group, and the parent forwards it. If both
    signals arrived, the second would end the process at once, without saving.
    """
    os.setsid()
    return run_process(argv, several_devices, environment, task_type)


# --- process state that a run changes, and its restoration -----------------------------------------------------


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""(getter, setter) pairs of process state that a run changes."""
_SWITCHES = ((torch.utils.deterministic, "fill_uninitialized_memory"), (torch.backends.cudnn, "benchmark"))


@contextmanager
def process_restored(wait_s: float = 0.0) -> Iterator[None]:
    """Context with the default dtype, device and gradient mode of a new process; restores process state on exit.

    Raises UserError if another thread stays in this context for more than `wait_s` seconds, since both threads would
    draw from the same random number generators.
    """
    if not _in_use.acquire(timeout=wait_s):
        raise UserError("this process is already training a run; start another process for a second run")
    with ExitStack() as afterwards:
        afterwards.callback(_in_use.release)
        for read, write in _STATES:
            afterwards.callback(write, read())
        for module, name in (*_SWITCHES, *_tf32_of_cudnn()):
            afterwards.callback(setattr, module, name, getattr(module, name))
        afterwards.callback(sys.path.__setitem__, slice(None), list(sys.path))
        if CUBLAS_WORKSPACE not in os.environ:
            afterwards.callback(os.environ.pop, CUBLAS_WORKSPACE, None)
        uses_gpus = torch.cuda.is_initialized()
        afterwards.callback(_make_current, torch.cuda.current_device() if uses_gpus else 0)
        afterwards.enter_context(draws_put_back())
        afterwards.enter_context(torch.random.fork_rng(range(torch.cuda.device_count()) if uses_gpus else ()))
        afterwards.enter_context(handlers_restored())
        torch.set_default_dtype(torch.float32)
        afterwards.enter_context(torch.inference_mode(False))  # enables gradients, even within torch.no_grad()
        if torch.get_default_device().type != "cpu":  # a device context slows every operation
            afterwards.enter_context(torch.device("cpu"))
        yield


def _tf32_of_cudnn() -> list[tuple[Any, str]]:
    """Returns (module, attribute) of cuDNN's TF32 settings: two if convolutions and RNNs have different values."""
    cudnn: Any = torch.backends.cudnn
    try:
        _ = cudnn.allow_tf32
    except RuntimeError:
        return [(cudnn.conv, "fp32_precision"), (cudnn.rnn, "fp32_precision")]
    return [(cudnn, "allow_tf32")]


def _make_current(gpu: int) -> None:
    """Sets torch's current GPU; does nothing if CUDA is not initialised, because setting a GPU would initialise it."""
    if torch.cuda.is_initialized():
        torch.cuda.set_device(gpu)

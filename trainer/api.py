"""Training from Python: a task's class and settings in, metrics and a trained model out.

The flags, the run directory and all that becomes of them are those of the command line, by the same code.
"""

import json
import os
import pickle
import random
import runpy
import signal
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

import numpy as np
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
from trainer.failure.errors import EXIT_BAD_INPUT, Failure
from trainer.failure.signals import STOP_SIGNALS, LeftAtOnce, handlers_restored
from trainer.flags import RETIRED, TRAINER_GROUPS, ExportFlags, MultiDeviceFlags, PredictFlags, SeveralFlags
from trainer.parallel.environment import RankEnvironment, is_launched
from trainer.parallel.launch import EXIT_UNGUARDED, imports_script_of_parent, num_processes
from trainer.registry import find_task, name_of, source_file
from trainer.script import Outputs, Script, predicted, task_of
from trainer.task import Task

LOADS_WITHIN_S = 60.0
"""What another thread loads is waited for; what it trains takes longer."""
NOT_OF_ONE_RUN = (
    "task",
    "eval_only",
    "sample",
    "print_config",
    *(field.name for group in (SeveralFlags, PredictFlags, ExportFlags) for field in fields(group)),
)
"""Flags that ask for something else than to train one run."""
_calls = count()
_rank: "_Rank | None" = None
_in_use = threading.Lock()
ONE_RUN = "fit trains one run of the class that it is given; leave it out"


@dataclass(frozen=True)
class SavedRun:
    """A run directory, to read; each attribute is what it holds now.

    task: the class that was trained, for `load`; None takes the one that the run names.
    """

    path: Path
    task: type[Task] | None = None

    @property
    def state(self) -> str | None:
        """What became of it, as in state.json: "finished", "preempted" by a stop, "paused"; None where none was."""
        return read_state(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """results.json; empty before the end."""
        return read_json(self.path / RESULTS)

    @property
    def metrics(self) -> dict[str, float]:
        """Those of results.json, by names such as "test/loss"; empty before the end."""
        return with_nan(self.results.get("metrics", {}))

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, in the order of training; "event" says of what each is."""
        path, records = self.path / METRICS, []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with suppress(ValueError):  # the last line may be half-written
                records.append(json.loads(line))
        return records

    def load(self) -> nn.Module:
        """The trained model; see `trainer.load`."""
        return load(self.path, self.task)

    def predict(self, dataset: Any, outputs: Outputs | None = None, batch_size: int = 256) -> Tensor:
        """What the trained model answers for each item of a data set: (n, ...), on the CPU, in order.

        For a run that `fit` made of a model. dataset: as those of `fit`; of its items, parts behind may be missing.
        outputs: outputs(model, batch) returns (B, ...); by default the model's own answer to the first part of a batch.
        batch_size: samples per forward, in eval mode, on a GPU if there is one. Raises UserError.
        """
        if self.task is None or not issubclass(self.task, Script):
            raise UserError(f"{self.path}: predict is for a run that fit made of a model; use --predict")
        return predicted(self.task, self.load(), dataset, outputs, batch_size)


class Fitted(NamedTuple):
    """What `fit` returns. metrics: see `SavedRun.metrics`; none of a run that was stopped."""

    metrics: dict[str, float]
    run: SavedRun


def fit(task: type[Task] | str | nn.Module, /, *script: Any, **settings: Any) -> Fitted:
    """Trains as the command line does, and goes on with or finds finished what `save_dir` holds.

    Of a task:

        metrics, run = trainer.fit(Spirals, save_dir="runs/spirals", epochs=40, hidden_units=64)
        model = run.load()

    task: its class, wherever it is defined, or what `--task` takes, as "har". settings: flags by the names of their
    fields, the trainer's and those of `task.Config`. A switch is what its field is, True or False; a list is a list or
    a tuple; None leaves a flag at its default, a flag of the task at what the run in `save_dir` has, if any.

    Of what a script has, a model, data and a loss, fit(model, train, loss, *, val, test, names, collate, optimizer):

        def loss(model, batch):
            return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

        metrics, run = trainer.fit(Net(), train, loss, val=val, names=("x", "y"), epochs=10, lr=1e-3)

    model: is copied, and stays as it is. train, val, test: data sets of torch, TensorDatasets, or DataLoaders, of which
    data set, batch_size, drop_last, num_workers and collate_fn are taken. loss: returns a number for each sample of the
    batch, (B,), or a dictionary of such rows with "loss" among them; the others are metrics. Where the data have a part
    "weight", it is the number of loss terms of a sample, by which sums are divided. names, collate: see
    `from_dataset`. optimizer: a name that `--optimizer` takes, a class, or a functools.partial of one without lr.

    Processes that a launcher started all call it, and train together. Without a launcher `multi_gpu="ddp"` starts
    processes by itself: they import the class, or run the script again as far as this call.

    An interrupt while it trains saves, and returns the run with the state "preempted" and no metrics; a second one
    raises KeyboardInterrupt at once, and so does one before training. `max_minutes` does the same with "paused". What a
    run changes of the process is put back.

    Raises UserError with all mistakes in the settings, or what else has to be changed first. Raises what the task's
    code raises; where several processes train, Failure in those whose code did not.
    """
    if imports_script_of_parent():
        sys.exit(EXIT_UNGUARDED)  # the parent says why
    try:
        task_type, number = _task_of(task, script, settings), next(_calls)
        argv, problems, several_devices = _command_line(task_type, settings)
        if _rank is not None and number == _rank.number:
            sys.exit(
                run_process(_rank.argv, True, _rank.environment, task_type)
            )  # what follows is for the first process
        flags, environment = read_command_line(argv, several_devices, task_type=task_type, problems=problems)
        run = SavedRun(flags.checkpoint.save_dir, task_type)
        if _rank is not None:
            return Fitted(_metrics_at_end(run), run)  # trained before
        _refuse_other_than_one_run(flags)
        if starts_processes(flags.multi, environment):
            return _fit_in_processes(flags.multi, flags.devices.device, argv, run, number)
        return _fit_here(flags, argv, environment, run)
    except UserError as error:
        end: BaseException = UserError(str(error))
    except Failure as failure:
        end = UserError(str(failure)) if failure.status == EXIT_BAD_INPUT else failure.__cause__ or failure
    except LeftAtOnce:
        end = KeyboardInterrupt()  # the second one
    try:
        raise end  # here, where an exception of the task keeps what it was raised from
    finally:
        del end  # which would keep this frame, and with it the run, in memory


def load(run_directory: str | Path, task: type[Task] | None = None) -> nn.Module:
    """The trained model of a run: the task's plain module with the best weights, in eval mode on the CPU.

    The weights are those that the run is scored with: of the best epoch, or the last where nothing was validated, and
    their moving average with `ema_decay`. task: the class; None takes the one that the run names, if it comes with
    the trainer or this process has defined it: a file that a run names is not executed. Raises UserError.
    """
    try:
        with process_restored(wait_s=LOADS_WITHIN_S):
            return trained_model(Path(run_directory).expanduser(), task)
    except UserError as error:
        refusal = str(error)
    raise UserError(refusal)


def _task_of(task: Any, script: Sequence[Any], settings: dict[str, Any]) -> type[Task]:
    """The class of what `fit` is given first. settings: those that describe a script's task are taken out of them."""
    if isinstance(task, nn.Module):
        if len(script) != 2:
            raise UserError("fit(model, train, loss): a model comes with its training data and its loss")
        train, loss = script
        return task_of(task, train, loss, settings)
    if script:
        raise UserError(f"fit: {task!r} is followed by {len(script)} more: settings are given by their names")
    return find_task(task) if isinstance(task, str) else task


def _command_line(task: type[Task], settings: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
    """The command line that says the same, what is wrong with it already, and whether it is of main_multi_gpu.py."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise UserError(f"fit: {task!r}: must be a class derived from trainer.Task, the name of one, or a model")
    given = {name: value for name, value in settings.items() if value is not None}
    if is_launched(os.environ):
        given = {"multi_gpu": forms.USUAL, **given}
    elsewhere = [name for name in NOT_OF_ONE_RUN if given.pop(name, None) is not None]
    argv, problems = arguments_of([*TRAINER_GROUPS, task.Config], given, RETIRED)
    problems += [f"{name}: {ONE_RUN}" for name in elsewhere]
    several_devices = any(field.name in given for field in fields(MultiDeviceFlags))
    several_devices = several_devices or names_several_devices(argv)
    return [f"--task={name_of(task)}", *argv], problems, several_devices


def _refuse_other_than_one_run(flags: Flags) -> None:
    """Raises UserError for what a config file asks for."""
    groups = (flags.several, flags.prediction, flags.exporting)
    found = [field.name for group in groups for field in fields(group) if getattr(group, field.name) != field.default]
    found += ["eval_only"] * flags.checkpoint.eval_only
    refuse([f"{name}, in a file of config: {ONE_RUN}" for name in found])


def _fit_here(flags: Flags, argv: Sequence[str], environment: RankEnvironment | None, run: SavedRun) -> Fitted:
    with process_restored():
        strategy = start_strategy(flags, environment)
        strategy.group.diagnosis.prints = environment is not None  # of several processes one speaks for all
        with strategy.group.in_use():
            run_command(flags, argv, strategy)
            return Fitted(strategy.group.on_main(lambda: _metrics_at_end(run)), run)


def _fit_in_processes(multi: MultiDeviceFlags, device: str, argv: Sequence[str], run: SavedRun, number: int) -> Fitted:
    """Raises UserError for what other processes cannot run, and when they refuse; Failure when they fail."""
    task, form = run.task, f"multi_gpu {multi.multi_gpu}"
    assert task is not None
    if issubclass(task, Script):
        return _ended(_run_script_again(multi, device, argv, number), form, run)
    if not _is_importable(task):
        raise UserError(
            f"{form}: the processes that it starts cannot import {task.__qualname__} from a notebook, a prompt "
            "or a function; move it into a file and import it from there, or leave multi_gpu out"
        )
    status = start_processes(multi, device, argv, partial(_main_in_own_session, task_type=task))
    if status == EXIT_UNGUARDED:
        raise UserError(
            f"{form}: the processes that it starts import this script, and came upon this call of fit again; "
            'put it below `if __name__ == "__main__":`'
        )
    return _ended(status, form, run)


def _run_script_again(multi: MultiDeviceFlags, device: str, argv: Sequence[str], number: int) -> int:
    """Runs this script once for each rank; returns the exit status. Raises UserError where there is no script."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or not Path(file).is_file():
        raise UserError(
            f"multi_gpu {multi.multi_gpu}: a notebook or a prompt cannot be run again, once for each rank; put it into "
            "a file, train.py, and type: torchrun --standalone "
            f"--nproc_per_node={num_processes(multi, device)} train.py"
        )
    sys.modules["__main__"] = ModuleType("__main__")  # or new processes would run it as a module, too
    try:
        run_rank = partial(_run_as_rank, file, None if spec is None else spec.name, number)
        return start_processes(multi, device, argv, run_rank)
    finally:
        sys.modules["__main__"] = main


class _Rank(NamedTuple):
    """What this process trains for another one: from which call of `fit` of a script on, and as which rank."""

    number: int
    argv: Sequence[str]
    environment: RankEnvironment


def _run_as_rank(
    file: str, module: str | None, number: int, argv: Sequence[str], several_devices: bool, environment: RankEnvironment
) -> int:
    """Runs a script, as far as the call of that number, in a new process out of reach of a terminal's Ctrl-C."""
    global _rank
    os.setsid()
    _rank = _Rank(number, argv, environment)
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(file, run_name="__main__")
    to_stderr(f"{file}: run again for rank {environment.rank}, it did not come to its call {number + 1} of fit")
    return EXIT_BAD_INPUT


def _ended(status: int, form: str, run: SavedRun) -> Fitted:
    """What processes have come to that ended with this status, as a shell counts. Raises Failure where it is one."""
    if status == EXIT_BAD_INPUT:
        raise UserError(f"{form}: the processes that it started refused to train, and said why on standard error")
    # What ends otherwise, as by SIGKILL, may have left the state of a start before it.
    was_stopped = status - 128 in STOP_SIGNALS and run.state == "preempted"
    if status == 128 + signal.SIGINT and not was_stopped:
        raise KeyboardInterrupt
    if status != 0 and not was_stopped:
        raise Failure(f"the processes that {form} started ended with status {status}", status)
    return Fitted(_metrics_at_end(run), run)


def _metrics_at_end(run: SavedRun) -> dict[str, float]:
    """None of a run that is out of time before it goes on: what its directory holds are those of a shorter one."""
    return run.metrics if run.state == "finished" else {}


def _is_importable(task: type[Task]) -> bool:
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError):  # of a function, or defined anew since
        return False
    return source_file(task) is not None


def _main_in_own_session(
    argv: Sequence[str], several_devices: bool, environment: RankEnvironment, task_type: type[Task]
) -> int:
    """`run_process` out of reach of a Ctrl-C to the whole group, which the parent passes on: two would end it at once.

    A notebook's server sends one to the group, as a terminal does.
    """
    os.setsid()
    return run_process(argv, several_devices, environment, task_type)


# --- what a run changes of the process, and what is put back -----------------------------------------------------


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)
"""What reads something global, and what writes it."""
_SWITCHES = ((torch.utils.deterministic, "fill_uninitialized_memory"), (torch.backends.cudnn, "benchmark"))


@contextmanager
def process_restored(wait_s: float = 0.0) -> Iterator[None]:
    """Around a run. Default dtype and device and gradients are those of a new process, whatever this one has.

    Raises UserError if another thread of this process is within it for longer than `wait_s`: they would share random
    numbers.
    """
    if not _in_use.acquire(timeout=wait_s):
        raise UserError("this process trains already, and one run at a time is all it can; start another process")
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
        afterwards.enter_context(torch.random.fork_rng(range(torch.cuda.device_count()) if uses_gpus else ()))
        afterwards.enter_context(handlers_restored())
        torch.set_default_dtype(torch.float32)
        afterwards.enter_context(torch.inference_mode(False))  # gradients too, also within torch.no_grad()
        if torch.get_default_device().type != "cpu":  # a context costs every operation some time
            afterwards.enter_context(torch.device("cpu"))
        yield


def _tf32_of_cudnn() -> list[tuple[Any, str]]:
    """The switches to keep: torch's older one, or those of torch 2.9 where they differ, for then it cannot be read."""
    cudnn: Any = torch.backends.cudnn
    try:
        _ = cudnn.allow_tf32
    except RuntimeError:
        return [(cudnn.conv, "fp32_precision"), (cudnn.rnn, "fp32_precision")]
    return [(cudnn, "allow_tf32")]


def _make_current(gpu: int) -> None:
    """For torch; 0 is its own choice. Nothing where this process has used none, which would begin to use one."""
    if torch.cuda.is_initialized():
        torch.cuda.set_device(gpu)

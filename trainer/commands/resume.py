"""Chooses the checkpoint that a run resumes from, and finds changes of data, code and flags since that checkpoint."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.format import Best
from trainer.checkpoint.manifest import MANIFEST, read_config, read_manifest
from trainer.checkpoint.weights import runs_within
from trainer.common.errors import UserError
from trainer.common.files import alike
from trainer.config import flag_values, options, shown
from trainer.flags import CheckpointFlags
from trainer.loading.order import Position
from trainer.loop.plan import Plan, TaskOrder
from trainer.loop.progress import Progress
from trainer.registry import is_same_task, told
from trainer.task import Task

START_FLAGS = {option.name for option in options(CheckpointFlags).values() if option.from_record != "taken"}
"""Flags that choose how a run starts, and do not affect what the run learns."""
_SHOWN_WIDTH = 60
_CHANGED = "Changed since the checkpoint"


def starts_over(directory: RunDirectory, given: CheckpointFlags) -> bool:
    """Returns whether `--fresh` applies; it does not apply again when torchrun restarts a job."""
    return given.fresh and directory.earlier_attempt is None


def choose_start(directory: RunDirectory, given: CheckpointFlags) -> dict[str, Any] | None:
    """Returns the checkpoint to resume; None to start a new run.

    `--resume-from` applies only to the first start; later starts resume from the newest checkpoint in `directory`.
    Raises UserError for an unreadable checkpoint, and for a new run in a folder of `--seeds` or `--folds`.
    """
    source = given.resume_from
    if starts_over(directory, given):
        return None
    if directory.has_checkpoint if source is None else _has_taken_over(directory, source):
        return directory.load_newest()
    own = (run.relative_to(directory.path).parts[0] for run in runs_within(directory.path))
    if any(name.startswith(("seed-", "fold-")) for name in own):
        raise UserError(
            f"--save-dir {directory.path}: contains several runs; repeat the command with their --seeds or --folds, or "
            "choose another folder"
        )
    if source is None:
        return None
    state = read_checkpoint(source, f"--resume-from {source}")
    if brings_another_run(directory, source):
        state.pop("run_id", None)  # the new run gets its own id
        directory.forget_values()
    else:
        directory.forget_later_values(state)
    return state


def _has_taken_over(directory: RunDirectory, source: Path) -> bool:
    return bool(directory.entries) and directory.entries[-1].source in (str(source), str(source.resolve()))


def brings_another_run(directory: RunDirectory, source: Path | None) -> bool:
    """Returns whether `source` is in another directory and this start is the first to resume from it."""
    if source is None or _has_taken_over(directory, source):
        return False
    return source.resolve().parent != directory.path.resolve()


def choose_run_id(directory: RunDirectory, given: CheckpointFlags, state: Mapping[str, Any] | None) -> str:
    """Returns the run's id for loggers: the id in the checkpoint to resume or in config.json, or a new id.

    state: checkpoint from `choose_start`; it takes precedence, since config.json may be damaged or lost.
    """
    recorded = {} if starts_over(directory, given) else read_config(directory.path)
    for facts in (state or {}, recorded):
        if "run_id" in facts:
            return str(facts["run_id"])
    return secrets.token_hex(6)  # not seeded, since runs with equal seeds need different ids


def take_best_beside(
    source: Path, best: Best | None, directory: RunDirectory, run_id: str
) -> tuple[float | None, bool, bool]:
    """Copies the best checkpoint beside `source` (`--resume-from`) to `directory`, unless `source` itself is the best.

    Returns the monitored metric of `source`, whether this value was the best so far, and whether the best checkpoint,
    if any, is available.
    """
    state = read_checkpoint(source, f"--resume-from {source}")
    value, is_best = state["value"], state["is_best"]
    if best is None or is_best:
        return value, is_best, True
    listed = (entry.file for entry in read_manifest(source.parent / MANIFEST) if entry.best and entry.step == best.step)
    beside = source.parent / next(listed, "best.pth")  # a later epoch may have taken best.pth
    found = read_checkpoint(beside, str(beside)) if beside.is_file() else {}
    has_best = (found.get("value"), found.get("is_best")) == (best.value, True)
    if has_best:
        directory.save(found | {"run_id": run_id})
    return value, is_best, has_best


def resume(
    changes: "Changes", plan: Plan, progress: Progress, is_complete: bool, forget_values: Callable[[], None]
) -> list[str]:
    """Adapts a resumed run's progress to changed data; returns notes for the user.

    Raises UserError if the size of an unfinished epoch changed. forget_values: clears the checkpoints' scores.
    """
    then, now, notes = changes.then["phase_sizes"], plan.phase_sizes, []
    if not is_complete:
        done = f"{plan.consumed(progress.position)} of {plan.samples_per_epoch} samples"
        notes.append(f"Resuming after optimizer step {progress.step}: epoch {progress.position.epoch + 1}, {done}.")
    if then != now:
        if not progress.position.at_epoch_start:
            changes.refuse_other_epochs()
        notes.append(f"The training data changed: {then} -> {now} samples.")
    notes += changes.keep_initial_weights()
    notes += [*changes.notes_on_data, *changes.notes_on_order(plan, progress.position)]
    if progress.best is not None and changes.scores_differ:
        epoch = progress.best.epoch
        progress.best, progress.evaluations_since_best, progress.scores = None, 0, {}
        forget_values()
        notes.append(f"The best checkpoint (epoch {epoch}) was scored on other data, so the best score is reset.")
    return [*notes, *changes.notes_on_start]


# --- what has changed --------------------------------------------------------------------------------------------


class Changes:
    """Differences between a checkpoint and the run that loads the checkpoint.

    then: the checkpoint. now: facts of the run. flags: (then, now) values of changed flags.
    """

    def __init__(self, then: Mapping[str, Any], now: Mapping[str, Any], task: Task) -> None:
        self.then, self.now = then, now
        self.flags = changed_flags(then.get("config", {}), now["config"])
        self._task = task
        num_parts = then.get("config", {}).get("--parts", 0)
        self._in_parts = bool(0 < num_parts == now["config"]["--parts"])  # results do not depend on the devices

    def undo_hint(self, otherwise: str = "use the flags of its training run") -> str:
        """Returns advice to undo changes of the task's flags. otherwise: the advice if no such flag changed."""
        names = [name for name in flag_values(self._task.config) if name in self.flags]
        own = [f"{name} (was {shown(self.flags[name][0])})" for name in names]
        return f"undo the change to {', '.join(own)}" if own else otherwise

    def refuse_another_run(self) -> None:
        """Raises UserError if the task, its number of phases, its described data or `--optimizer` has changed."""
        task, optimizer, num_phases = self.now["task"], self.now["config"]["--optimizer"], len(self._task.phases)
        if not is_same_task(self.then["task"], task):
            raise UserError(
                f"{told(task)}: the checkpoint is from {told(self.then['task'])}; choose another --save-dir"
            )
        if (before := self.then["config"]["--optimizer"]) != optimizer:
            raise UserError(
                f"--optimizer {optimizer}: the checkpoint was trained with {before}; use that optimizer, or load "
                "only the checkpoint's weights, with --init-from and another --save-dir"
            )
        if (before := len(self.then["phase_sizes"])) != num_phases:
            raise UserError(
                f"--task {task}: has {num_phases} phases, but the checkpoint's task has {before}; undo the change to "
                "the task, or choose another --save-dir"
            )
        self.refuse_other_data("the checkpoint", to_train=True)

    def refuse_other_threads(self) -> None:
        """Raises UserError if the number of CPU threads changed, which affects results with `--parts`."""
        then, now = self.then["environment"], self.now["environment"]
        before, threads = then.get("num_threads_per_rank"), now["num_threads_per_rank"]
        if self._in_parts and now["device_type"] == then.get("device_type") == "cpu" and before != threads:
            raise UserError(
                f"--num-threads {threads}: the checkpoint was trained with {before} CPU thread(s), and results with "
                f"--parts depend on this number; use --num-threads {before}"
            )

    def refuse_reordered(self, names: Iterable[str]) -> None:
        if list(self.then["model"]) != list(names):
            raise UserError(
                "the model's parameters are not in the checkpoint's order, so the optimizer state would not match; "
                "restore that order, or load only the checkpoint's weights with --init-from"
            )

    def refuse_other_data(self, source: str, to_train: bool = False) -> None:
        """Raises UserError if the result of `Task.describe_data` differs from the one in the checkpoint.

        source: noun for the weights in messages. to_train: whether a fact that the checkpoint lacks is a difference.
        """
        then, now = self.then.get("data_facts", {}), self.now["data_facts"]
        for name in sorted(then.keys() | now.keys() if to_train else then.keys()):
            if not alike(then.get(name), now.get(name)):
                raise UserError(
                    f"the training data and {source} differ in {name}: "
                    f"{_difference(then.get(name), now.get(name))}; {self._advice_on_data(to_train)}"
                )

    def _advice_on_data(self, to_train: bool = True) -> str:
        hint = self.undo_hint("")
        otherwise = "choose another --save-dir" if hint else "start over with --fresh"
        return (hint or "use the same data") + (f", or {otherwise}" if to_train else "")

    @property
    def _global_batches(self) -> list[str]:
        """The global batch sizes of all phases as two texts: first the checkpoint's, then the run's."""
        return [" and ".join(map(str, facts["global_batch_sizes"])) for facts in (self.then, self.now)]

    def refuse_other_epochs(self) -> NoReturn:
        """Raises UserError, because the number of samples of the unfinished epoch has changed."""
        then, now = self.then["phase_sizes"], self.now["phase_sizes"]
        wholes = self._global_batches
        if "--drop-last" in self.flags:
            before = f"--drop-last (was {shown(self.flags['--drop-last'][0])})"
            advice = f"undo the change to {before} until the epoch ends, or start over with --fresh"
        elif self.now["config"]["--drop-last"] and wholes[0] != wholes[1]:
            advice = (
                f"with --drop-last, a global batch of {wholes[1]} samples drops other samples than one of {wholes[0]}; "
                f"use --global-batch-size {wholes[0]}, or start over with --fresh"
            )
        else:
            advice = self._advice_on_data()
        raise UserError(f"an epoch has {now} samples, but the checkpoint's unfinished epoch has {then}; {advice}")

    @property
    def scores_differ(self) -> bool:
        """Whether the data changed, so that new scores are not comparable with the best score.

        Compares digests of the data, or the numbers of samples if there are no digests.
        """
        if "data_digest" in self.then and "data_digest" in self.now:
            return has_other_data(self.then, self.now)
        drops = self.then["config"]["--drop-last"] or self.now["config"]["--drop-last"]  # not new data
        return not drops and self.then["phase_sizes"] != self.now["phase_sizes"]

    def keep_initial_weights(self) -> list[str]:
        """Records the checkpoint's `--init-from` and `--init-from-partial`; returns a note on each ignored value."""
        before, now, notes = self.then.get("config", {}), self.now["config"], []
        for name in ("--init-from", "--init-from-partial"):
            given, now[name] = now.get(name), before.get(name)
            if given is not None and not _is_same(now[name], given):
                notes.append(
                    f"{name} {given} has no effect, because the run has already started; to start from this file, add "
                    "--fresh or choose another --save-dir."
                )
        return notes

    @property
    def notes_on_data(self) -> list[str]:
        """A note if the digest of the data (`digest_of_data`) changed."""
        if not has_other_data(self.then, self.now):
            return []
        return [
            "The split into training and held-out data differs from the checkpoint's, or the data changed, so scores "
            "may include training data and are not comparable with earlier scores."
        ]

    def notes_on_order(self, plan: Plan, position: Position) -> list[str]:
        """Notes on unfinished epochs that use samples twice, because `Task.order` depends on the changed batch size."""
        notes = []
        for phase, order in enumerate(plan.orders):
            then, now = (facts["global_batch_sizes"][phase] for facts in (self.then, self.now))
            epoch, consumed = position.of_phase(phase, bool(plan.turns))
            if then == now or not isinstance(order, TaskOrder) or consumed == 0:
                continue
            done, skipped = (
                Counter(np.concatenate([*batches])[:consumed].tolist())
                for size in (then, now)
                if (batches := self._task.order(self._task.phases[phase], epoch, size)) is not None
            )
            if num_again := (done - skipped).total():
                notes.append(
                    f"{order.source} depends on the batch size, so {num_again} samples of this epoch are used twice "
                    f"and {num_again} are not used; to avoid this, use --global-batch-size {then} until the epoch ends."
                )
        return notes

    @property
    def notes_on_scoring(self) -> list[str]:
        """Notes on flags of the task, and on `--seed`, that differ from the checkpoint."""
        return self._notes_on_flags({"--seed", *flag_values(self._task.config)})

    def _notes_on_flags(self, names: set[str]) -> list[str]:
        changed = [(name, *values) for name, values in self.flags.items() if name in names]
        return [f"{_CHANGED}: {name} {shown(then)} -> {shown(now)}" for name, then, now in changed]

    @property
    def notes_on_start(self) -> list[str]:
        notes = self._notes_on_flags(set(self.flags))
        notes += [f"{_CHANGED}: {change}" for change in code_changes(self.then["code"], self.now["code"])]
        known, helpers = self.then.get("helpers", {}), self.now.get("helpers", {})
        names = [name for name in sorted(known.keys() | helpers.keys()) if known.get(name) != helpers.get(name)]
        notes += [f"{_CHANGED}: the helper {name} or its weights" for name in names]
        then, now = self.then["environment"], self.now["environment"]
        before, whole = self._global_batches
        if before != whole:
            notes.append(f"The global batch changes from {before} to {whole} samples.")
        elif then["num_devices"] != now["num_devices"]:
            notes.append(
                f"The number of devices changed: {then['num_devices']} -> {now['num_devices']}. The global batch stays "
                f"at {whole} samples, so each device's share changes."
            )
        counts = ("world_size", "num_devices") if self._in_parts else ()
        names = [name for name in now if name not in counts and then.get(name, now[name]) != now[name]]
        different = [f"{name} {then[name]} -> {now[name]}" for name in names]
        if different:
            notes.append(f"These changes may alter rounding relative to an uninterrupted run: {', '.join(different)}.")
        return notes


def _difference(then: Any, now: Any) -> str:
    """Describes how two values differ: for long lists or texts, by the items or lines that only one contains."""
    before, after = _entries(then), _entries(now)
    more, fewer = ([name for name in one if name not in other] for one, other in ((after, before), (before, after)))
    if len(shown(now)) <= _SHOWN_WIDTH or not (more or fewer):
        return f"{_beginning(now)} instead of {_beginning(then)}"
    told = {"new": more, "missing": fewer}
    return " and ".join(f"{len(some):,} {word} ({_beginning(some)})" for word, some in told.items() if some)


def _entries(value: Any) -> dict[str, None]:
    entries = value.split("\n") if isinstance(value, str) else value if isinstance(value, list) else []
    return dict.fromkeys(map(shown, entries))


def _beginning(value: Any) -> str:
    text = " ".join(shown(value).split())
    return text if len(text) <= _SHOWN_WIDTH else f"{text[:_SHOWN_WIDTH]}..."


def code_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two results of `identify_code`; ignores entries that are None."""
    differing = {name for name in now if None not in (then[name], now[name]) and then[name] != now[name]}
    changes = []
    if "commit" in differing:
        changes.append(f"the code (commit {then['commit'][:7]} -> {now['commit'][:7]})")
    if "changed" in differing:
        some = {False: "none", True: "some"}
        changes.append(f"the code (uncommitted changes: {some[then['changed']]} -> {some[now['changed']]})")
    if "task_sha256" in differing:
        changes.append(f"the task's file {now['task_file']}")
    return changes


def changed_flags(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the (then, now) values of flags that differ between two starts, except `START_FLAGS`."""
    if then.get("--no-amp") is True:  # earlier versions recorded `--amp off` this way
        then = {**then, "--amp": "off"}
    changed = {
        name: (then[name], value)
        for name, value in now.items()
        if name in then and name not in START_FLAGS and not _is_same(then[name], value)
    }
    if "--task" in changed and is_same_task(*changed["--task"]):
        del changed["--task"]
    return changed


def _is_same(then: Any, now: Any) -> bool:
    """Compares values as text, because JSON turns tuples into lists; a relative path equals its absolute path."""
    is_path = isinstance(then, str) and isinstance(now, str) and Path(now).is_absolute()
    return shown(then) == shown(now) or (is_path and Path(then).absolute() == Path(now))


def has_other_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether two runs' facts contain different digests of the data or helpers; ignores missing digests."""
    pairs = [(then.get(name), now.get(name)) for name in ("data_digest", "helpers")]
    return any(None not in digests and digests[0] != digests[1] for digests in pairs)


def changed_since_last_start(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns `changed_flags` between a run directory's config.json and new flags, without `--max-minutes`."""
    changed = changed_flags(read_config(folder).get("config", {}), config)
    changed.pop("--max-minutes", None)  # does not change what a run learns
    return changed


def differences(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Formats changed flags, such as "--lr 0.1 instead of 0.2" if 0.1 is the old value; "" if nothing changed."""
    return ", ".join(f"{name} {shown(then)} instead of {shown(now)}" for name, (then, now) in changed.items())

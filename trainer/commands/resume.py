"""Where a run starts: afresh, from a checkpoint of its directory, or from a file."""

import secrets
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.records import read_config
from trainer.commands.code_identity import code_changes
from trainer.commands.flags import Flags
from trainer.commands.weights import go_on_with_weights
from trainer.common.errors import UserError
from trainer.common.files import alike
from trainer.config import flag_values, shown
from trainer.loop.checkpointing import finish_saving, restore_progress, save
from trainer.loop.progress import Best
from trainer.loop.run import Run
from trainer.registry import is_same_task

START_FLAGS = ("--fresh", "--resume-from", "--init-from", "--init-from-partial", "--eval-only")
_SHOWN_WIDTH = 60
_CHANGED = "Changed since the checkpoint"
_verdict = itemgetter("value", "is_best")
"""Of a checkpoint: the monitored metric, None where there was no validation, and whether it was the best so far."""


def take_over(run: Run, source: Path) -> None:
    """Saves what `--resume-from` brought, and the best checkpoint beside it, so that the directory stands alone."""
    best = run.progress.best
    value, is_best = run.parallel.on_main(lambda: _verdict(read_checkpoint(source, f"--resume-from {source}")))
    if best is not None and not is_best and not run.parallel.on_main(lambda: _copy_best(source, best, run)):
        run.log.say(f"The best checkpoint so far (epoch {best.epoch}) is not beside {source}; best counts from here.")
        run.progress.best = None
    save(run, value, is_best)
    finish_saving(run.parallel, run.saver)


def _copy_best(source: Path, best: Best, run: Run) -> bool:
    beside = source.parent / "best.pth"
    if not beside.is_file():
        return False
    state = read_checkpoint(beside, str(beside))
    if _verdict(state) != (best.value, True):
        return False
    run.directory.save(state | {"run_id": run.facts["run_id"]})
    return True


def starts_over(directory: RunDirectory, flags: Flags) -> bool:
    """`--fresh`, which counts once: not again in the command that torchrun restarts."""
    return flags.checkpoint.fresh and directory.earlier_attempt is None


def choose_start(directory: RunDirectory, flags: Flags) -> dict[str, Any] | None:
    """The checkpoint to go on from, or None. Raises UserError.

    `--resume-from` counts once: when the newest checkpoint already descends from it, the run goes on from there.
    """
    source = flags.checkpoint.resume_from
    if starts_over(directory, flags):
        return None
    if source is None:
        return directory.load_newest() if directory.has_checkpoint else None
    if _has_taken_over(directory, source):
        return directory.load_newest()
    state = read_checkpoint(source, f"--resume-from {source}")
    if brings_another_run(directory, flags):
        state.pop("run_id", None)  # that of another run from now on
        directory.forget_values()
    else:
        directory.forget_later_values(state)
    return state


def _has_taken_over(directory: RunDirectory, source: Path) -> bool:
    return bool(directory.entries) and directory.entries[-1].source in (str(source), str(source.resolve()))


def brings_another_run(directory: RunDirectory, flags: Flags) -> bool:
    """Whether `--resume-from` names a checkpoint from elsewhere, to which nothing in the directory belongs yet."""
    source = flags.checkpoint.resume_from
    if source is None or _has_taken_over(directory, source):
        return False
    return source.resolve().parent != directory.path.resolve()


def choose_run_id(directory: RunDirectory, flags: Flags, state: Mapping[str, Any] | None) -> str:
    """What names the run to loggers: that of the checkpoint to go on from, or of the directory, or a new one.

    state: of `choose_start`. It comes first since it has a checksum, and config.json may be damaged or lost.
    """
    recorded = {} if starts_over(directory, flags) else read_config(directory.path)
    for facts in (state or {}, recorded):
        if "run_id" in facts:
            return str(facts["run_id"])
    return secrets.token_hex(6)  # no random generator: a seed must not give two runs one name


def take_weights(run: Run, state: Mapping[str, Any]) -> None:
    """Those of a checkpoint to go on from. Raises UserError when it does not fit."""
    if not is_same_task(state["task"], run.facts["task"]):
        raise UserError(f"--task {run.facts['task']}: the checkpoint is of {state['task']}; choose another --save-dir")
    _refuse_another_optimizer(state["config"], run.facts["config"])
    _refuse_other_phases(run, state)
    refuse_other_data(run, state, "the checkpoint", to_train=True)
    advice = "choose another --save-dir, or start over with --fresh"
    go_on_with_weights(run, state, "the checkpoint", f"{undo_hint(run, state)}, {advice}")


def refuse_other_data(run: Run, state: Mapping[str, Any], source: str, to_train: bool = False) -> None:
    """Raises UserError where the task tells other facts of its data than those that the weights were trained on.

    to_train: the weights are trained further; then facts that only the new data have count too.
    """
    then, now = state.get("data_facts", {}), run.facts["data_facts"]
    names = then.keys() | now.keys() if to_train else then.keys()
    different = sorted(name for name in names if not alike(then.get(name), now.get(name)))
    if different:
        name = different[0]
        raise UserError(
            f"the training data have other {name} than those that {source} was trained on: "
            f"{_beginning(now.get(name))}, not {_beginning(then.get(name))}; "
            f"{_advice_on_data(run, state, to_train)}"
        )


def _advice_on_data(run: Run, state: Mapping[str, Any], to_train: bool = True) -> str:
    """To start over is right where the same flags lead to other data, and not where the flags are others."""
    hint = undo_hint(run, state, "")
    otherwise = "choose another --save-dir" if hint else "start over with --fresh"
    return (hint or "give it the same data") + (f", or {otherwise}" if to_train else "")


def notes_on_data(run: Run, state: Mapping[str, Any]) -> list[str]:
    """What the user should know where the data have changed since, though not in what `refuse_other_data` looks at."""
    then, now = state.get("data_digest"), run.facts.get("data_digest")
    if None in (then, now) or then == now:
        return []
    return [
        "What is trained on and what is held out are not those of the checkpoint: scores cannot be compared with those "
        "before, and may be of what was trained on."
    ]


def _beginning(value: Any) -> str:
    """A fact as a message shows it: of many names the first ones, in one line."""
    text = " ".join(shown(value).split())
    return text if len(text) <= _SHOWN_WIDTH else f"{text[:_SHOWN_WIDTH]}..."


def resume(run: Run, state: Mapping[str, Any]) -> list[str]:
    """Goes on from a checkpoint whose weights are taken; returns what the user should know. Raises UserError."""
    changed = changed_flags(state["config"], run.facts["config"])
    if list(state["model"]) != list(run.learner.objective.model.state_dict()):
        raise UserError(
            "the model has its parameters in another order than at the checkpoint, whose moments would go to others; "
            "make them in that order, or begin with the weights alone by --init-from"
        )
    restore_progress(run, state)
    plan, position, sizes = run.plan, run.progress.position, run.facts["phase_sizes"]
    notes = []
    if not run.is_complete:
        where = f"epoch {position.epoch + 1}, {plan.consumed(position)} of {plan.samples_per_epoch} samples"
        notes.append(f"Resuming after optimizer step {run.progress.step}: {where}.")
    if sizes != state["phase_sizes"]:
        if not position.at_epoch_start:
            raise UserError(
                f"an epoch has {sizes} samples and the checkpoint in mid-epoch is of one with {state['phase_sizes']}; "
                f"{_advice_on_epochs(run, state, changed)}"
            )
        notes.append(f"The training data changed: {state['phase_sizes']} -> {sizes} samples.")
    notes += notes_on_data(run, state)
    notes += _forget_best_of_other_data(run, state)
    notes += _notes_on_changes(changed)
    notes += [f"{_CHANGED}: {change}" for change in code_changes(state["code"], run.facts["code"])]
    then, now = state["environment"], run.facts["environment"]
    wholes = run.facts["global_batch_sizes"]
    if then["num_devices"] != now["num_devices"] and wholes == state["global_batch_sizes"]:
        notes.append(
            f"The global batch stays at {' and '.join(map(str, wholes))} samples on {now['num_devices']} device(s) "
            f"instead of {then['num_devices']}; per-device batch and accumulation are derived anew."
        )
    different = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if different:
        notes.append(f"Equal to an unbroken run up to rounding, not to the bit, since: {', '.join(different)}.")
    return notes


def _advice_on_epochs(run: Run, state: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> str:
    if "--drop-last" in changed:
        before = f"--drop-last (was {shown(changed['--drop-last'][0])})"
        return f"undo the change of {before} until the epoch ends, or start over with --fresh"
    then, now = state["global_batch_sizes"], run.facts["global_batch_sizes"]
    if run.facts["config"]["--drop-last"] and then != now:
        before, after = (" and ".join(map(str, wholes)) for wholes in (then, now))
        return (
            f"what --drop-last leaves out depends on the global batch: {after} now, {before} then; go back to that "
            "one, or start over with --fresh"
        )
    return _advice_on_data(run, state)


def _forget_best_of_other_data(run: Run, state: Mapping[str, Any]) -> list[str]:
    """Forgets the best epoch where the data have changed, since scores on other data cannot be compared.

    They have changed where the task's digest has, or without a digest the number of samples.
    """
    best, now = run.progress.best, run.facts
    digests = state.get("data_digest"), now.get("data_digest")
    drops = state["config"]["--drop-last"] or now["config"]["--drop-last"]  # which leaves out some of the same
    has_changed = digests[0] != digests[1] if None not in digests else state["phase_sizes"] != now["phase_sizes"]
    if best is None or not has_changed or (drops and None in digests):
        return []
    run.progress.best, run.progress.evaluations_since_best = None, 0
    run.parallel.on_main(run.directory.forget_values)
    return [f"The best checkpoint so far (epoch {best.epoch}) is that of other data; best counts from here."]


def _refuse_other_phases(run: Run, state: Mapping[str, Any]) -> None:
    then, now = len(state["phase_sizes"]), len(run.task.phases)
    if then != now:
        raise UserError(
            f"--task {run.facts['task']}: has {now} phases, and the checkpoint is of one with {then}: undo the change "
            "of the task, or choose another --save-dir"
        )


def _refuse_another_optimizer(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, name = then["--optimizer"], now["--optimizer"]
    if name != before:
        raise UserError(
            f"--optimizer {name}: the checkpoint holds the moments of {before}; go on with that one, or begin with the "
            "weights alone: --init-from, in another --save-dir"
        )


def changed_flags(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flags of two starts of a run whose value differs, but for those that say how to start: (then, now)."""
    if then.get("--no-amp") is True:  # as earlier versions recorded `--amp off`
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
    """Whether two values are: a tuple is a list in JSON, and older records have paths as they were typed."""
    is_path = isinstance(then, str) and isinstance(now, str) and Path(now).is_absolute()
    return shown(then) == shown(now) or (is_path and Path(then).absolute() == Path(now))


def changed_since_last_start(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`changed_flags` of a run directory and a command line that make another run of it."""
    changed = changed_flags(read_config(folder).get("config", {}), config)
    changed.pop("--save-dir", None)  # the folder may have been moved
    changed.pop("--max-minutes", None)  # how much of a run there is to be, not which one
    return changed


def differences(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Of flags (then, now), in a sentence about what was then; empty where there are none."""
    return ", ".join(f"{name} {shown(then)} instead of {shown(now)}" for name, (then, now) in changed.items())


def notes_on_flags(run: Run, state: Mapping[str, Any]) -> list[str]:
    """What the user should know where weights are scored with other flags of the task, or another seed, than theirs."""
    changed = changed_flags(state.get("config", {}), run.facts["config"])
    own = {"--seed", *flag_values(run.task.config)}
    return _notes_on_changes({name: values for name, values in changed.items() if name in own})


def _notes_on_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{_CHANGED}: {name} {shown(then)} -> {shown(now)}" for name, (then, now) in changed.items()]


def undo_hint(run: Run, state: Mapping[str, Any], otherwise: str = "give the flags that it was trained with") -> str:
    """What to undo when a checkpoint is of another model or data: the task's flags that changed. otherwise: if none."""
    changed = changed_flags(state.get("config", {}), run.facts["config"])
    own = [f"{name} (was {shown(changed[name][0])})" for name in flag_values(run.task.config) if name in changed]
    return f"undo the change of {', '.join(own)}" if own else otherwise

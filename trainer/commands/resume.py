"""Where a run starts: afresh, from a checkpoint of its directory, or from a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.manifest import is_best_of_its_own
from trainer.commands.flags import Flags
from trainer.commands.weights import go_on_with_weights
from trainer.config import flag_values, shown
from trainer.loading.errors import BadInput
from trainer.loop.checkpointing import finish_saving, restore_progress, save
from trainer.loop.progress import Best
from trainer.loop.run import Run
from trainer.tasks import is_same_task

START_FLAGS = (
    "--fresh", "--resume-from", "--init-from", "--init-from-partial", "--take-over-lock", "--eval-only"
)  # fmt: skip


def take_over(run: Run, flags: Flags) -> None:
    """Saves what `--resume-from` brought, and the best checkpoint beside it, so that the directory stands alone."""
    source, best = flags.checkpoint.resume_from, run.progress.best
    if best is not None and best.step == run.progress.step:
        save(run, best.value, is_best=True)
    else:
        if best is not None and not run.parallel.on_main(lambda: _copy_best(source, best, run.directory)):
            run.log.say(
                f"The best checkpoint so far (epoch {best.epoch}) is not beside {source}; best counts from here."
            )
            run.progress.best = None
        save(run)
    finish_saving(run)


def _copy_best(source: Path | None, best: Best, directory: RunDirectory) -> bool:
    beside = source.parent / "best.pth" if source is not None else None
    if beside is None or not beside.is_file():
        return False
    state = read_checkpoint(beside, str(beside))
    # Of equal scores only the first is ever a best one.
    if not is_best_of_its_own(state) or state["best"]["value"] != best.value:
        return False
    directory.save(state, best.value, is_best=True)
    return True


def starts_over(directory: RunDirectory, flags: Flags) -> bool:
    """`--fresh`, which counts once: not again in the command that torchrun restarts."""
    return flags.checkpoint.fresh and directory.earlier_attempt is None


def choose_start(directory: RunDirectory, flags: Flags) -> dict[str, Any] | None:
    """The checkpoint to go on from, or None. Raises BadInput.

    `--resume-from` counts once: when the newest checkpoint already descends from it, the run goes on from there.
    """
    source = flags.checkpoint.resume_from
    if starts_over(directory, flags):
        return None
    if source is None:
        return directory.load_newest() if directory.has_checkpoint else None
    if directory.entries and directory.entries[-1].source == str(source):
        return directory.load_newest()
    state = read_checkpoint(source, f"--resume-from {source}")
    directory.forget_later_best(state["best"])
    return state


def take_weights(run: Run, state: Mapping[str, Any]) -> None:
    """Those of a checkpoint to go on from. Raises BadInput when it does not fit."""
    if not is_same_task(state["task"], run.facts["task"]):
        raise BadInput(f"--task {run.facts['task']}: the checkpoint is of {state['task']}; choose another --save-dir")
    _refuse_another_optimizer(state["config"], run.facts["config"])
    advice = "choose another --save-dir, or start over with --fresh"
    go_on_with_weights(run, state, "the checkpoint", f"{undo_hint(run, state)}, {advice}")


def resume(run: Run, state: Mapping[str, Any]) -> list[str]:
    """Goes on from a checkpoint whose weights are taken; returns what the user should know. Raises BadInput."""
    changed = changed_flags(state["config"], run.facts["config"])
    restore_progress(run, state)
    position, sizes = run.progress.position, run.facts["phase_sizes"]
    notes = []
    if not run.is_complete:
        where = f"epoch {position.epoch + 1}, {position.samples} of {sizes[position.phase]} samples"
        notes.append(f"Resuming after optimizer step {run.progress.step}: {where}.")
    if sizes != state["phase_sizes"]:
        if not position.at_epoch_start:
            raise BadInput(
                f"the training data has {sizes} samples and the checkpoint in mid-epoch is of {state['phase_sizes']}; "
                "give it the same data, or start over with --fresh"
            )
        notes.append(f"The training data changed: {state['phase_sizes']} -> {sizes} samples.")
    notes += [
        f"Changed since the checkpoint: {name} {shown(old)} -> {shown(new)}" for name, (old, new) in changed.items()
    ]
    then, now = state["environment"], run.facts["environment"]
    wholes = recorded_global_batches(run.facts)
    if then["num_devices"] != now["num_devices"] and wholes == recorded_global_batches(state):
        notes.append(
            f"The global batch stays at {' and '.join(map(str, wholes))} samples on {now['num_devices']} device(s) "
            f"instead of {then['num_devices']}; per-device batch and accumulation are derived anew."
        )
    different = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if different:
        notes.append(f"Equal to an unbroken run up to rounding, not to the bit, since: {', '.join(different)}.")
    return notes


def recorded_global_batches(facts: Mapping[str, Any]) -> list[int]:
    """Samples per optimizer step of each phase; older checkpoints have the number of their only phase."""
    return facts.get("global_batch_sizes") or [facts["global_batch_size"]]


def _refuse_another_optimizer(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, name = then.get("--optimizer", "adamw"), now["--optimizer"]
    if name != before:
        raise BadInput(
            f"--optimizer {name}: the checkpoint holds the moments of {before}; go on with that one, or begin with the "
            "weights alone: --init-from, in another --save-dir"
        )


def changed_flags(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flags of two starts of a run whose value differs, but for those that say how to start: (then, now)."""
    changed = {
        name: (then[name], value)
        for name, value in now.items()
        if name in then and name not in START_FLAGS and then[name] != value
    }
    if "--task" in changed and is_same_task(*changed["--task"]):
        del changed["--task"]
    return changed


def undo_hint(run: Run, state: Mapping[str, Any]) -> str:
    """What to undo when a checkpoint is of another model: the task's flags that changed."""
    changed = changed_flags(state.get("config", {}), run.facts["config"])
    own = [f"{name} (was {shown(changed[name][0])})" for name in flag_values(run.task.config) if name in changed]
    return f"undo the change of {', '.join(own)}" if own else "give the flags that it was trained with"

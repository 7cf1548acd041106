"""Weights into a model: the one place for training, scoring, labelling, ensembles and `--init-from`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.checkpoint.file import read_checkpoint
from trainer.checkpoint.weights import WeightComparison, compare
from trainer.commands.flags import Flags
from trainer.common.errors import UserError
from trainer.flags import CheckpointFlags
from trainer.loop.run import Run
from trainer.parallel.base import Parallel


def restore_weights(
    model: nn.Module, weights: Mapping[str, Tensor], parallel: Parallel, source: str, hint: str
) -> None:
    """Gives a model all of its weights. All processes of the run that have the model call it.

    source: what a message calls the weights. hint: what to do when they are of another model, which is a UserError.
    """
    comparison = compare(model, weights)
    differences = comparison.differences
    if differences:
        shown = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(f"{source} is of another model: {shown}{more}; {hint}")
    parallel.load_weights(comparison.fitting, model)


def restore_what_fits(
    model: nn.Module, weights: Mapping[str, Tensor], parallel: Parallel, source: str
) -> WeightComparison:
    """Gives a model what it can take, and says what that is. Raises UserError where it is nothing."""
    comparison = compare(model, weights)
    if not comparison.fitting:
        if comparison.unlike:
            what = "; ".join([*comparison.unlike.values()][:2])
            raise UserError(
                f"{source}: nothing in it fits the model: {what}; give the flags and data it was trained with"
            )
        raise UserError(
            f"{source}: nothing in it fits the model: the file has {_first(weights)}, the model "
            f"{_first(model.state_dict())}; rename the weights in the file"
        )
    parallel.load_weights(comparison.fitting, model)
    return comparison


def use_weights(run: Run, weights: Mapping[str, Tensor], source: str, hint: str) -> None:
    """Gives a run weights to be scored: those of a checkpoint are averaged already, if at all."""
    restore_weights(run.learner.objective.model, weights, run.parallel, source, hint)
    run.learner.ema.restart()


def go_on_with_weights(run: Run, state: Mapping[str, Any], source: str, hint: str) -> None:
    """Gives a run those of a checkpoint to train on, and their moving average."""
    model, parallel = run.learner.objective.model, run.parallel
    restore_weights(model, state["model"], parallel, source, hint)
    run.learner.ema.restore(state)
    if "training_model" in state:
        restore_weights(model, state["training_model"], parallel, source, hint)


def initialise(run: Run, flags: Flags) -> list[str]:
    """Begins with fresh weights, or those of a file if the flags name one; returns what the user should know.

    Raises UserError when they do not fit.
    """
    notes = _take_from_file(run, flags.checkpoint)
    run.learner.ema.restart()
    return notes


def _take_from_file(run: Run, given: CheckpointFlags) -> list[str]:
    model, parallel = run.learner.objective.model, run.parallel
    if given.init_from is not None:
        label = f"--init-from {given.init_from}"
        hint = "take the weights of a model with the same flags, or what fits of them by --init-from-partial"
        restore_weights(model, _read(parallel, given.init_from, label), parallel, label, hint)
        return [f"Starting with the weights of {given.init_from}."]
    if given.init_from_partial is not None:
        label = f"--init-from-partial {given.init_from_partial}"
        weights = _read(parallel, given.init_from_partial, label)
        return _described(restore_what_fits(model, weights, parallel, label), given.init_from_partial)
    shipped = run.task.shipped_weights()
    if shipped is not None:
        label = "the weights that come with this task"
        weights = _read(parallel, shipped, label)
        comparison = compare(model, weights)
        if comparison.unlike or comparison.unknown:
            first = [*comparison.unlike.values(), *(f"{name} is unknown" for name in comparison.unknown)][0]
            raise UserError(
                f"{label} are of another model: {first}; leave out the flags that change the model, or name other "
                "weights by --init-from"
            )
        parallel.load_weights(comparison.fitting, model)
        others = f"; initialised anew: {_first(comparison.missing)}" if comparison.missing else "."
        return [f"Starting with {label}, {len(comparison.fitting)} of the model's {len(model.state_dict())}{others}"]
    return []


def _read(parallel: Parallel, path: Path, label: str) -> dict[str, Tensor]:
    state = parallel.load_on_main(lambda: {"model": read_checkpoint(path, label, only_weights=True)["model"]})
    weights: dict[str, Tensor] = state["model"]
    return weights


def _described(comparison: WeightComparison, source: Path) -> list[str]:
    taken = comparison.fitting
    num_weights = len(taken) + len(comparison.missing) + len(comparison.unlike)
    lines = [f"Starting with {len(taken)} of the model's {num_weights} weights from {source}: {', '.join(taken)}."]
    if comparison.unlike:
        lines.append(f"Left out: {', '.join(comparison.unlike.values())}.")
    if comparison.unknown:
        lines.append(f"Left out, unknown to the model: {', '.join(comparison.unknown)}.")
    if comparison.missing:
        lines.append(f"Not in that file, so initialised anew: {', '.join(comparison.missing)}.")
    return lines


def _first(names: Collection[str]) -> str:
    return ", ".join([*names][:3]) + (", ..." if len(names) > 3 else "")

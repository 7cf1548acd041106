"""Runs `--export`: writes a trained model as a program of torch.export, which runs without this trainer.

The program is traced on batches of real data, and written only if its outputs agree with the model's outputs.
"""

import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ExportedProgram

from trainer.commands.facts import facts_of_data
from trainer.commands.flags import Flags
from trainer.commands.predict import write_output
from trainer.commands.weights import find_trained, trained_objective
from trainer.common.errors import UserError
from trainer.loading.batches import Batch, of_dtype
from trainer.loading.order import SampleKeys
from trainer.logs.console import say
from trainer.loop.precision import choose_precision
from trainer.parallel.strategy import Strategy
from trainer.task import Exported, Objective, Task, validation_sets

ABOUT = "about.json"
"""Extra file in the .pt2 archive with a description of the program."""
_BATCH_SIZES = (4, 3, 2, 1)
"""Sizes of the batches to trace and check; dimensions that differ between these batches become dynamic."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest accepted difference between program and model, relative to an output's largest value."""

Answer = Callable[[Exported], Sequence[Tensor]]
"""Function that calls a loaded program with the inputs of an `Exported` and returns the program's outputs."""


@torch.no_grad()
def export_model(flags: Flags, strategy: Strategy) -> None:
    """Runs `--export`. Raises UserError before writing if the export fails or its outputs differ from the model's."""
    path = flags.exporting.export
    assert path is not None
    run, task = find_trained(flags, say)
    for remark in run.remarks:
        say(remark)
    task.data_facts = None  # unlike --predict, export reads the task's data
    dtype = choose_precision(flags.precision, strategy.device).dtype
    objective = trained_objective(task, run.state["model"], strategy.device, dtype).eval()
    objective.start_evaluation()
    batches = [of_dtype(strategy.to_device(batch), dtype) for batch in example_batches(task)]
    calls = [task.exported(objective, batch) or recorded_call(task, objective, batch) for batch in batches]
    with _refusing_failures(f"--export {path}: torch cannot export {type(calls[0].program).__name__}"):
        program = traced(calls)
        inputs = shapes(program)
        about = {"task": run.state["task"], "inputs": inputs, "data_facts": facts_of_data(task)}
        content, answer = as_pt2(program, about)
        difference = max(largest_difference(call, answer(call)) for call in calls)
    if not difference <= _TOLERANCE[dtype]:
        raise UserError(
            f"--export {path}: not written, because outputs of the exported program and the model differ by up to "
            f"{difference:.1e} times the largest output; provide another form of the model with `Task.exported`"
        )
    write_output(path, content, "--export")
    say(f"Exported {run.label} to {path}. Inputs: {', '.join(f'{name} {shape}' for name, shape in inputs.items())}")
    sizes = f"{len(calls)} batches of {min(_BATCH_SIZES)} to {max(_BATCH_SIZES)} samples"
    say(f"On {sizes}, outputs of the file and the model differ by up to {difference:.1e} times the largest output.")


def example_batches(task: Task) -> Iterator[Batch]:
    """Yields batches of contiguous tensors: samples of a validation, test or training set, drawn with a fixed seed.

    An exported program assumes the memory layout of the inputs it was traced with.
    """
    splits = task.splits()
    dataset = splits[next(iter(validation_sets(splits)), "test" if "test" in splits else "train")]
    number = sum(_BATCH_SIZES)
    chosen = np.random.default_rng(0).choice(len(dataset), number, replace=len(dataset) < number)
    for index in np.split(chosen, np.cumsum(_BATCH_SIZES)[:-1]):
        keys = SampleKeys(np.sort(index), epoch=0)
        batch = task.collate(dataset.__getitems__(keys), keys)
        yield {name: tensor.contiguous() for name, tensor in batch.items()}


def recorded_call(task: Task, objective: Objective, batch: Batch) -> Exported:
    """Records the first call of `model` in the objective's forward. Raises UserError if it does not call `model`."""
    model, calls = objective.model, []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        # cloned, since a forward pass may modify its model's outputs
        calls.append(Exported(model, inputs, [tensor.clone() for tensor in _tensors(output)]))

    with model.register_forward_hook(record, with_kwargs=True):
        objective(batch)
    if not calls:
        raise UserError(
            f"--export: {type(objective).__name__}.forward does not call its `model` as a whole; define "
            f"{type(task).__name__}.exported"
        )
    return calls[0]


def traced(calls: Sequence[Exported]) -> ExportedProgram:
    """Exports `calls[0].program`; dimensions that differ between calls, or that `lengths` names, become dynamic."""
    first, others = calls[0], AdditionalInputs()
    for call in calls[1:]:
        others.add(*_arguments(call))
    args, kwargs = _arguments(first)
    sizes = others.dynamic_shapes(first.program, args, kwargs)
    for name in first.lengths.keys() & sizes.keys():
        lengths = first.lengths[name]
        sizes[name] = [Dim.DYNAMIC if dim in lengths else size for dim, size in enumerate(sizes[name])]
    return torch.export.export(first.program, args, kwargs, dynamic_shapes=sizes)


def _arguments(call: Exported) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.BoundArguments(inspect.signature(call.program.forward), dict(call.inputs))
    return bound.args, bound.kwargs


def shapes(program: ExportedProgram) -> dict[str, str]:
    """Returns a program's input shapes by name, such as "(?, 9, 128)"; "?" is a dynamic dimension."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = {str(name): values.get(str(name)) for name in program.graph_signature.user_inputs}
    sizes = {
        name: tuple(n if isinstance(n, int) else "?" for n in value.shape)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    return {name: str(shape).replace("'", "") for name, shape in sizes.items()}


def as_pt2(program: ExportedProgram, about: Mapping[str, Any]) -> tuple[bytes, Answer]:
    """Returns the content of a .pt2 file, and a function that calls the program loaded from this content."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})
    file.seek(0)
    loaded = torch.export.load(file).module()

    def answer(call: Exported) -> Sequence[Tensor]:
        args, kwargs = _arguments(call)
        return _tensors(loaded(*args, **kwargs))

    return file.getvalue(), answer


@contextmanager
def _refusing_failures(what: str) -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{what}: {reason}; provide an exportable form with `Task.exported`") from error
    finally:
        logging.disable(logging.NOTSET)


def largest_difference(call: Exported, found: Sequence[Tensor]) -> float:
    """Returns the largest relative difference from `call.expected`; inf for NaN, or if shapes or infinities differ."""
    expected, largest = _tensors(call.expected), 0.0
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return float("inf")
    for here, there in zip(expected, found, strict=True):
        one, other = here.double().cpu(), there.double().cpu()
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()) or not torch.equal(one[~finite], other[~finite]):
            return float("inf")
        if finite.any():
            scale = max(float(one[finite].abs().max()), torch.finfo(torch.float64).tiny)
            largest = max(largest, float((one - other)[finite].abs().max()) / scale)
    return largest


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]

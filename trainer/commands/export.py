"""`--export`: the model of a finished run as a program that runs without this trainer.

Traced from a few real batches and kept if, loaded again, it answers them as the model does.
"""

import importlib.util
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
from torch.export import Dim, ExportedProgram

from trainer.commands.describe import facts_of_data
from trainer.commands.flags import Flags
from trainer.commands.predict import write_output
from trainer.commands.trained import find_run, rebuild_task, shipped_weights, trained_objective
from trainer.common.errors import UserError
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys
from trainer.logs.console import say
from trainer.loop.precision import choose_precision, of_dtype
from trainer.parallel.base import Parallel
from trainer.task import Exported, Objective, Task, validation_sets

ABOUT = "about.json"
"""The name within a .pt2 of what is told about it."""
_BATCH_SIZES = (4, 3, 2, 1)
"""Of the batches that programs are traced from and checked on: what differs between them may have any size."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far answers may be apart, as a share of the largest number in an output."""

Answer = Callable[[Exported], Sequence[Tensor]]
"""What a written program answers to a call, one tensor after the other."""


@torch.no_grad()
def export_model(flags: Flags, parallel: Parallel) -> None:
    """`--export`. Raises UserError, with nothing written, also where the program answers otherwise than the model."""
    path = flags.exporting.export
    assert path is not None
    run = find_run(flags, {"--resume-from": flags.checkpoint.resume_from}, shipped_weights(flags), say)
    task = rebuild_task(run, flags)
    for remark in run.remarks:
        say(remark)
    task.data_facts = None  # it is used with its data
    dtype = choose_precision(flags.precision, parallel.device).dtype
    hint = "the task's code has changed since, or the data that it reads"
    objective = trained_objective(task, run.state["model"], parallel.device, dtype, "the checkpoint", hint).eval()
    objective.start_evaluation()
    batches = [of_dtype(parallel.to_device(batch), dtype) for batch in example_batches(task)]
    calls = [task.exported(objective, batch) or recorded_call(task, objective, batch) for batch in batches]
    with _refusing_failures(f"--export {path}: torch cannot export {type(calls[0].program).__name__}"), _quietly():
        program = traced(calls)
        about = {
            "task": run.state["task"],
            "inputs": shapes(program),
            "data_facts": facts_of_data(task),
        }
        content, answer = _FORMATS[path.suffix](program, about)
        difference = None if answer is None else max(largest_difference(call, answer(call)) for call in calls)
    if difference is not None and not difference <= _TOLERANCE[dtype]:
        raise UserError(
            f"--export {path}: not written, for what was exported differs from the model by {difference:.1e} of its "
            "largest answer"
        )
    write_output(path, content, "--export")
    inputs = ", ".join(f"{name} {shape}" for name, shape in about["inputs"].items())
    say(f"Exported {run.label} to {path}. Inputs: {inputs}")
    sizes = f"{len(calls)} batches of {min(_BATCH_SIZES)} to {max(_BATCH_SIZES)} samples"
    if difference is None:
        say("Not compared with the model, since onnxruntime is not installed.")
    else:
        say(f"Compared with the model on {sizes}: the largest difference is {difference:.1e} of the largest answer.")


# --- what is exported --------------------------------------------------------------------------------------------


def example_batches(task: Task) -> Iterator[Batch]:
    """Of a validation set, or of the test set: samples at random, the same at every time.

    Contiguous in memory: programs take what lies as their first batch did.
    """
    splits = task.splits()
    dataset = splits[next(iter(validation_sets(splits)), "test")]
    number = sum(_BATCH_SIZES)
    chosen = np.random.default_rng(0).choice(len(dataset), number, replace=len(dataset) < number)
    for index in np.split(chosen, np.cumsum(_BATCH_SIZES)[:-1]):
        keys = SampleKeys(np.sort(index), epoch=0)
        batch = task.collate(dataset.__getitems__(keys), keys)
        yield {name: tensor.contiguous() for name, tensor in batch.items()}


def recorded_call(task: Task, objective: Objective, batch: Batch) -> Exported:
    """The call that the objective's forward makes of its model. Raises UserError where it makes none."""
    model, calls = objective.model, []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        calls.append(Exported(model, inputs, _copied(output)))

    with model.register_forward_hook(record, with_kwargs=True):
        objective(batch)
    if not calls:
        raise UserError(
            f"--export: {type(objective).__name__}.forward does not call its `model` as a whole; say what to export by "
            f"{type(task).__name__}.exported"
        )
    return calls[0]


def traced(calls: Sequence[Exported]) -> ExportedProgram:
    """The program of the first call, which takes whatever sizes differ between the calls."""
    first = calls[0]
    every_input = [call.inputs for call in calls]
    sizes = {
        name: _free_sizes([inputs.get(name) for inputs in every_input], first.lengths.get(name, ()))
        for name in first.inputs
    }
    args, kwargs = _arguments(first)
    return torch.export.export(first.program, args, kwargs, dynamic_shapes=sizes)


def _free_sizes(values: Sequence[Any], lengths: Sequence[int]) -> Any:
    """In the form that torch.export takes. values: of one input in all calls."""
    first = values[0]
    if isinstance(first, Tensor):
        differs = [len({value.shape[dim] for value in values}) > 1 for dim in range(first.dim())]
        return {dim: Dim.DYNAMIC for dim in range(first.dim()) if differs[dim] or dim in lengths}
    if isinstance(first, Mapping):
        return {name: _free_sizes([value[name] for value in values], lengths) for name in first}
    if isinstance(first, tuple | list):
        return [_free_sizes(parts, lengths) for parts in zip(*values, strict=True)]
    return None


def _arguments(call: Exported) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position as far as the signature lets."""
    bound = inspect.BoundArguments(inspect.signature(call.program.forward), dict(call.inputs))
    return bound.args, bound.kwargs


def shapes(program: ExportedProgram) -> dict[str, str]:
    """Of each tensor that the program takes, such as "(?, 9, 128)"; a question mark stands for any size."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = {}
    for name in program.graph_signature.user_inputs:
        if isinstance(name, str) and isinstance(value := nodes[name].meta["val"], Tensor):
            sizes = [str(size) if isinstance(size, int) else "?" for size in value.shape]
            found[name] = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
    return found


# --- how it is written -------------------------------------------------------------------------------------------


def _as_pt2(program: ExportedProgram, about: Mapping[str, Any]) -> tuple[bytes, Answer | None]:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})
    file.seek(0)
    loaded = torch.export.load(file).module()

    def answer(call: Exported) -> Sequence[Tensor]:
        args, kwargs = _arguments(call)
        return _tensors(loaded(*args, **kwargs))

    return file.getvalue(), answer


def _as_onnx(program: ExportedProgram, about: Mapping[str, Any]) -> tuple[bytes, Answer | None]:
    converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None
    content = converted.model_proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is None:
        return content, None
    session = importlib.import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])

    def answer(call: Exported) -> Sequence[Tensor]:
        tensors = _tensors(list(call.inputs.values()))
        names = [each.name for each in session.get_inputs()]
        outputs = session.run(None, dict(zip(names, (t.cpu().numpy() for t in tensors), strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    return content, answer


_FORMATS = {".pt2": _as_pt2, ".onnx": _as_onnx}


@contextmanager
def _refusing_failures(what: str) -> Iterator[None]:
    """Makes a UserError of whatever torch raises about a model that it cannot export; there is no common kind."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{what}: {reason}; another form of it can be given by `Task.exported`") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch says to the authors of its exporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# --- whether it is right -----------------------------------------------------------------------------------------


def largest_difference(call: Exported, found: Sequence[Tensor]) -> float:
    """As a share of the largest finite number of an output; infinite where infinities or shapes differ."""
    expected = _tensors(call.expected)
    if len(expected) != len(found):
        return float("inf")
    return max((_difference(*pair) for pair in zip(expected, found, strict=True)), default=0.0)


def _difference(expected: Tensor, found: Tensor) -> float:
    expected, found = expected.double().cpu(), found.double().cpu()
    finite = expected.isfinite()
    if expected.shape != found.shape or not torch.equal(expected[~finite], found[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = float((expected[finite] - found[finite]).abs().max())
    return difference / max(float(expected[finite].abs().max()), torch.finfo(torch.float64).tiny)


def _tensors(values: Any) -> list[Tensor]:
    """All of them, in order."""
    if isinstance(values, Tensor):
        return [values]
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _copied(values: Any) -> list[Tensor]:
    """Since a forward may go on to write into what its model returned."""
    return [tensor.clone() for tensor in _tensors(values)]

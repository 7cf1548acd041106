"""Tests that every built-in model exports and gives the same results at sizes that it was not traced with."""

import pytest
import torch

from trainer.commands import export

SPEECH = ["--task", "speech", "--width", "16", "--num-blocks", "1"]
LMU = "--task speech --model lmu --hidden-size 16 --num-layers 1 --num-heads 2 --memory-size 8 --theta 10".split()
SEQREC = ["--task", "seqrec", "--hidden-units", "8"]
KGAT = ["--task", "kgat", "--model", "kgat", "--embed-dim", "8"]
TABULAR = ["--task", "tabular", "--num-val-tables", "12", "--num-tables", "16"]


def sizes(*shapes):
    return dict(shape.split(" ", 1) for shape in shapes)


def signals(length):
    return lambda: {"x": torch.randn(1, 9, length)}


def histories(length):
    items = torch.randint(1, 9, (5, length))
    return {
        "items": items,
        "length": torch.randint(1, length + 1, (5,)),
        "times": torch.arange(length, dtype=torch.int32).repeat(5, 1),
    }


def without_times(length):
    return {name: value for name, value in histories(length).items() if name != "times"}


def utterances():
    return {"audio": torch.randn(2, 40_000), "num_samples": torch.tensor([40_000, 100])}


def problems():
    context, queries = torch.randn(1, 40, 3), torch.randn(1, 1, 3)
    counts = {"num_context": torch.tensor([33]), "num_features": torch.tensor([3]), "num_classes": torch.tensor([2])}
    return {"context": context, "labels": torch.randint(0, 2, (1, 40)), "queries": queries} | counts


WINDOWS = sizes("x (?, 9, ?)")
HISTORIES = sizes("items (?, ?)", "length (?,)", "times (?, ?)")
AUDIO = sizes("audio (?, ?)", "num_samples (?,)")
TABLES = sizes(
    "context (?, ?, ?)", "labels (?, ?)", "queries (?, ?, ?)", "num_context (?,)", "num_features (?,)",
    "num_classes (?,)",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "inputs", "other"),
    [
        pytest.param([], WINDOWS, signals(50), id="harnet"),
        pytest.param(["--mode", "flatten"], WINDOWS, signals(50), id="harnet-flatten"),
        pytest.param(["--model", "tinyhar"], sizes("x (?, 9, 128)"), signals(128), id="tinyhar"),
        pytest.param(["--model", "deepconvlstm"], sizes("x (?, 9, 128)"), signals(128), id="deepconvlstm"),
        pytest.param([*SEQREC, "--no-time"], sizes("items (?, ?)", "length (?,)"),
                     lambda: without_times(1), id="sasrec"),
        pytest.param(SEQREC, HISTORIES, lambda: histories(120), id="tisasrec"),
        *(pytest.param([*task, "--model", model], sizes("items (?, ?)", "length (?,)"), lambda: without_times(1),
                       id=model)
          for task, model in ((SEQREC[:2], "rules"), (SEQREC[:2], "popularity"), (KGAT[:2], "ease"))),
        pytest.param([*SEQREC, "--mhc"], HISTORIES, lambda: histories(3), id="tisasrec-mhc"),
        *(pytest.param([*KGAT, "--model", model], sizes("users (?,)"), lambda: {"users": torch.tensor([3])}, id=model)
          for model in ("kgat", "bprmf", "lightgcn", "kg-lightgcn")),
        pytest.param(SPEECH, AUDIO, utterances, id="plmu"),
        pytest.param([*SPEECH, "--streaming"], AUDIO, utterances, id="plmu-streaming"),
        pytest.param(LMU, AUDIO, utterances, id="lmu"),
        pytest.param([*TABULAR, "--width", "8"], TABLES, problems, id="nano"),
        pytest.param([*TABULAR, "--model", "tabicl"], TABLES, problems, id="tabicl"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_shipped_model_exports(argv, inputs, other, make_task):
    torch.manual_seed(0)
    task = make_task(*argv)
    objective = task.build_objective().eval()
    objective.start_evaluation()
    calls = [task.exported(objective, batch) for batch in export.example_batches(task)]
    program = export.traced(calls)
    assert export.shapes(program) == inputs
    _, answer = export.as_pt2(program, {})
    given = other()
    calls.append(calls[0]._replace(inputs=given, expected=calls[0].program(**given)))
    for call in calls:
        assert export.largest_difference(call, answer(call)) < 1e-4

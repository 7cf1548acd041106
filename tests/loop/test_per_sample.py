"""`Task.summarise` gets the outputs of each sample once and in order, on any number of devices and in any batches."""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tasks import TASKS
from tests.conftest import ROOT, launcher, load
from tests.helpers.replicas import ReplicasOnCpu
from tests.helpers.scored_task import Points, Scored
from trainer.commands.build import assemble_run, build_task
from trainer.commands.parse import parse
from trainer.common.errors import UserError
from trainer.loading.workers import BatchLoader
from trainer.loop.evaluate import evaluate
from trainer.loop.totals import PerSampleOutputs, in_order, joined
from trainer.parallel.strategy import SingleDevice
from trainer.task import PerSample

CPU = torch.device("cpu")
SCORED = f"{ROOT / 'tests' / 'helpers' / 'scored_task.py'}:Scored"
RUN = ["--task", SCORED, "--dtype", "float64", "--epochs", 2, "--global-batch-size", 6, "--num-threads", 1]


def slow_auc(scores, labels):
    """Computes the area under the ROC curve from all pairs of samples."""
    pairs = [(a, b) for a, i in zip(scores, labels, strict=True) for b, j in zip(scores, labels, strict=True) if i > j]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def expected_scores(model, split, num=7):
    """Returns the scores and labels of a split, computed one sample at a time."""
    data = Points(num, {"val": 1, "test": 2}[split])
    with torch.no_grad():
        points = torch.from_numpy(data.points).double()
        scores = [float(F.linear(point[None], model["weight"], model["bias"])[0, 0]) for point in points]
    return scores, data.labels.tolist()


@pytest.mark.parametrize(
    ("world_size", "eval_batch_size", "more"),
    [
        (1, 1, []),
        (1, 3, ["--ema-decay", 0.9]),
        (1, 100, []),
        (2, 3, ["--ema-decay", 0.9]),
        pytest.param(3, 1, [], marks=pytest.mark.slow),
        pytest.param(2, 1, [], marks=pytest.mark.slow),
        pytest.param(2, 100, [], marks=pytest.mark.slow),
        pytest.param(3, 2, ["--num-test", 2], marks=pytest.mark.slow),
        pytest.param(3, 100, [], marks=pytest.mark.slow),
    ],
)
def test_a_runs_auc_covers_all_samples(world_size, eval_batch_size, more, command, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    run = [*launcher(world_size), *RUN, *more, "--device", "cpu", "--batch-size", 2, "--eval-batch-size"]
    command(*run, eval_batch_size, "--save-dir", tmp_path / "run", LOCKSTEP_RECORD=str(seen))
    num = 2 if "--num-test" in more else 7
    scores, labels = expected_scores(load(tmp_path / "run" / "best.pth")["model"], "test", num)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["scores"] == pytest.approx(scores, rel=1e-12)
    assert results["metrics"]["test/auc"] == slow_auc(scores, labels)
    assert results["best"]["value"] == max(r["val/auc"] for r in epochs(tmp_path / "run"))
    processes = sorted(path.name.split("-")[0] for path in seen.iterdir())
    assert processes == ["drawn", "summarised"]  # one process each


def epochs(directory):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == "epoch"]


@pytest.mark.slow
def test_eval_only_scores_outputs_per_sample_on_two_processes(run_here, command, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path)
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    out = command(*launcher(2), *RUN, "--device", "cpu", "--eval-only", "--save-dir", tmp_path).stdout
    assert re.findall(r"auc[ =]+([\d.]+)", out)[-1] == f"{metrics['test/auc']:.4f}"


def test_an_ensemble_is_scored_per_sample(command, tmp_path):
    command("main.py", *RUN, "--device", "cpu", "--seeds", 2, "--save-dir", tmp_path)
    models = [load(path)["model"] for path in sorted(tmp_path.glob("*/best.pth"))]
    scores = np.mean([expected_scores(model, "test")[0] for model in models], axis=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ensemble"]["test/auc"] == slow_auc(scores.tolist(), expected_scores(models[0], "test")[1])


# --- one evaluation ----------------------------------------------------------------------------------------------


def evaluated(strategy, *argv, change=lambda run: None):
    flags, problems = parse(["--task", SCORED, "--dtype", "float64", *argv], several_devices=False)
    assert problems == []
    run = assemble_run(flags, build_task(flags), strategy)
    change(run)
    return run, evaluate(run, "val")


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("eval_batch_size", [1, 2, 5])
def test_outputs_of_replicas_are_concatenated(num_replicas, eval_batch_size):
    argv = ("--eval-batch-size", str(eval_batch_size))
    run, sums = evaluated(ReplicasOnCpu(num_replicas), *argv)
    _, expected = evaluated(SingleDevice(CPU))
    assert run.task.summarise(sums)["auc"] == run.task.summarise(expected)["auc"]
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


def test_samples_without_loss_terms_are_counted():
    """A batch of weight 0 is not a placeholder."""

    def weightless(run):
        def collate(samples, keys):
            return run.task.collate(samples, keys) | {"weight": torch.zeros(len(keys.index))}

        run.loaders["val"] = BatchLoader([run.task.splits()["val"]], collate)

    _, sums = evaluated(SingleDevice(CPU), "--eval-batch-size", "2", change=weightless)
    _, expected = evaluated(SingleDevice(CPU))
    assert sums["weight"] == 0
    assert sums["loss"] == pytest.approx(float(expected["loss"]), rel=1e-12)
    assert torch.equal(sums["label"], expected["label"])


def test_an_objective_may_return_only_outputs_per_sample():
    def only(run):
        forward = run.learner.objective.forward
        run.learner.objective.forward = lambda batch: {"score": forward(batch)["score"]}

    _, sums = evaluated(SingleDevice(CPU), change=only)
    assert {name: len(value.view(-1)) for name, value in sums.items()} == {"weight": 1, "score": 11}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_per_sample_outputs_keep_their_dtype(dtype):
    outputs = PerSampleOutputs()
    for index in ([2, 0], [1]):
        outputs.add(torch.tensor(index), {"x": PerSample(torch.tensor(index).to(dtype)), "sum": torch.tensor(1)})
    (x,) = outputs.gathered(SingleDevice(CPU).group, 3).values()
    assert x.dtype == dtype
    assert torch.equal(x, torch.arange(3).to(dtype))


def test_a_saved_slice_does_not_keep_the_whole_tensor():
    outputs = PerSampleOutputs()
    outputs.add(torch.arange(5), {"x": PerSample(torch.zeros(5, 1000)[:, :1])})
    assert outputs._parts[0]["x"].untyped_storage().nbytes() == 20


# --- mistakes of a task's author ---------------------------------------------------------------------------------


def test_outputs_must_have_one_row_per_sample():
    for values in (torch.zeros(2, 3), torch.tensor(1.0)):
        outputs = PerSampleOutputs()
        outputs.add(torch.arange(3), {"x": PerSample(values)})
        with pytest.raises(UserError, match=r"PerSample 'x': .* for a batch of 3 samples; it must return one row per"):
            outputs.gathered(SingleDevice(CPU).group, 3)


def test_rows_must_have_equal_shapes():
    with pytest.raises(UserError, match=r"PerSample 'x': .* rows of shape \(3,\) \(torch.*\) and of \(4,\) "):
        joined([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}])


def test_all_batches_must_have_the_same_outputs_per_sample():
    rows, nothing = {"x": PerSample(torch.zeros(2))}, {"sum": torch.tensor(1)}
    for first, second in ((rows, nothing), (nothing, rows), (rows, rows | {"y": PerSample(torch.zeros(2))})):
        outputs = PerSampleOutputs()
        outputs.add(torch.arange(2), first)
        with pytest.raises(UserError, match=r"PerSample '[xy]': the objective must return it for all batches"):
            outputs.add(torch.arange(2), second)


def test_index_must_name_every_sample():
    share = torch.tensor([0, 0, 2]), {"x": torch.zeros(3)}
    with pytest.raises(UserError, match=r"covered only 2 of 3 samples"):
        in_order([share], 3)


def test_training_metrics_must_be_sums(refused, monkeypatch, tmp_path):
    class AlwaysPerSample(Scored):
        def build_objective(self):
            objective = super().build_objective()
            forward = objective.forward
            objective.forward = lambda *args: {**forward(*args), "x": PerSample(args[0]["label"])}
            return objective

    monkeypatch.setitem(TASKS, "always", AlwaysPerSample)
    message = "in train mode must return a tensor for 'x', a sum over the samples, not a PerSample"
    refused([message], "--task", "always", "--save-dir", tmp_path)

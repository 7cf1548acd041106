"""Sums of metrics may differ in names or shapes between batches, micro-batches, replicas or ranks."""

import json

import pytest
import torch

from tests.helpers.domains_task import DOMAINS
from tests.helpers.forks import ROOT, run_group
from trainer.common.errors import UserError
from trainer.loop.totals import FOLD_EVERY, Totals, add_sums, share_of
from trainer.parallel.data_parallel import SummedReplicas
from trainer.parallel.group import Group

ONE_PROCESS = Group([torch.device("cpu")])
DOMAINS_TASK = f"{ROOT / 'tests' / 'helpers' / 'domains_task.py'}:Domains"
TINY = ["--task", DOMAINS_TASK, "--epochs", 1, "--num-train", 23, "--batch-size", 2, "--eval-batch-size", 2,
        "--log-interval", 3, "--num-threads", 1, "--device", "cpu", "--dtype", "float64"]  # fmt: skip


def total_of(batches, totals=None):
    totals = totals or Totals()
    for sums in batches:
        totals.add({name: torch.as_tensor(value) for name, value in sums.items()}, weight=1.0)
    return {name: value.tolist() for name, value in totals.reduced(ONE_PROCESS).items()}


@pytest.mark.parametrize("at", [0, 1, FOLD_EVERY - 1, FOLD_EVERY, FOLD_EVERY + 1])
def test_a_metric_that_a_batch_lacks_counts_as_zero(at):
    batches = [{"loss": 1.0, "cats": 1} for _ in range(2 * FOLD_EVERY)]
    del batches[at]["cats"]
    assert total_of(batches) == {"loss": 2 * FOLD_EVERY, "cats": 2 * FOLD_EVERY - 1, "weight": 2 * FOLD_EVERY}


@pytest.mark.parametrize("at", [0, 1, FOLD_EVERY - 1, FOLD_EVERY, FOLD_EVERY + 1])
def test_a_metric_of_a_single_batch_counts(at):
    batches = [{"loss": 1.0} for _ in range(2 * FOLD_EVERY)]
    batches[at]["cats"] = [3, 4]
    assert total_of(batches)["cats"] == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_beside_sums_of_a_small_type_stay_exact(dtype):
    batches = [{"cats": 2**24 + 1}, {"cats": torch.tensor(0.5, dtype=dtype)}]
    assert total_of(batches)["cats"] == 2**24 + 1.5


def test_metrics_of_only_skipped_steps_are_zero():
    totals = Totals()
    for k, applied in enumerate([True, False, True]):
        totals.add({"loss": torch.tensor(2.0), f"sum {k}": torch.tensor(5.0)}, 1.0, torch.tensor(applied))
    assert totals.reduced(ONE_PROCESS) == {"loss": 4, "sum 0": 5, "sum 1": 0, "sum 2": 5, "weight": 2}


@pytest.mark.parametrize("num_before", [1, FOLD_EVERY, FOLD_EVERY + 1])
def test_another_shape_is_refused_and_earlier_sums_remain(num_before):
    totals = Totals()
    total_of([{"loss": 1.0, "places": [1, 2, 3]}] * num_before, totals)
    with pytest.raises(UserError, match=r"'places' with different shapes, \(3,\) and \(4,\); a sum"):
        total_of([{"loss": 1.0, "places": [1, 2, 3, 4]}], totals)
    assert totals.unreduced()["places"].tolist() == [num_before, 2 * num_before, 3 * num_before]


def test_another_shape_than_in_the_checkpoint_is_refused():
    """Broadcasting would add a sum of one number to every element."""
    resumed = share_of({"places": torch.tensor([1.0, 2.0]), "weight": torch.tensor(1.0)}, ONE_PROCESS)
    with pytest.raises(UserError, match=r"different shapes, \(2,\) and \(1,\)"):
        total_of([{"places": [7.0]}], resumed)


def test_micro_batches_of_a_step_have_the_union_of_metrics():
    sums = {}
    add_sums(sums, {"loss": torch.tensor(1.0), "cats": torch.tensor(2)})
    add_sums(sums, {"loss": torch.tensor(1.0), "dogs": torch.tensor(3)})
    assert sums == {"loss": 2.0, "cats": 2, "dogs": 3}
    with pytest.raises(UserError, match="'cats'"):
        add_sums(sums, {"cats": torch.tensor([2])})


def test_replicas_have_the_union_of_metrics():
    parts = [{"loss": torch.tensor(1.0), "cats": torch.tensor(2)}, {"loss": torch.tensor(1.0), "dogs": torch.tensor(3)}]
    assert SummedReplicas.gather(None, parts, "cpu") == {"loss": 2.0, "cats": 2, "dogs": 3}
    with pytest.raises(UserError, match="'cats'"):
        SummedReplicas.gather(None, [*parts, {"cats": torch.zeros(2)}], "cpu")


def metrics_of(folder, form, environment, *more):
    folder.mkdir()
    arguments = ["--multi-gpu", form, *TINY, "--save-dir", folder / "run", *more]
    assert run_group(arguments, 2, environment, folder / "out") == [0, 0], (folder / "out").read_text()
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((folder / "run" / "results.json").read_text())["metrics"]
    for record in records:
        found |= {name: value for name, value in record.items() if "/seen_" in name or name.endswith("/long")}
    return found


@pytest.mark.parametrize("form", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_metrics_that_some_ranks_lack_match_one_device(form, tmp_path, environment):
    """Each rank evaluates every other validation sample, and one of the two test samples."""
    found = metrics_of(tmp_path / form, form, environment)
    for split, size in {"train": 23, "val": 17, "test": 2}.items():
        seen = {name: found.get(f"{split}/seen_{name}") for name in DOMAINS}
        assert seen == {name: len(range(k, size, 5)) or None for k, name in enumerate(DOMAINS)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_a_shape_that_one_rank_has_is_refused_on_all(form, tmp_path, environment):
    arguments = ["--multi-gpu", form, *TINY, "--save-dir", tmp_path / "run", "--odd-sample", 11]
    assert run_group(arguments, 2, environment, tmp_path / "out") == [2, 2]
    (error,) = [line for line in (tmp_path / "out").read_text().splitlines() if "error: " in line]
    assert "returned the sum 'lengths' with different shapes, (" in error

"""Helpers of an objective have its device and dtype, are frozen in eval mode, and are saved only as a digest."""

from hashlib import blake2b

import pytest
import torch
from torch import nn

from tests.conftest import ROOT, largest_difference, load
from tests.helpers import forks
from tests.helpers.distilling_task import Distil, Distilling, loss_of, teacher
from tests.helpers.shaped_task import NUM_CLASSES, NUM_FEATURES, Points
from trainer import load as load_model
from trainer.loading.order import EpochOrder
from trainer.loop.evaluate import digest_of

FILE = ROOT / "tests" / "helpers" / "distilling_task.py"
RUN = ["--dtype", "float64", "--num-threads", 1, "--device", "cpu", "--weight-decay", 0, "--save-dir"]
DISTIL = ["--task", f"{FILE}:Distil", "--global-batch-size", 8, "--batch-size", 4, *RUN]


def bare(num_epochs):
    torch.manual_seed(0)
    student, its = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), teacher().double().eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.05, weight_decay=0)
    x = torch.from_numpy(Points(21, 1).x)
    y = (x.sum(1) > 0).long()
    for epoch in range(num_epochs):
        for index in torch.from_numpy(EpochOrder(0, epoch, 0, 21).take(0, 21)).split(8):
            optimizer.zero_grad()
            (loss_of(student, its, x[index].double(), y[index]) / len(index)).backward()
            optimizer.step()
    return student.state_dict()


def test_a_teacher_works_on_one_process_and_beside_a_sharded_model(run_here, environment, tmp_path):
    run_here(*DISTIL, tmp_path / "one", "--epochs", 2)
    argv = ["--multi-gpu", "fsdp", *DISTIL, tmp_path / "two", "--epochs", 2]
    assert forks.run_group(argv, 2, environment, tmp_path / "out.txt") == [0, 0], (tmp_path / "out.txt").read_text()
    one, two = (load(tmp_path / name / "final.pth") for name in ("one", "two"))
    for state in (one, two):
        assert largest_difference(state, {"model": bare(2)}) < 1e-12
        assert state["model"].keys() == {"weight", "bias"}
    assert one["helpers"] == two["helpers"] and len(one["helpers"]["teacher"]) == 128
    assert isinstance(load_model(tmp_path / "one", task=Distil), nn.Linear)


def test_a_run_resumed_with_another_teacher_warns(run_here, tmp_path, monkeypatch):
    run_here(*DISTIL, tmp_path, "--epochs", 1)
    out, _ = run_here(*DISTIL, tmp_path, "--epochs", 2)
    assert "helper" not in out.partition("\nNext: ")[0]
    monkeypatch.setenv("TEACHER", "8")
    out, _ = run_here(*DISTIL, tmp_path, "--epochs", 3)
    assert "Changed since the checkpoint: the helper teacher" in out


def test_batches_and_helpers_may_have_sparse_tensors_and_an_extra_state(run_here, tmp_path):
    for name in ("Sparse", "Distil"):
        run_here("--task", f"{FILE}:{name}", *RUN, tmp_path / name, "--epochs", 1)
    sparse, dense = (load(tmp_path / name / "final.pth") for name in ("Sparse", "Distil"))
    assert [*map(torch.equal, sparse["model"].values(), dense["model"].values())] == [True, True]
    assert len(sparse["data_digest"]) == 16 and len(sparse["helpers"]["teacher"]) == 128


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("divided", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_digests_of_sparse_and_conjugate_tensors_depend_on_all_elements(divided):
    dense, numbers = torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([1 + 2j])
    bits = dense.T.contiguous().numpy().tobytes() + numbers.numpy().tobytes()
    assert digest_of([dense.T, numbers]) == blake2b(bits).hexdigest()
    own, again, other, moved = (digest_of([divided(each)]) for each in (dense, dense.clone(), 2 * dense, dense.flip(0)))
    assert own == again and len({own, other, moved}) == 3
    assert digest_of([numbers.conj()]) == digest_of([numbers.conj().resolve_conj()]) != digest_of([numbers])
    assert digest_of([{"scale": dense, "version": 1}, None]) == digest_of([dense])


def test_helpers_follow_the_device_and_stay_frozen_in_eval_mode():
    objective = Distilling(nn.Linear(4, 2), helpers={"teacher": teacher()}).double().train()
    its = objective.helpers["teacher"]
    assert not its.training and not any(module.training for module in its.modules())
    assert {p.dtype for p in its.parameters()} == {torch.float64}
    assert not any(p.requires_grad for p in its.parameters())
    assert {name for name, _ in objective.named_parameters()} == {"model.weight", "model.bias"}
    assert next(objective.to("meta").helpers["teacher"].parameters()).is_meta


def test_invalid_helpers_are_refused(run_here, tmp_path):
    _, error = run_here("--task", f"{FILE}:Tied", *RUN, tmp_path, status=2)
    assert "the helper 'teacher' shares parameters with the model, but helpers are frozen; pass a copy" in error


@pytest.mark.parametrize("name", ["AfterSteps", "InForward"])
def test_a_helper_that_changes_is_refused_after_the_first_step(name, run_here, tmp_path):
    _, error = run_here("--task", f"{FILE}:{name}", *RUN, tmp_path, "--epochs", 1, status=2)
    assert "the helper 'teacher' has changed after optimizer step 1, but helpers are never saved" in error
    assert not list(tmp_path.glob("*.pth"))

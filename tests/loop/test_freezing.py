"""A part that is frozen for some epochs trains as in a bare loop, on any devices, and after a resume from any step."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import largest_difference, load
from tests.helpers import forks
from tests.helpers.shaped_task import Points
from tests.helpers.tuned_task import Network
from trainer.loading.order import EpochOrder

FILE = "tests/helpers/tuned_task.py"
RUN = ["--task", f"{FILE}:Tuned", "--dtype", "float64", "--num-threads", 1, "--epochs", 4, "--global-batch-size", 8]

OFTEN = ["--save-every-steps", 1, "--keep-checkpoints", 0]


def bare():
    """Returns the weights after four epochs of a loop that unfreezes the trunk after two."""
    torch.manual_seed(0)
    model = Network().double()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    x = torch.from_numpy(Points(21, 1).x)
    for epoch in range(4):
        model.trunk.requires_grad_(epoch >= 2)
        for index in torch.from_numpy(EpochOrder(0, epoch, 0, 21).take(0, 21)).split(8):
            optimizer.zero_grad()
            logits = model.head(model.trunk(x[index].double()))
            F.cross_entropy(logits, (x[index].sum(1) > 0).long()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {"model": model.state_dict()}


def test_equals_a_bare_loop_after_any_resume(run_here, tmp_path):
    argv = [*RUN, "--device", "cpu", *OFTEN]
    run_here(*argv, "--save-dir", tmp_path / "whole")
    assert largest_difference(load(tmp_path / "whole" / "final.pth"), bare()) < 1e-12
    checkpoints = sorted((tmp_path / "whole").glob("checkpoint_*_*.pth"))
    for path in checkpoints[1::3]:
        run_here(*argv, "--resume-from", path, "--save-dir", tmp_path / path.stem)
        assert largest_difference(load(tmp_path / path.stem / "final.pth"), bare()) < 1e-12


@pytest.mark.parametrize(("form", "task"), [("ddp", "Tuned"), ("fsdp", "InBlocks")])
def test_equals_a_bare_loop_on_two_processes(form, task, environment, tmp_path):
    argv = [*RUN, "--task", f"{FILE}:{task}", "--device", "cpu", "--multi-gpu", form, "--batch-size", 2, *OFTEN]
    middle = ["--resume-from", tmp_path / "whole" / "checkpoint_1_0_8.pth"]
    for name, more in (("whole", []), ("resumed", middle)):
        argv_now = [*argv, "--save-dir", tmp_path / name, *more]
        assert forks.run_group(argv_now, 2, environment, tmp_path / "out") == [0, 0], (tmp_path / "out").read_text()
        assert largest_difference(load(tmp_path / name / "final.pth"), bare()) < 1e-12


@pytest.mark.parametrize("task", ["Thawing", "Freezing"])
def test_changes_of_requires_grad_are_refused(task, run_here, tmp_path):
    _, error = run_here(*RUN, "--task", f"{FILE}:{task}", "--device", "cpu", "--save-dir", tmp_path, status=2)
    assert "Thawing.on_epoch_start changes requires_grad of model.trunk.0.weight, which a resumed run would" in error

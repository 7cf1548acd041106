"""State that steps change besides parameters does not depend on saves, resumes or the number of processes."""

import json

import pytest
import torch

from tests.conftest import ROOT, assert_same_bits, cut_back, largest_difference, load
from tests.helpers.remembering_task import Pair, loss_of
from tests.helpers.shaped_task import Points
from trainer.loading.order import EpochOrder

FILE = ROOT / "tests" / "helpers" / "remembering_task.py"
RUN = ["--dtype", "float64", "--num-threads", 1, "--device", "cpu", "--epochs", 2, "--weight-decay", 0, "--save-dir"]
TWO = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2]


def test_distillation_matches_a_bare_loop(run_here, command, tmp_path):
    argv = ["--task", f"{FILE}:MeanTeacher", "--global-batch-size", 8]
    run_here(*argv, "--batch-size", 3, *RUN, tmp_path / "one")
    command(*TWO, *argv, "--batch-size", 3, *RUN, tmp_path / "two")
    torch.manual_seed(0)
    pair = Pair().double()
    optimizer = torch.optim.AdamW(pair.student.parameters(), lr=0.05, weight_decay=0)
    x = torch.from_numpy(Points(21, 1).x)
    labels = (x.sum(1) > 0).long()
    for epoch in range(2):
        for chosen in torch.from_numpy(EpochOrder(0, epoch, 0, 21).take(0, 21)).split(8):
            optimizer.zero_grad()
            (loss_of(pair, x[chosen].double(), labels[chosen]) / len(chosen)).backward()
            optimizer.step()
            pair.follow()
    for name in ("one", "two"):
        assert largest_difference(load(tmp_path / name / "final.pth"), {"model": pair.state_dict()}) < 1e-12


@pytest.mark.parametrize("task", ["Remembering", "MeanTeacher"])
def test_one_process_resumes_bit_identically_from_any_step(task, run_here, tmp_path):
    argv = ["--task", f"{FILE}:{task}", "--save-every-steps", 1, "--keep-checkpoints", 0, *RUN]
    run_here(*argv, tmp_path / "whole")
    assert_resumes(lambda directory: run_here(*argv, directory), tmp_path, (1, 3, 5))


def test_two_processes_resume_bit_identically_and_saves_change_nothing(command, tmp_path):
    argv = [*TWO, "--task", f"{FILE}:Remembering", "--keep-checkpoints", 0, *RUN]
    command(*argv, tmp_path / "whole", "--save-every-steps", 1)
    assert_resumes(lambda directory: command(*argv, directory, "--save-every-steps", 1), tmp_path, (2,))
    command(*argv, tmp_path / "unsaved")
    whole, unsaved = (load(tmp_path / name / "final.pth")["model"] for name in ("whole", "unsaved"))
    assert_same_bits(whole, unsaved)
    assert float(whole["mean"].abs().sum()) > 0 and int(whole["num_batches"]) == 4


def assert_resumes(train, folder, steps):
    entries = json.loads((folder / "whole" / "manifest.json").read_text())["checkpoints"]
    for i in steps:
        cut_back(folder / "whole", entries[:i], folder / str(i))
        train(folder / str(i))
        assert_same_bits(load(folder / "whole" / "final.pth"), load(folder / str(i) / "final.pth"))


def test_a_skipped_step_leaves_no_trace_in_buffers(run_here, tmp_path):
    """Without the skip, a NaN would stay in the running mean."""
    (tmp_path / "poisoned.py").write_text(
        "from tests.helpers.remembering_task import *\n"
        "class Poisoned(Remembering):\n"
        "    def collate(self, samples, keys):\n"
        "        batch = super().collate(samples, keys)\n"
        "        batch['x'] = torch.where((batch['index'] == 3)[:, None], torch.nan, batch['x'])\n"
        "        return batch\n"
        "    def splits(self):\n"
        "        from tests.helpers.shaped_task import Points\n"
        "        return {'train': Points(21, 1), 'test': Points(3, 3)}\n"
    )
    argv = ["--task", f"{tmp_path / 'poisoned.py'}:Poisoned", "--on-nonfinite", "skip", "--batch-size", 4]
    run_here(*argv, *RUN, tmp_path / "run")
    state = load(tmp_path / "run" / "final.pth")
    assert state["skipped_steps"] == 2
    assert bool(state["model"]["mean"].isfinite().all())


def test_a_parameter_that_changes_in_forward_is_refused(refused, tmp_path):
    part = "Eager.forward(batch, 'train') in train mode changes the parameter model.teacher.0.weight, but each"
    refused([part], "--task", f"{FILE}:TooEager", *RUN, tmp_path / "run")


def test_every_random_generator_resumes_bit_identically(run_here, tmp_path):
    """The task draws in forward passes and for its split of the data, from generators that it does not seed."""
    (tmp_path / "drawing.py").write_text(
        "import random\n"
        "import numpy as np\n"
        "from tests.helpers.shaped_task import *\n"
        "class DrawingObjective(ShapedObjective):\n"
        "    def forward(self, batch, phase='train'):\n"
        "        if self.training:\n"
        "            shift = random.random() + np.random.rand()\n"
        "            batch = batch | {'x': F.dropout(batch['x']) + shift}\n"
        "        return super().forward(batch, phase)\n"
        "class Drawing(Shaped):\n"
        "    def splits(self):\n"
        "        data = Points(21, 1)\n"
        "        data.x = data.x[np.random.permutation(21)[:15]] + random.random()\n"
        "        return {'train': data, 'val': Points(8, 2), 'test': Points(8, 3)}\n"
        "    def build_objective(self):\n"
        "        return DrawingObjective(self.build())\n"
    )
    argv = ["--task", f"{tmp_path / 'drawing.py'}:Drawing", "--save-every-steps", 1, "--keep-checkpoints", 0, *RUN]
    run_here(*argv, tmp_path / "whole")
    assert_resumes(lambda directory: run_here(*argv, directory), tmp_path, (1, 3))

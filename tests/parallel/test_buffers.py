"""All ranks evaluate and save with rank 0's buffers, whatever their memory layout."""

import torch

from tests.conftest import TINY, WEIGHTED, read_metrics
from tests.helpers import forks
from tests.helpers.weighted_task import Weighted, WeightedObjective

NOT_CONTIGUOUS = f"{__file__}:NotContiguous"


class Counting(WeightedObjective):
    """Adds up sample indices in two buffers while it trains, and returns their sum as a score."""

    def __init__(self, model, delay_s):
        super().__init__(model, delay_s)
        model.register_buffer("transposed", torch.zeros(2, 3).t())
        model.register_buffer("every_second", torch.zeros(2, 6)[:, ::2])

    def forward(self, batch, phase="train"):
        buffers = self.model.transposed, self.model.every_second
        if self.training:
            for buffer in buffers:
                buffer += (batch["index"] * batch["weight"]).sum()
        score = sum(buffer.sum() for buffer in buffers)
        return super().forward(batch, phase) | {"score": score * batch["weight"].sum()}


class NotContiguous(Weighted):
    """Task whose model has a transposed buffer, and a buffer that is a slice of another tensor."""

    def build_objective(self):
        built = super().build_objective()
        return Counting(built.model, built.delay_s)

    def summarise(self, sums):
        return super().summarise(sums) | {"score": float(sums["score"] / sums["weight"])}


def test_all_processes_score_with_the_buffers_that_are_saved(environment, run_here, tmp_path):
    directory, output = tmp_path / "run", tmp_path / "out"
    argv = [NOT_CONTIGUOUS if word == WEIGHTED else word for word in TINY] + ["--save-dir", directory]
    several = ["--multi-gpu", "ddp", "--device", "cpu"]
    assert forks.run_group([*argv, *several], 2, environment, output) == [0, 0], output.read_text()
    (epoch,) = read_metrics(directory, "epoch")
    assert epoch["val/score"] > 0
    assert f"val/score {epoch['val/score']:.4f}" in run_here(*argv, "--eval-only").out

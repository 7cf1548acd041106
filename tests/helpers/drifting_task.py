"""Weighted task whose model starts to differ between ranks, as the environment variable LOCKSTEP_DRIFT says.

LOCKSTEP_DRIFT is "WHAT RANK FORWARD", with training forwards numbered from 1. WHAT: "bit" flips one bit of a weight;
"bit-threads" does so and sets 2 threads; "part" changes the rank's shard of a parameter; "forward" changes a parameter;
"table" changes a buffer. LOCKSTEP_DRIFT="buffer" instead updates a buffer differently on each rank in each forward.
"""

import os

import torch
import torch.distributed as dist

from tests.helpers.weighted_task import Weighted, WeightedObjective


class DriftingObjective(WeightedObjective):
    def forward(self, batch, phase="train"):
        if self.training and batch["weight"].sum() > 0:
            self.calls += 1
            self.drift(*os.environ["LOCKSTEP_DRIFT"].split())
        return super().forward(batch, phase)

    @torch.no_grad()
    def drift(self, what, rank="0", when="0"):
        if what == "buffer":
            self.model.seen += self.calls * (dist.get_rank() + 1)
        if dist.get_rank() != int(rank) or self.calls != int(when):
            return
        if what.startswith("bit"):
            self.model.layers[4].weight.data.view(torch.int32)[-1, -1] ^= 1
        elif what == "forward":
            self.model.layers[1].bias.mul_(1.5).add_(1)
        elif what == "part":
            its_last = self._get_fsdp_state()._fsdp_param_group.fsdp_params[-1]
            its_last.sharded_param.to_local().data.add_(1)
        elif what == "table":
            self.model.table.data[3] = 7
        if what == "bit-threads":
            torch.set_num_threads(2)


class Drifting(Weighted):
    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = DriftingObjective
        objective.calls = 0
        objective.model.register_buffer("seen", torch.zeros(()))
        objective.model.register_buffer("table", torch.arange(5))
        return objective

"""Task with a schedule-free optimizer (Defazio et al., 2024, arXiv:2405.15682)."""

import torch

from tests.helpers.shaped_task import Shaped

BETA = 0.9


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Follows https://github.com/facebookresearch/schedule_free: parameters are y in train mode, x in eval mode."""

    def __init__(self, params, lr, momentum=BETA):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False, "weight_sum": 0.0})

    def _switch(self, train_mode, weight):
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(end=self.state[p]["z"], weight=weight(group["momentum"]))
            group["train_mode"] = train_mode

    @torch.no_grad()
    def eval(self):
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self):
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            beta, lr = group["momentum"], group["lr"]
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone(memory_format=torch.preserve_format)
                p.lerp_(end=state["z"], weight=share)
                p.add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                state["z"].sub_(p.grad, alpha=lr)
            group["k"] += 1


class Free(Shaped):
    def build_optimizers(self, phase, groups, lr):
        return [ScheduleFreeSGD([{"params": group["params"]} for group in groups], lr)]

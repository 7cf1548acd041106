"""Tasks whose optimizers keep objects other than tensors in their states."""

import decimal
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import torch

from tests.helpers.shaped_task import Shaped


class Hoarder(torch.optim.SGD):
    """SGD that keeps an object of each type that checkpoints support, and whose steps depend on these objects."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            kept = self.state[p]
            if not kept.get("names"):
                kept |= {
                    "last": deque([1.0], maxlen=3), "array": np.ones(p.shape), "number": np.float32(0.1),
                    "seen": defaultdict(list), "order": OrderedDict(b=1, a=2), "count": Counter("ab"),
                    "names": {"x", "yz"}, "frozen": frozenset({1}), "mode": "slow", "bytes": b"abc",
                    "both": (1, "two", None), "unset": float("nan"), "unset_tensor": torch.tensor(float("nan")),
                    "step": -1, "history": [torch.ones_like(p), (torch.zeros(1),)], "size": torch.Size([1, 2]),
                    "mapping": {"deeper": deque(["x"])}, "large": 10**40,
                }  # fmt: skip
            total = p.sum()
            kept["last"].append(float(total.full_tensor() if hasattr(total, "full_tensor") else total))
            kept["array"] *= 0.5
            kept["number"] = kept["number"] * np.float32(1.1)
            kept["seen"][len(kept["last"])].append(kept["step"])
            kept["order"].move_to_end("b")
            kept["count"].update("a")
            kept["names"].add(f"{kept['mode']}{kept['step']}")
            kept["mapping"]["deeper"].append(kept["both"][1])
            kept["history"][0].mul_(0.9)
            kept["step"] += 1
            p.mul_(1 + 1e-3 * float(kept["last"][0] + kept["array"].sum() + kept["number"] + len(kept["mode"])))
        self.state["all"] = self.state.get("all", 0) + 1 if isinstance(self.state.get("all", 0), int) else 1


class Hoarding(Shaped):
    def build_optimizers(self, phase, groups, lr):
        return [Hoarder(groups, lr)]


class Spoiled(Shaped):
    """Task with an optimizer state of a type that checkpoints do not support."""

    def build_optimizers(self, phase, groups, lr):
        class Decimals(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                self.state["all"] = decimal.Decimal(1)

        return [Decimals(groups, lr)]


class Slow(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"slow_state": {}}


class Slowed(Shaped):
    """Task with an optimizer whose state dict has an additional entry."""

    def build_optimizers(self, phase, groups, lr):
        return [Slow(groups, lr)]

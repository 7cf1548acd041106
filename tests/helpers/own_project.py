"""Source text of a user's own task, which classifies on which side of a line points lie.

The file that contains the text must import dataclass, numpy as np, torch.nn.functional as F, and the trainer's
FlagGroup, Objective and Task, and must define Net, a linear layer, and NUM_SIDES.
"""

POINTS = """
class Points:
    def __init__(self, num_points):
        self.points = np.random.default_rng(num_points).normal(size=(num_points, 2)).astype(np.float32)

    def __len__(self):
        return len(self.points)

    def __getitems__(self, keys):
        points = self.points[keys.index]
        return {"point": points, "side": (points[:, 0] > 0).astype(np.int64)}
"""
SIDES = """
@dataclass
class NoFlags(FlagGroup):
    "Task: sides"


class SidesObjective(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": F.cross_entropy(self.model(batch["point"]), batch["side"], reduction="sum")}


class Sides(Task):
    Config = NoFlags
    monitor = ("val/loss", "min")

    def splits(self):
        return {"train": Points(40), "val": Points(9), "test": Points(8)}

    def build_objective(self):
        return SidesObjective(Net(2, NUM_SIDES))

    def summarise(self, sums):
        return {"loss": float(sums["loss"] / sums["weight"])}
"""

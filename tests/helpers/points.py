"""Data set of points, for tasks that make predictions for a user's files."""

from trainer.loading.order import SampleKeys


class Points:
    """points: (n, 2)."""

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitems__(self, keys: SampleKeys):
        return {"point": self.points[keys.index]}

"""Splits interactions into training, validation and test sets, by user or by time."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.interactions.reader import Interactions
from trainer.common.errors import UserError

SplitKind = Literal["leave-one-out", "ratio", "time"]


@dataclass(frozen=True)
class HoldOut:
    """Rule that splits interactions into training, validation and test.

    kind: "leave-one-out": each user's last interaction is for the test and the second to last for validation.
        "ratio": each user's last interactions are for the test and those before them for validation, at least one each.
        "leave-one-out" and "ratio" hold out nothing from users with fewer than three interactions.
        "time": the latest of all interactions are for the test and those before them for validation; simultaneous
        interactions stay together.
    val_share, test_share: fractions of interactions that "ratio" and "time" hold out.
    """

    kind: SplitKind = "leave-one-out"
    val_share: float = 0.1
    test_share: float = 0.1

    @property
    def flags(self) -> str:
        shares = f" --val-share {self.val_share:g} --test-share {self.test_share:g}"
        return f"--split {self.kind}" + ("" if self.kind == "leave-one-out" else shares)

    def bounds(self, interactions: Interactions) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each user's training and validation interactions end, (num_users,) int64 each.

        Raises UserError for a rule other than the default if files define the split, and for "time" without times.
        """
        count = np.diff(interactions.offsets)
        if interactions.held_out is not None:
            if self != HoldOut():
                raise UserError(
                    f"{self.flags}: the files for training and test define the split; leave these flags out"
                )
            num_val, num_test = interactions.held_out.T
            return count - num_val - num_test, count - num_test
        if self.kind == "time":
            return self._bounds_in_time(interactions)
        num_val, num_test = (self._num_held_out(count, share) for share in (self.val_share, self.test_share))
        return count - num_val - num_test, count - num_test

    def _num_held_out(self, count: np.ndarray, share: float) -> np.ndarray:
        num = np.ones_like(count) if self.kind == "leave-one-out" else np.maximum(1, (count * share).astype(np.int64))
        return np.where(count >= 3, num, 0)

    def _bounds_in_time(self, interactions: Interactions) -> tuple[np.ndarray, np.ndarray]:
        times = interactions.times
        if times is None:
            raise UserError("--split time: the interactions have no times; use --split ratio")
        users = np.repeat(np.arange(interactions.num_users), np.diff(interactions.offsets))
        in_order, shares = np.sort(times), (self.val_share + self.test_share, self.test_share)
        begin_val, begin_test = (in_order[int(len(times) * (1 - share))] for share in shares)
        num_train, val_end = (
            np.bincount(users[times < begin], minlength=interactions.num_users) for begin in (begin_val, begin_test)
        )
        return num_train, val_end

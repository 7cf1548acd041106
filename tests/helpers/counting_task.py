"""Sleepy task whose training set cannot be copied to workers: it counts samples, or contains an open database."""

import sqlite3
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tests.helpers.sleepy_task import Sleepy, SleepyFlags, SleepySequences
from trainer.config import flag


@dataclass
class CountingFlags(SleepyFlags):
    """Task: sequences that workers must not have"""

    holds: Literal["counts", "connection"] = flag("counts", "the samples of each batch, or an open database")


class Counted(SleepySequences):
    def __getitems__(self, keys):
        self.counts.append(len(keys.index))
        return super().__getitems__(keys)


class Counting(Sleepy):
    Config = CountingFlags

    @cached_property
    def _splits(self):
        splits = super()._splits
        if self.config.holds == "counts":
            splits["train"].__class__ = Counted
            splits["train"].counts = []
        else:
            splits["train"].connection = sqlite3.connect(":memory:")
        return splits

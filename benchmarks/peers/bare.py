"""Hand-written training loop, whose steps can alternate with the steps of a trainer."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.peers.tagging import Settings, loss_of, new_model, new_optimizer, train_data

BLOCK_STEPS = 20
SETTLING_STEPS = 100
"""Number of warm-up steps, which are not measured."""


def bare_steps(settings: Settings) -> Iterator[None]:
    """Trains without end on one device, without logs and checkpoints, and yields after each step."""
    data, model = train_data(settings), new_model(settings)
    parameters = list(model.parameters())
    optimizer = new_optimizer(settings, parameters)
    while True:
        order = torch.randperm(len(data)).numpy()
        for start in range(0, len(data), settings.micro_batch):
            batch = data.__getitems__(order[start : start + settings.micro_batch])
            loss = loss_of(model(batch["tokens"]), batch["tags"])
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield


class Clock(NamedTuple):
    wall: float
    cpu: float

    @staticmethod
    def now() -> "Clock":
        return Clock(time.perf_counter(), time.process_time())


class Turns:
    """Alternates blocks of a trainer's steps with blocks of the hand-written loop, in one process."""

    def __init__(self, settings: Settings) -> None:
        self.bare = bare_steps(settings)
        self.num_steps, self.mark = 0, Clock.now()

    def next_step(self) -> dict[str, float] | None:
        """Must be called at the start of each trainer step; returns ratios of times after a block of each loop."""
        self.num_steps += 1
        if self.num_steps < SETTLING_STEPS or (self.num_steps - SETTLING_STEPS) % BLOCK_STEPS:
            return None
        times = [self.mark, Clock.now()]
        for _ in range(BLOCK_STEPS):
            next(self.bare)
        times.append(Clock.now())
        self.mark = times[-1]
        if self.num_steps == SETTLING_STEPS:
            return None
        (side, bare), (side_cpu, bare_cpu) = ((b - a, c - b) for a, b, c in zip(*times, strict=True))
        return {
            "ratio": side / bare,
            "cpu_ratio": side_cpu / bare_cpu,
            "bare_step_cpu_ms": 1e3 * bare_cpu / BLOCK_STEPS,
        }

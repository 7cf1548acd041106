"""Provides problems for tabular models, and batches of them padded with junk."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

NUM_CLASSES = 3
Problem = dict[str, Tensor]
"""Context, (N, m), labels, (N,), and queries, (Q, m), of one table."""


def problem(num_context: int, num_queries: int, num_features: int, seed: int = 0) -> Problem:
    """Returns a problem in which one value in ten is missing."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(num_context + num_queries, num_features, generator=generator) + 1
    rows[torch.rand(rows.shape, generator=generator) < 0.1] = torch.nan
    labels = torch.randint(NUM_CLASSES, (num_context,), generator=generator)
    return {"context": rows[:num_context], "labels": labels, "queries": rows[num_context:]}


def logits_alone(model: nn.Module, one: Problem) -> Tensor:
    """Returns the logits of one problem, (Q, max_classes)."""
    return model(*(one[name].unsqueeze(0) for name in ("context", "labels", "queries")))[0]


def padded_batch(problems: Sequence[Problem], extra: int = 2) -> tuple[Problem, Problem]:
    """Returns tables and counts for a forward pass; tables have `extra` more than the largest, filled with junk."""
    junk = {"context": 1e30, "labels": 0, "queries": -1e30}
    tables = {name: torch.stack(_grown([p[name] for p in problems], extra, value)) for name, value in junk.items()}
    counts = {
        "num_context": torch.tensor([len(p["context"]) for p in problems]),
        "num_features": torch.tensor([p["context"].shape[1] for p in problems]),
        "num_classes": torch.full((len(problems),), NUM_CLASSES),
    }
    return tables, counts


def _grown(tensors: Sequence[Tensor], extra: int, value: float) -> list[Tensor]:
    size = [max(sizes) + extra for sizes in zip(*(x.shape for x in tensors), strict=True)]
    grown = [x.new_full(size, value) for x in tensors]
    for x, large in zip(tensors, grown, strict=True):
        large[tuple(slice(n) for n in x.shape)] = x
    return grown

"""The network of nanoTabPFN, trained as published but on the tables that --task tabular learns from.

    pip install -r benchmarks/nanotabpfn.txt
    git clone https://github.com/automl/nanoTabPFN
    python benchmarks/nanotabpfn.py --nanotabpfn nanoTabPFN --data-dir tables

Of its recipe one thing differs: the tables come from the prior of --task tabular, by its default flags, the same ones
in the same order. Ten classes instead of two; schedule-free AdamW at 4e-3, 32 tables a step, gradients clipped at 1. It
knows no missing values: they are replaced by the mean of their column. After so many minutes of processor time on one
thread it predicts the tables of `benchmarks/tabular.py`, with one member; a line for each time, and at the end one JSON
object.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType

import schedulefree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tabular import SOURCES, in_context, measured, problems
from tasks.tabular import TabularFlags, TabularTask
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys

MAX_CLASSES = 10
PUBLISHED_SHAPE = {"embedding_size": 96, "num_attention_heads": 4, "mlp_hidden_size": 192, "num_layers": 3}
PUBLISHED_LR, PUBLISHED_BATCH_SIZE, PUBLISHED_MAX_NORM = 4e-3, 32, 1.0


class NanoTabPFN(nn.Module):
    """Their network with the interface of `models.tabular.predictor.TabularModel`."""

    max_classes = MAX_CLASSES

    def __init__(self, code: ModuleType) -> None:
        super().__init__()
        self.network = code.NanoTabPFNModel(**PUBLISHED_SHAPE, num_outputs=MAX_CLASSES)

    def forward(self, context: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        """context (B, N, m), labels (B, N), queries (B, Q, m) -> logits (B, Q, MAX_CLASSES)."""
        rows = torch.cat([context, queries], dim=1)
        of_column = context.nanmean(dim=1, keepdim=True).nan_to_num()
        rows = torch.where(rows.isnan(), of_column, rows)
        logits: Tensor = self.network((rows, labels.to(rows.dtype)), context.shape[1])
        return logits


def code_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanotabpfn_model", path / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def synthetic_tables() -> Iterator[Batch]:
    """Batches of the prior's tables for ever."""
    task = TabularTask(TabularFlags(), seed=0, cache_dir=Path())
    tables, epoch = task.splits()["train"], 0
    while True:
        for index in task.order("train", epoch, PUBLISHED_BATCH_SIZE) or ():
            keys = SampleKeys(index, epoch)
            yield task.collate(tables.__getitems__(keys), keys)
        epoch += 1


def of_equal_shape(batch: Batch) -> Iterator[Batch]:
    """Its tables without their padding, which the network does not know, those of one shape together."""
    sizes = {"num_context": batch["context"].shape[1], "num_features": batch["context"].shape[2]}
    full = {name: torch.full((len(batch["labels"]),), size) for name, size in sizes.items()}
    shapes = torch.stack([batch.get(name, full[name]) for name in sizes], dim=1)
    for num_context, num_features in shapes.unique(dim=0).tolist():
        alike = (shapes == torch.tensor([num_context, num_features])).all(1)
        yield {
            "context": batch["context"][alike, :num_context, :num_features],
            "labels": batch["labels"][alike, :num_context],
            "queries": batch["queries"][alike, :, :num_features],
            "targets": batch["targets"][alike],
        }


def train_step(model: NanoTabPFN, optimizer: schedulefree.AdamWScheduleFree, batch: Batch) -> None:
    num_targets = (batch["targets"] >= 0).sum()
    for part in of_equal_shape(batch):
        logits = model(part["context"], part["labels"], part["queries"])
        losses = F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), ignore_index=-1, reduction="sum")
        (losses / num_targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), PUBLISHED_MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def mean_auc(model: NanoTabPFN, folder: Path, seeds: list[int]) -> float:
    model.eval()
    method = in_context(model, num_estimators=1)
    found = [measured(method, p)["auc"] for source in SOURCES for p in problems(source, folder, seeds)]
    model.train()
    return mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanotabpfn", type=Path, required=True, help="clone of github.com/automl/nanoTabPFN")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--minutes", nargs="+", type=float, default=[5, 10, 22, 30], help="when it predicts them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="splits of each table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = NanoTabPFN(code_of(args.nanotabpfn))
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=PUBLISHED_LR, weight_decay=0.0)
    optimizer.train()
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters", flush=True)
    curve, num_tables, trained_s, batches = {}, 0, 0.0, synthetic_tables()
    for minutes in sorted(args.minutes):
        while trained_s < 60 * minutes:
            started = time.process_time()
            batch = next(batches)
            train_step(model, optimizer, batch)
            trained_s += time.process_time() - started
            num_tables += len(batch["labels"])
        optimizer.eval()
        curve[minutes] = round(mean_auc(model, args.data_dir, args.seeds), 4)
        optimizer.train()
        print(f"after {minutes:g} minutes and {num_tables:,} tables: mean AUC {curve[minutes]}", flush=True)
    print(json.dumps({"auc": curve, "tables": num_tables, "parameters": num_parameters, "torch": torch.__version__}))


if __name__ == "__main__":
    main()

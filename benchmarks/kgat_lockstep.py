"""This project's KGAT as one side of benchmarks/kgat.py: the task as the command line builds it, the loop as shipped.

    python benchmarks/kgat_lockstep.py FOLDER NUM_THREADS

It answers requests, as benchmarks/turns.py says.
"""

import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.opened_run import opened_run
from benchmarks.turns import serve
from trainer.commands.build import build_task
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loading.order import Position, evaluation_keys
from trainer.loop.evaluate import evaluate, start_epoch
from trainer.loop.train import start_segment, train_window
from trainer.loop.windows import Agreed, Window, agree_ahead, training_windows
from trainer.task import Objective, Task

PHASES = ("cf", "kg")
NODES = ("items.weight", "entities.weight", "users.weight")
"""Tables of embeddings, in their order in the reference's one table."""


class Lockstep:
    """The pieces of a run, and results to compare."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.argv = [
            "--task", "kgat", "--data-dir", str(folder), "--select-on-test",
            "--cache-dir", f"{self.scratch.name}/cache", "--num-threads", str(num_threads),
        ]  # fmt: skip
        self.run = opened_run(Path(self.scratch.name) / "run", self.argv)
        self.run.progress.start_epoch(0, PHASES)
        start_segment(self.run)
        self.windows = {phase: self.windows_of(phase) for phase in PHASES}

    def windows_of(self, phase: str) -> Iterator[tuple[Window, Agreed]]:
        """The steps of one phase for ever, sampled when they are asked for as in training."""
        index, run = PHASES.index(phase), self.run
        for epoch in count():
            run.progress.position = Position(epoch, index)
            for window, agreed in agree_ahead(run, training_windows(run)):
                if window.step.phase != index:
                    break
                yield window, agreed

    def facts(self) -> dict[str, Any]:
        run = self.run
        cf_steps, kg_steps = (order.num_steps for order in run.plan.orders)
        edges = run.task.edges
        return {
            "num_nodes": edges.num_nodes,
            "num_edges": len(edges),
            "num_relations": edges.num_relations,
            "num_parameters": sum(p.numel() for p in run.learner.objective.parameters()),
            "cf_steps": cf_steps,
            "kg_steps": kg_steps,
        }

    def first_batches(self) -> None:
        """What an epoch draws as a whole, before its first step of each phase."""
        for phase in PHASES:
            next(self.windows_of(phase))

    def cf_sampling(self) -> None:
        next(self.windows["cf"])

    def kg_sampling(self) -> None:
        next(self.windows["kg"])

    def cf(self) -> None:
        train_window(self.run, *next(self.windows["cf"]))

    def kg(self) -> None:
        train_window(self.run, *next(self.windows["kg"]))

    def attention(self) -> None:
        run = self.run
        run.progress.position = Position(epoch=1)
        start_epoch(run.task, run.learner, run.parallel, 1, run.log)

    def evaluation(self) -> dict[str, float]:
        metrics = self.run.metrics({"test": evaluate(self.run, "test")})
        return {name: metrics[f"test/{name}"] for name in ("recall@20", "precision@20", "ndcg@20")}

    def exact(self, request: str, answer: str) -> None:
        """Answers a file of weights and batches with one of losses, gradients and matrices; see benchmarks/kgat.py."""
        asked = torch.load(request, weights_only=True)
        task = build_task(self.flags(asked))
        objective = task.build_objective().double().train()
        model, edges = objective.model, task.edges
        load(model, asked["weights"])
        heads, tails = (torch.from_numpy(ends).long() for ends in (edges.head, edges.tail))

        def matrix() -> Tensor:
            size = (edges.num_nodes, edges.num_nodes)
            return torch.sparse_coo_tensor(torch.stack([heads, tails]), model.attention, size).coalesce()

        users, positives, negatives = asked["cf"]
        cf = {"user": users - task.catalogue.num_entities, "positive": positives, "negative": negatives}
        kg = dict(zip(("head", "relation", "tail", "negative"), asked["kg"], strict=True))
        model.set_laplacian(asked["laplacian"])
        result = {"laplacian": matrix(), "cf": gradients(objective, cf, "cf")}
        model.refresh()
        result |= {"attention": matrix(), "cf_with_attention": gradients(objective, cf, "cf")}
        result |= {"kg": gradients(objective, kg, "kg"), "metrics": metrics_of_test(task, objective)}
        torch.save(result, answer)

    def flags(self, asked: dict[str, Any]) -> Flags:
        choices = ["aggregator", "laplacian", "softmax"]
        chosen = [word for name in choices for word in (f"--{name}", asked[name])]
        flags, problems = parse([*self.argv, "--dropout", "0", *chosen], several_devices=False)
        refuse(problems)
        return flags


def gradients(objective: Objective, batch: dict[str, Tensor], phase: str) -> dict[str, Tensor]:
    """The loss, the mean that a step takes, and its gradient for each parameter, by the reference's names."""
    objective.zero_grad()
    loss = objective(batch, phase)["loss"] / len(next(iter(batch.values())))
    loss.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in objective.model.named_parameters()}
    return {"loss": loss.detach()} | with_one_table(found)


@torch.no_grad()
def metrics_of_test(task: Task, objective: Objective) -> dict[str, float]:
    objective.eval()
    objective.start_evaluation()
    totals: dict[str, Tensor] = {}
    test = task.splits()["test"]
    for keys in evaluation_keys(len(test), (0, 1), 512):
        batch = task.collate(test.__getitems__(keys), keys)
        for name, value in (objective(batch) | {"weight": batch["weight"].sum()}).items():
            totals[name] = totals.get(name, 0.0) + value.double()
    return task.summarise(totals)


def with_one_table(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters, or gradients, by the reference's names: it has one table of nodes."""
    others = {name: value for name, value in values.items() if name not in NODES}
    return {"nodes.weight": torch.cat([values[name] for name in NODES])} | others


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    tables = weights["nodes.weight"].split([len(parameters[name]) for name in NODES])
    given = weights | dict(zip(NODES, tables, strict=True))
    for name, parameter in parameters.items():
        parameter.copy_(given[name])


if __name__ == "__main__":
    serve(lambda: Lockstep(Path(sys.argv[1]), int(sys.argv[2])))

"""KGAT in the form that public PyTorch implementations use: what benchmarks/kgat.py measures against, and tests too.

Written anew after the common structure of such programs: COO matrices and torch.sparse.softmax; a matrix W_r gathered
for every sample; all layers on all nodes in every step; one user and one head sampled after another in Python; a
propagation for each batch of users in evaluation, and a full sort of all items. It is independent of models/graph and
data/knowledge_graph, and exact: in float64 it says what their results must be.

Source: Wang et al. 2019, "KGAT: Knowledge Graph Attention Network for Recommendation"; the equations are its.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.turns import serve

Aggregator = Literal["bi-interaction", "gcn", "graphsage"]
Laplacian = Literal["random-walk", "symmetric", "reference"]
Softmax = Literal["coalesced", "separate"]

CF_BATCH_SIZE, KG_BATCH_SIZE, USERS_PER_BATCH = 1024, 2048, 10_000
KS = (20, 40, 60, 80, 100)


# Data


@dataclass(frozen=True)
class KnowledgeGraph:
    """Nodes are entities, items first, and then users; each edge comes with its inverse.

    heads, relations, tails: (E,) int64. Relation 0 leads from users to items, 1 back; then come those of the triples,
    and then their inverses.
    """

    num_users: int
    num_items: int
    num_entities: int
    num_relations: int
    heads: Tensor
    relations: Tensor
    tails: Tensor

    @property
    def num_nodes(self) -> int:
        return self.num_entities + self.num_users


Lists = dict[int, list[int]]
"""Each user's items."""


def read_items(path: Path) -> Lists:
    lines = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
    return {line[0]: sorted(set(line[1:])) for line in lines if len(line) > 1}


def read_folder(folder: Path) -> tuple[KnowledgeGraph, Lists, Lists]:
    """The graph of a folder in KGAT's layout, its training items and its test items."""
    train, test = (read_items(folder / f"{part}.txt") for part in ("train", "test"))
    triples = {tuple(map(int, line.split())) for line in (folder / "kg_final.txt").read_text().splitlines()}
    return build_graph(train, test, sorted(triples)), train, test


def build_graph(train: Lists, test: Lists, triples: Sequence[Sequence[int]]) -> KnowledgeGraph:
    """triples: head, relation, tail of distinct ones."""
    num_users = max(max(train), max(test)) + 1
    num_items = max(max(items) for part in (train, test) for items in part.values()) + 1
    num_entities = max(num_items, *(max(head, tail) + 1 for head, _, tail in triples))
    num_triple_relations = max(relation for _, relation, _ in triples) + 1
    edges = []
    for user, items in train.items():
        for item in items:
            edges += [(num_entities + user, 0, item), (item, 1, num_entities + user)]
    for head, relation, tail in triples:
        edges += [(head, 2 + relation, tail), (tail, 2 + num_triple_relations + relation, head)]
    columns = torch.tensor(edges).T.contiguous()
    return KnowledgeGraph(num_users, num_items, num_entities, 2 + 2 * num_triple_relations, *columns)


# Values on the edges


def laplacian(graph: KnowledgeGraph, form: Laplacian) -> Tensor:
    """(E,) float64: every relation's adjacency matrix, normalised by degrees within the relation."""
    ones = torch.ones(len(graph.heads), dtype=torch.float64)
    shape = (graph.num_relations, graph.num_nodes)
    out_degree, in_degree = (
        torch.zeros(shape, dtype=torch.float64).index_put_((graph.relations, ends), ones, accumulate=True)
        for ends in (graph.heads, graph.tails)
    )
    of_head = out_degree[graph.relations, graph.heads]
    if form == "random-walk":
        return 1 / of_head
    if form == "symmetric":
        return (of_head * in_degree[graph.relations, graph.tails]) ** -0.5
    # As public code has it: the degree of a tail is how often it is a head, and an edge without any counts nothing.
    of_tail = out_degree[graph.relations, graph.tails]
    return torch.where(of_tail > 0, (of_head * of_tail) ** -0.5, 0.0)


def separate_softmax(graph: KnowledgeGraph, logits: Tensor) -> Tensor:
    """(E,) -> (E,): over all edges of a head, those that lead to one tail by several relations each for itself."""
    largest = torch.full((graph.num_nodes,), -torch.inf, dtype=logits.dtype)
    largest = largest.scatter_reduce(0, graph.heads, logits, "amax")
    values = (logits - largest[graph.heads]).exp()
    totals = torch.zeros(graph.num_nodes, dtype=logits.dtype).index_add(0, graph.heads, values)
    return values / totals[graph.heads]


# The model


@dataclass(frozen=True)
class Settings:
    """The defaults are the published ones."""

    width: int = 64
    relation_width: int = 64
    layer_widths: tuple[int, ...] = (64, 32, 16)
    aggregator: Aggregator = "bi-interaction"
    softmax: Softmax = "coalesced"
    dropout: float = 0.1
    slope: float = 0.01
    penalty: float = 1e-5


class Layer(nn.Module):
    """Equations 6 to 8."""

    def __init__(self, width_in: int, width_out: int, settings: Settings) -> None:
        super().__init__()
        self.aggregator = settings.aggregator
        if self.aggregator == "bi-interaction":
            self.linear1, self.linear2 = nn.Linear(width_in, width_out), nn.Linear(width_in, width_out)
        else:
            self.linear = nn.Linear(width_in * (2 if self.aggregator == "graphsage" else 1), width_out)
        for linear in self.children():
            nn.init.xavier_uniform_(linear.weight)
        self.activation = nn.LeakyReLU(settings.slope)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, adjacency: Tensor, nodes: Tensor) -> Tensor:
        neighbours = torch.sparse.mm(adjacency, nodes)
        if self.aggregator == "bi-interaction":
            of_sum = self.activation(self.linear1(nodes + neighbours))
            return self.dropout(of_sum + self.activation(self.linear2(nodes * neighbours)))
        joined = nodes + neighbours if self.aggregator == "gcn" else torch.cat([nodes, neighbours], dim=1)
        return self.dropout(self.activation(self.linear(joined)))


class ReferenceKGAT(nn.Module):
    """A model that starts with the random-walk Laplacian as its matrix; `refresh` puts attention in its place."""

    def __init__(self, graph: KnowledgeGraph, settings: Settings) -> None:
        super().__init__()
        self.graph, self.settings = graph, settings
        self.nodes = nn.Embedding(graph.num_nodes, settings.width)
        self.relations = nn.Embedding(graph.num_relations, settings.relation_width)
        self.projections = nn.Parameter(torch.empty(graph.num_relations, settings.width, settings.relation_width))
        for parameter in (self.nodes.weight, self.relations.weight, self.projections):
            nn.init.xavier_uniform_(parameter)
        widths = (settings.width, *settings.layer_widths)
        self.layers = nn.ModuleList(Layer(*pair, settings) for pair in pairwise(widths))
        self.set_laplacian("random-walk")

    def set_laplacian(self, form: Laplacian) -> None:
        self.adjacency = self.matrix(laplacian(self.graph, form))

    def matrix(self, values: Tensor) -> Tensor:
        """(E,) -> (N, N), with the sum of parallel edges."""
        ends = torch.stack([self.graph.heads, self.graph.tails])
        size = (self.graph.num_nodes, self.graph.num_nodes)
        return torch.sparse_coo_tensor(ends, values.to(self.projections.dtype), size).coalesce()

    def edge_logits(self) -> Tensor:
        """(E,), equation 4: (W_r e_t) . tanh(W_r e_h + e_r)."""
        graph, logits = self.graph, self.projections.new_empty(len(self.graph.heads))
        for relation, projection in enumerate(self.projections):
            chosen = torch.where(graph.relations == relation)[0]
            heads, tails = (self.nodes(ends[chosen]) @ projection for ends in (graph.heads, graph.tails))
            logits[chosen] = (tails * torch.tanh(heads + self.relations.weight[relation])).sum(dim=1)
        return logits

    @torch.no_grad()
    def refresh(self) -> None:
        """Equation 5."""
        logits = self.edge_logits()
        if self.settings.softmax == "coalesced":
            self.adjacency = torch.sparse.softmax(self.matrix(logits), dim=1)
        else:
            self.adjacency = self.matrix(separate_softmax(self.graph, logits))

    def propagate(self) -> Tensor:
        """(N, all widths together), equations 9 and 11."""
        nodes = self.nodes.weight
        outputs = [nodes]
        for layer in self.layers:
            nodes = layer(self.adjacency, nodes)
            outputs.append(F.normalize(nodes, dim=1))
        return torch.cat(outputs, dim=1)

    def cf_loss(self, users: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Equations 12 and 13, with a penalty on the three final representations. Nodes (B,) each; a mean."""
        nodes = self.propagate()
        user, positive, negative = nodes[users], nodes[positives], nodes[negatives]
        loss = -F.logsigmoid((user * positive).sum(dim=1) - (user * negative).sum(dim=1))
        return loss.mean() + self.settings.penalty * mean_half_squares(user, positive, negative)

    def kg_loss(self, heads: Tensor, relations: Tensor, tails: Tensor, negatives: Tensor) -> Tensor:
        """Equations 1 and 2, with a penalty on projected nodes and relations. (B,) each; a mean."""
        relation, transform = self.relations(relations), self.projections[relations]
        head, tail, negative = (
            torch.bmm(self.nodes(ends).unsqueeze(1), transform).squeeze(1) for ends in (heads, tails, negatives)
        )
        wrong = (head + relation - negative).square().sum(dim=1)
        right = (head + relation - tail).square().sum(dim=1)
        loss = -F.logsigmoid(wrong - right)
        return loss.mean() + self.settings.penalty * mean_half_squares(head, relation, tail, negative)


def mean_half_squares(*rows: Tensor) -> Tensor:
    return sum(part.square().sum(dim=1).mean() / 2 for part in rows)


# Training


class PythonSampler:
    """Draws batches one sample after another, negatives by rejection."""

    def __init__(self, graph: KnowledgeGraph, train: Lists, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph, self.train = graph, train
        self.seen = {user: set(items) for user, items in train.items()}
        self.edges: dict[int, list[tuple[int, int]]] = {}
        columns = (ends.tolist() for ends in (graph.heads, graph.relations, graph.tails))
        for head, relation, tail in zip(*columns, strict=True):
            self.edges.setdefault(head, []).append((relation, tail))
        self.known = {head: set(edges) for head, edges in self.edges.items()}
        self.users, self.heads = list(self.train), list(self.edges)

    def some(self, population: list[int], count: int) -> list[int]:
        if count > len(population):
            return self.random.choices(population, k=count)
        return self.random.sample(population, count)

    def cf_batch(self) -> list[Tensor]:
        """User, positive and negative as nodes, (B,) each."""
        rows = []
        for user in self.some(self.users, CF_BATCH_SIZE):
            positive = self.random.choice(self.train[user])
            negative = self.random.randrange(self.graph.num_items)
            while negative in self.seen[user]:
                negative = self.random.randrange(self.graph.num_items)
            rows.append((self.graph.num_entities + user, positive, negative))
        return list(torch.tensor(rows).T)

    def kg_batch(self) -> list[Tensor]:
        """Head, relation, tail and negative tail, (B,) each."""
        rows = []
        for head in self.some(self.heads, KG_BATCH_SIZE):
            relation, tail = self.random.choice(self.edges[head])
            negative = self.random.randrange(self.graph.num_nodes)
            while (relation, negative) in self.known[head]:
                negative = self.random.randrange(self.graph.num_nodes)
            rows.append((head, relation, tail, negative))
        return list(torch.tensor(rows).T)


# Evaluation


@torch.no_grad()
def evaluate(model: ReferenceKGAT, train: Lists, test: Lists) -> dict[str, float]:
    """Means over the users of recall, precision, hit and NDCG @ each of KS; all items but the training ones ranked.

    NDCG divides by the ideal of min(k, number of test items). ndcg_official divides by the DCG of the same hits moved
    to the front of the first 100, as the first published code does.
    """
    model.eval()
    graph, users = model.graph, list(test)
    metrics: dict[str, list[float]] = {}
    for start in range(0, len(users), USERS_PER_BATCH):
        batch = users[start : start + USERS_PER_BATCH]
        nodes = model.propagate()
        scores = nodes[graph.num_entities + torch.tensor(batch)] @ nodes[: graph.num_items].T
        for row, user in enumerate(batch):
            scores[row, train.get(user, [])] = -torch.inf
        ranking = scores.sort(dim=1, descending=True, stable=True).indices
        for row, user in enumerate(batch):
            for name, value in user_metrics(ranking[row, : max(KS)].numpy(), test[user]).items():
                metrics.setdefault(name, []).append(value)
    model.train()
    return {name: float(np.mean(values)) for name, values in metrics.items()}


def user_metrics(ranking: np.ndarray, positives: Sequence[int]) -> dict[str, float]:
    """ranking: the best items, as many as the largest k; positives: the user's test items."""
    hits = np.isin(ranking, positives).astype(np.float64)
    found = {}
    for k in KS:
        gained = hits[:k].sum()
        ideal = dcg(np.ones(min(k, len(positives))))
        moved = dcg(np.sort(hits[:100])[::-1][:k])
        found |= {
            f"recall@{k}": gained / len(positives),
            f"precision@{k}": gained / k,
            f"hit@{k}": float(gained > 0),
            f"ndcg@{k}": dcg(hits[:k]) / ideal,
            f"ndcg_official@{k}": dcg(hits[:k]) / moved if moved > 0 else 0.0,
        }
    return found


def dcg(gains: np.ndarray) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


# One side of benchmarks/kgat.py


class Reference:
    """The pieces of a run, and results to compare."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.graph, self.train, self.test = read_folder(folder)
        self.sampler = PythonSampler(self.graph, self.train, seed=0)
        self.model = ReferenceKGAT(self.graph, Settings())
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=1e-4) for _ in range(2)]

    def facts(self) -> dict[str, Any]:
        return {
            "num_nodes": self.graph.num_nodes,
            "num_edges": len(self.graph.heads),
            "num_relations": self.graph.num_relations,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "cf_steps": sum(map(len, self.train.values())) // CF_BATCH_SIZE + 1,
            "kg_steps": len(self.graph.heads) // KG_BATCH_SIZE + 1,
        }

    def cf_sampling(self) -> None:
        self.sampler.cf_batch()

    def kg_sampling(self) -> None:
        self.sampler.kg_batch()

    def cf(self) -> float:
        return self.step(self.model.cf_loss(*self.sampler.cf_batch()), self.optimizers[0])

    def kg(self) -> float:
        return self.step(self.model.kg_loss(*self.sampler.kg_batch()), self.optimizers[1])

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def attention(self) -> None:
        self.model.refresh()

    def evaluation(self) -> dict[str, float]:
        return self.metrics(self.model)

    def metrics(self, model: ReferenceKGAT) -> dict[str, float]:
        metrics = evaluate(model, self.train, self.test)
        return {name: metrics[name] for name in ("recall@20", "precision@20", "ndcg@20")}

    def request(self, path: str, **chosen: str) -> None:
        """Writes weights and batches to compare results with; biases, too, are random, so that each of them matters.

        chosen: aggregator, laplacian and softmax. The batches are as this sampler draws them, in nodes.
        """
        model = ReferenceKGAT(self.graph, Settings(aggregator=chosen["aggregator"])).double()
        weights = {name: 0.2 * torch.randn_like(weight) for name, weight in model.state_dict().items()}
        batches = {"cf": self.sampler.cf_batch(), "kg": self.sampler.kg_batch()}
        torch.save({"weights": weights, **chosen, **batches}, path)

    def exact(self, request: str, answer: str) -> None:
        """Answers a file of weights and batches with one of losses, gradients and matrices; see benchmarks/kgat.py."""
        asked = torch.load(request, weights_only=True)
        settings = Settings(aggregator=asked["aggregator"], softmax=asked["softmax"], dropout=0.0)
        model = ReferenceKGAT(self.graph, settings).double()
        model.load_state_dict(asked["weights"])
        model.set_laplacian(asked["laplacian"])
        result = {"laplacian": model.adjacency, "cf": gradients(model, model.cf_loss(*asked["cf"]))}
        model.refresh()
        result["attention"] = model.adjacency
        result["cf_with_attention"] = gradients(model, model.cf_loss(*asked["cf"]))
        result["kg"] = gradients(model, model.kg_loss(*asked["kg"]))
        torch.save(result | {"metrics": self.metrics(model)}, answer)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss, and its gradient for each parameter that it depends on."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


if __name__ == "__main__":
    serve(lambda: Reference(Path(sys.argv[1])))

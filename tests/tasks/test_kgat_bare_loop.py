"""Tests that a run on a graph learns what a bare loop learns with full matrices, loops over edges and torch's Adam.

Both compute in float64. The bare loop takes only the first weights and the drawn samples from the trainer.
"""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import load
from tests.helpers.small_catalogue import write_catalogue
from trainer.commands.build import build_task
from trainer.commands.parse import parse
from trainer.loading.order import EpochOrder, SampleKeys

EPOCHS, LR, L2, KG_L2 = 2, 0.02, 0.03, 0.01
BATCH_SIZES = {"cf": 16, "kg": 32}
FLAGS = [
    "--task", "kgat", "--model", "kgat", "--dtype", "float64", "--num-threads", 1, "--epochs", EPOCHS,
    "--batch-size", BATCH_SIZES["cf"], "--loss", "bpr",
    "--lr", LR, "--max-grad-norm", 0, "--l2", L2, "--embed-dim", 6,
]  # fmt: skip
KGAT = ["--kg-batch-ratio", 2, "--layer-dims", 5, 4, "--relation-dim", 3, "--dropout", 0, "--kg-l2", KG_L2]
KG_LIGHTGCN = ["--model", "kg-lightgcn", "--num-layers", 2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ["--data-dir", write_catalogue(tmp_path_factory.mktemp("catalogue"))]


def run_and_task(run_here, cache_dir, directory, *argv):
    """Returns the final weights of a run, and its task."""
    argv = [*map(str, [*FLAGS, *argv, "--save-dir", directory])]
    run_here(*argv)
    flags, problems = parse([*argv, "--cache-dir", str(cache_dir / "lockstep")], several_devices=False)
    assert problems == []
    return load(directory / "final.pth")["model"], build_task(flags)


# --- the bare loop -----------------------------------------------------------------------------------------------


def first_weights(task):
    torch.manual_seed(0)
    named = task.build_objective().double().model.named_parameters()
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in named}


def batches(task, phase, epoch):
    """Yields batches of all samples in order; the last one is short."""
    data, size = task.training_data(phase), BATCH_SIZES[phase]
    assert len(data) > 3 * size and len(data) % size > 0
    for index in np.split(np.arange(len(data)), range(size, len(data), size)):
        samples = data.__getitems__(SampleKeys(index, epoch))
        yield {name: torch.from_numpy(values) for name, values in samples.items()}


def detached(w):
    return {name: value.detach() for name, value in w.items()}


def descend(optimizer, losses):
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()


def cf_losses(users, items, batch, penalised):
    """Returns BPR losses, with half the squares of what is penalised of a user and two items."""
    u, i, j = users[batch["user"]], items[batch["positive"]], items[batch["negative"]]
    return -torch.log(torch.sigmoid((u * i).sum(1) - (u * j).sum(1))) + L2 / 2 * penalised(u, i, j)


def squares(*parts):
    return sum(part.square().sum(1) for part in parts)


def kgat_loop(task, phases=("cf", "kg"), refreshes=True):
    w, edges = first_weights(task), task.edges
    of_nodes = [w[f"{name}.weight"] for name in ("items", "entities", "users")]
    layers = [value for name, value in w.items() if name.startswith("layers.")]
    adams = {
        "cf": torch.optim.Adam([*of_nodes, *layers], LR),
        "kg": torch.optim.Adam([*of_nodes, w["relations.weight"], w["projections"]], LR),
    }
    matrix = laplacian(edges)
    for epoch in range(EPOCHS):
        if refreshes and epoch > 0:
            matrix = attention(edges, w, torch.cat(of_nodes))
        for phase in phases:
            for batch in batches(task, phase, epoch):
                nodes = torch.cat(of_nodes)
                if phase == "kg":
                    losses = kg_losses(w, nodes, batch)
                else:
                    final = propagated(matrix, w, nodes)
                    users, items = final[-task.catalogue.num_users :], final[: task.catalogue.num_items]
                    losses = cf_losses(users, items, batch, squares)
                descend(adams[phase], losses)
    return detached(w)


def directed(edges):
    return zip(edges.head.tolist(), edges.tail.tolist(), edges.relation.tolist(), strict=True)


def laplacian(edges):
    """Returns the sum over relations of 1 / (number of the head's edges with this relation)."""
    degree = Counter((head, relation) for head, _, relation in directed(edges))
    matrix = torch.zeros(edges.num_nodes, edges.num_nodes).double()
    for head, tail, relation in directed(edges):
        matrix[head, tail] += 1 / degree[head, relation]
    return matrix


@torch.no_grad()
def attention(edges, w, nodes):
    """Computes KGAT's equations 4 and 5."""
    matrix = torch.zeros(edges.num_nodes, edges.num_nodes).double()
    for head, tail, relation in directed(edges):
        projection = w["projections"][relation]
        expected = torch.tanh(nodes[head] @ projection + w["relations.weight"][relation])
        matrix[head, tail] += (nodes[tail] @ projection @ expected).exp()
    return matrix / matrix.sum(1, keepdim=True).clamp(min=1e-300)  # some nodes have no edge


def propagated(matrix, w, x):
    """Computes equations 3 and 8 to 11."""
    parts = [x]
    for i in range(2):
        first, second = ((w[f"layers.{i}.linear{k}.weight"], w[f"layers.{i}.linear{k}.bias"]) for k in (1, 2))
        neighbours = matrix @ x
        x = F.leaky_relu(F.linear(x + neighbours, *first)) + F.leaky_relu(F.linear(x * neighbours, *second))
        parts.append(F.normalize(x))
    return torch.cat(parts, dim=1)


def kg_losses(w, nodes, batch):
    """Computes equations 1 and 2."""
    projection, relation = w["projections"][batch["relation"]], w["relations.weight"][batch["relation"]]
    h, t, n = (torch.einsum("bi,bij->bj", nodes[batch[name]], projection) for name in ("head", "tail", "negative"))
    difference = squares(h + relation - n) - squares(h + relation - t)
    return -torch.log(torch.sigmoid(difference)) + KG_L2 / 2 * squares(h, relation, t, n)


def kg_lightgcn_loop(task, with_graph=True):
    w, states = first_weights(task), states_of_lightgcn(task.catalogue, with_graph)
    adam = torch.optim.Adam(w.values(), LR)
    for epoch in range(EPOCHS):
        for batch in batches(task, "cf", epoch):
            users, items, of_items = states(w)
            parts = w["users.weight"][batch["user"]], of_items[batch["positive"]], of_items[batch["negative"]]
            descend(adam, cf_losses(users, items, batch, lambda *_, parts=parts: squares(*parts)))
    return detached(w)


def states_of_lightgcn(catalogue, with_graph=True):
    """Returns a function from weights to final states of users and items, and to what is penalised of items."""
    mean, normalised = mean_of_neighbours(catalogue), normalised_taken(catalogue)

    def states(w):
        said = with_graph * (mean @ w["knowledge.weight"])
        users, items = [w["users.weight"]], [w["items.weight"] + said]
        for _ in range(2):
            users, items = [*users, normalised @ items[-1]], [*items, normalised.T @ users[-1]]
        return sum(users) / 3, sum(items) / 3, torch.cat([w["items.weight"], said], dim=1)

    return states


def softmax_loop(task, one_by_user=False):
    """Trains with the log softmax of each item of a user. one_by_user: counts each user, not each item, as one."""
    w, train = first_weights(task), task.catalogue.train
    states = states_of_lightgcn(task.catalogue)
    adam = torch.optim.Adam(w.values(), LR)
    owners, size = np.flatnonzero(train.sizes), BATCH_SIZES["cf"]
    for epoch in range(EPOCHS):
        order = EpochOrder(0, epoch, 0, len(owners))
        for start in range(0, len(owners), size):
            users, items, of_items = states(w)
            losses = []
            for user in owners[order.take(start, min(start + size, len(owners)))].tolist():
                scores, own = items @ users[user], train.of(user).tolist()
                parts = w["users.weight"][[user] * len(own)], of_items[own]
                terms = scores.exp().sum().log() - scores[own] + L2 / 2 * squares(*parts)
                losses.append(terms.mean(0, keepdim=True) if one_by_user else terms)
            descend(adam, torch.cat(losses))
    return detached(w)


def normalised_taken(catalogue):
    """Returns which user took which item, (users, items), divided by the roots of both degrees."""
    taken = torch.zeros(catalogue.num_users, catalogue.num_items).double()
    for user in range(catalogue.num_users):
        taken[user, catalogue.train.of(user).tolist()] = 1
    return taken / (taken.sum(1, keepdim=True) * taken.sum(0)).sqrt().clamp(min=1)


def mean_of_neighbours(catalogue):
    """Returns the matrix, (items, entities), that averages over neighbours in either direction."""
    counts = torch.zeros(catalogue.num_entities, catalogue.num_entities).double()
    for head, _, tail in catalogue.triples.tolist():
        counts[head, tail] += 1
        counts[tail, head] += 1
    return (counts / counts.sum(1, keepdim=True).clamp(min=1))[: catalogue.num_items]


# --- the same by the trainer -------------------------------------------------------------------------------------


def difference(found, expected):
    assert expected.keys() <= found.keys()
    return max(float((found[name] - w).abs().max() / w.abs().max()) for name, w in expected.items())


def test_kgat_matches_a_bare_loop(data, run_here, cache_dir, tmp_path):
    found, task = run_and_task(run_here, cache_dir, tmp_path, *data, *KGAT)
    assert difference(found, kgat_loop(task)) < 1e-9
    for wrong in ({"phases": ("kg", "cf")}, {"refreshes": False}):
        assert difference(found, kgat_loop(task, **wrong)) > 1e-6, wrong


@pytest.mark.usefixtures("double_precision")  # builds the model and the constants of its graph in float64
def test_lightgcn_with_a_graph_matches_a_bare_loop(data, run_here, cache_dir, tmp_path):
    found, task = run_and_task(run_here, cache_dir, tmp_path, *data, *KG_LIGHTGCN)
    assert difference(found, kg_lightgcn_loop(task)) < 1e-9
    assert difference(found, kg_lightgcn_loop(task, with_graph=False)) > 1e-6


@pytest.mark.usefixtures("double_precision")
def test_softmax_over_all_items_matches_a_bare_loop(data, run_here, cache_dir, tmp_path):
    found, task = run_and_task(run_here, cache_dir, tmp_path, *data, *KG_LIGHTGCN, "--loss", "softmax")
    assert difference(found, softmax_loop(task)) < 1e-9
    assert difference(found, softmax_loop(task, one_by_user=True)) > 1e-6

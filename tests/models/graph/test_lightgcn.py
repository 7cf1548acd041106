"""Tests LightGCN and BPR-MF against dense matrices."""

import pytest
import torch

from models.graph.lightgcn import BPRMF, KnowledgeLightGCN, LightGCN
from models.graph.sparse import multiply

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_USERS, NUM_ITEMS, WIDTH = 5, 7, 4
USERS, ITEMS = torch.tensor([[0, 0, 1, 2, 2, 2, 4], [6, 1, 1, 0, 1, 3, 3]])
"""User 3 and the items 2, 4 and 5 have no interactions."""
BATCH = torch.tensor([4, 0, 0, 3]), torch.tensor([3, 1, 1, 6, 2, 5])


def slow_lightgcn(model, layers, known=0):
    """Returns the mean of the layers, with a full matrix. known: added to the embeddings of the items."""
    adjacency = torch.zeros(NUM_USERS + NUM_ITEMS, NUM_USERS + NUM_ITEMS)
    adjacency[USERS, NUM_USERS + ITEMS] = 1
    adjacency += adjacency.T.clone()
    degree = adjacency.sum(1)
    scale = torch.where(degree > 0, degree, 1) ** -0.5
    states = [torch.cat([model.users.weight, model.items.weight + known])]
    for _ in range(layers):
        states.append(scale[:, None] * adjacency * scale @ states[-1])
    return (sum(states) / (layers + 1)).split([NUM_USERS, NUM_ITEMS])


@pytest.mark.parametrize("layers", [1, 3])
def test_lightgcn_and_its_gradients_equal_dense_matrices(layers):
    model = LightGCN(USERS, ITEMS, NUM_USERS, NUM_ITEMS, WIDTH, layers)
    users, items = BATCH
    all_users, all_items = slow_lightgcn(model, layers)
    torch.testing.assert_close(model.represent(), (all_users, all_items))
    found = model(users, items)
    torch.testing.assert_close((found.users, found.items), (all_users[users], all_items[items]))
    weights = torch.randn(len(users), len(items))
    fast = torch.autograd.grad((found.users @ found.items.T * weights).sum(), list(model.parameters()))
    expected = (all_users[users] @ all_items[items].T * weights).sum()
    torch.testing.assert_close(fast, torch.autograd.grad(expected, list(model.parameters())))


@pytest.mark.parametrize("built_in", [torch.float32, torch.float64])
@pytest.mark.parametrize("moved_to", [torch.float32, torch.float64])
def test_constants_follow_the_dtype_of_the_model(built_in, moved_to):
    torch.set_default_dtype(built_in)
    model = KnowledgeLightGCN(USERS, ITEMS, TRIPLES, NUM_ENTITIES, NUM_USERS, NUM_ITEMS, WIDTH).to(moved_to)
    degree = torch.tensor([2, 1, 3, 0, 1, 1, 3, 0, 2, 0, 0, 1])  # of the users, then of the items
    expected = (degree[USERS] * degree[NUM_USERS + ITEMS]).double().rsqrt().to(moved_to)
    dense = torch.zeros(NUM_USERS + NUM_ITEMS, NUM_USERS + NUM_ITEMS, dtype=moved_to)
    dense[USERS, NUM_USERS + ITEMS] = expected
    dense[NUM_USERS + ITEMS, USERS] = expected
    for csr, matrix in zip(model.matrix.operands(), (dense, dense.T), strict=True):
        assert torch.equal(multiply(csr, torch.eye(len(matrix), dtype=moved_to)), matrix)
    shares = torch.tensor([1 / 4, 1 / 4, 1 / 2, 1, 1 / 3, 2 / 3, 1], dtype=torch.float64)  # of items 0, 2, 3 and 6
    assert torch.equal(model.mean.values, shares.to(moved_to))


@pytest.mark.parametrize(
    "model", [LightGCN(USERS, ITEMS, NUM_USERS, NUM_ITEMS, WIDTH), BPRMF(NUM_USERS, NUM_ITEMS, WIDTH)]
)
def test_the_penalty_applies_to_the_embeddings(model):
    users, items = BATCH
    found = model(users, items)
    torch.testing.assert_close(found.penalised_users, model.users.weight[users])
    torch.testing.assert_close(found.penalised_items, model.items.weight[items])


def test_bprmf_scores_are_products_of_embeddings():
    model = BPRMF(NUM_USERS, NUM_ITEMS, WIDTH)
    users, items = BATCH
    found = model(users, items)
    torch.testing.assert_close((found.users, found.items), (model.users.weight[users], model.items.weight[items]))
    assert model.represent() == (model.users.weight, model.items.weight)


TRIPLES = torch.tensor([[0, 0, 8], [0, 1, 8], [0, 2, 3], [9, 0, 2], [9, 1, 8], [3, 0, 3], [6, 0, 0]])
"""Item 0 has entity 8 twice and items 3 and 6 once, item 3 has itself both ways, and items 1, 4 and 5 have nothing."""
NUM_ENTITIES = 10


def slow_knowledge(model):
    """Returns the mean of each item's neighbours, (NUM_ITEMS, WIDTH), one triple at a time."""
    neighbours = [[] for _ in range(NUM_ENTITIES)]
    for head, _, tail in TRIPLES.tolist():
        neighbours[head].append(tail)
        neighbours[tail].append(head)
    table = model.knowledge.weight
    return torch.stack([table[own].mean(0) if own else torch.zeros(WIDTH) for own in neighbours[:NUM_ITEMS]])


def test_items_carry_the_mean_of_their_neighbours():
    model = KnowledgeLightGCN(USERS, ITEMS, TRIPLES, NUM_ENTITIES, NUM_USERS, NUM_ITEMS, WIDTH)
    plain = LightGCN(USERS, ITEMS, NUM_USERS, NUM_ITEMS, WIDTH)
    means = slow_knowledge(model)
    with torch.no_grad():
        plain.users.weight.copy_(model.users.weight)
        plain.items.weight.copy_(model.items.weight + means)
    torch.testing.assert_close(model.represent(), plain.represent())
    users, items = BATCH
    found, expected = model(users, items), plain(users, items)
    torch.testing.assert_close((found.users, found.items), (expected.users, expected.items))
    of_users = found.penalised_users.square().sum(1)
    torch.testing.assert_close(of_users, model.users.weight[users].square().sum(1))
    squares = (model.items.weight[items].square() + means[items].square()).sum(1)
    torch.testing.assert_close(found.penalised_items.square().sum(1), squares)
    fast = torch.autograd.grad(found.penalised_items.square().sum() + found.items.sum(), model.knowledge.weight)
    slow = torch.autograd.grad(squares.sum() + slow_lightgcn(model, 3, means)[1][items].sum(), model.knowledge.weight)
    torch.testing.assert_close(fast, slow)

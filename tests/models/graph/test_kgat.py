"""Tests KGAT in float64 against dense matrices and loops over edges, on a small graph with parallel edges."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.graph import aggregators, kgat
from models.graph.collaborative_graph import CollaborativeGraph
from models.graph.kgat import KGAT
from models.layers.dropout import dropout_mask

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_USERS, NUM_ITEMS, NUM_ENTITIES, NUM_KG_RELATIONS = 5, 6, 10, 3
NUM_NODES, NUM_RELATIONS = NUM_ENTITIES + NUM_USERS, 2 + 2 * NUM_KG_RELATIONS
WIDTH, RELATION_WIDTH, LAYER_DIMS = 6, 5, (6, 4, 3)
EXACT = {"rtol": 0, "atol": 1e-10}


def make_edges(seed=0):
    """Returns sorted (head, tail, relation) of interactions and triples both ways; one pair has three relations."""
    rng = np.random.default_rng(seed)
    edges = set()
    for user in range(NUM_USERS):
        for item in rng.choice(NUM_ITEMS, 3, replace=False).tolist():
            edges |= {(NUM_ENTITIES + user, item, 0), (item, NUM_ENTITIES + user, 1)}
    triples = [(0, 0, 7), (0, 1, 7), (0, 2, 7), (1, 0, 2), (2, 1, 1)]
    triples += rng.integers([NUM_ITEMS, NUM_KG_RELATIONS, NUM_ENTITIES], size=(20, 3)).tolist()
    for head, relation, tail in triples:
        edges |= {(head, tail, 2 + relation), (tail, head, 2 + NUM_KG_RELATIONS + relation)}
    return sorted(edges)


EDGES = make_edges()


def make_graph():
    head, tail, relation = torch.tensor(EDGES, dtype=torch.int32).T
    return CollaborativeGraph(head, tail, relation, NUM_NODES, NUM_RELATIONS)


def make_model(**settings):
    torch.manual_seed(1)
    settings = {"layer_dims": LAYER_DIMS, "message_dropout": 0.0} | settings
    model = KGAT(make_graph(), NUM_USERS, NUM_ITEMS, WIDTH, RELATION_WIDTH, **settings)
    with torch.no_grad():  # large enough for both sides of LeakyReLU, and for attention that is far from uniform
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


# --- the reference ---------------------------------------------------------------------------------------------------


def slow_laplacian(kind):
    out, into = {}, {}
    for head, tail, relation in EDGES:
        out[head, relation] = out.get((head, relation), 0) + 1
        into[tail, relation] = into.get((tail, relation), 0) + 1
    values = []
    for head, tail, relation in EDGES:
        scale = {
            "random-walk": lambda h, t, r: 1 / out[h, r],
            "symmetric": lambda h, t, r: 1 / math.sqrt(out[h, r] * into[t, r]),
            "reference": lambda h, t, r: 1 / math.sqrt(out[h, r] * out[t, r]) if (t, r) in out else 0.0,
        }[kind]
        values.append(scale(head, tail, relation))
    return torch.tensor(values)


def dense(values):
    """Returns the values as a matrix, (NUM_NODES, NUM_NODES), with the values of parallel edges added up."""
    matrix = torch.zeros(NUM_NODES, NUM_NODES)
    for (head, tail, _), value in zip(EDGES, values.tolist(), strict=True):
        matrix[head, tail] += value
    return matrix


def slow_nodes(model):
    return torch.cat([model.items.weight, model.entities.weight, model.users.weight])


def slow_attention(model, softmax):
    """Returns A as a dense matrix, by a loop over edges and then over heads."""
    nodes = slow_nodes(model).detach()
    logits = []
    for head, tail, relation in EDGES:
        w = model.projections[relation].detach()
        expected = torch.tanh(nodes[head] @ w + model.relations.weight[relation].detach())
        logits.append((float((nodes[tail] @ w) @ expected), head, tail))
    matrix = torch.zeros(NUM_NODES, NUM_NODES)
    for node in range(NUM_NODES):
        terms = {}
        for place, (logit, head, tail) in enumerate(logits):
            if head == node:
                term = tail if softmax == "coalesced" else (tail, place)
                terms[term] = terms.get(term, 0) + logit
        total = sum(math.exp(logit) for logit in terms.values())
        for term, logit in terms.items():
            matrix[node, term if softmax == "coalesced" else term[0]] += math.exp(logit) / total
    return matrix


def slow_representations(model, matrix, aggregation, slope=0.01, masks=(1, 1, 1)):
    """Returns every node's representation by equations 3 to 9 and 11, with full matrices."""
    states = slow_nodes(model)
    parts = [states]
    for layer, mask in zip(model.layers, masks, strict=True):
        neighbours = matrix @ states
        if aggregation == "gcn":
            states = F.leaky_relu(layer.linear(states + neighbours), slope)
        elif aggregation == "graphsage":
            states = F.leaky_relu(layer.linear(torch.cat([states, neighbours], dim=1)), slope)
        else:
            of_sum = F.leaky_relu(layer.linear1(states + neighbours), slope)
            states = of_sum + F.leaky_relu(layer.linear2(states * neighbours), slope)
        states = states * mask
        parts.append(states / states.norm(dim=1, keepdim=True).clamp(min=1e-12))
    return torch.cat(parts, dim=1)


def slow_cf_loss(model, everything, users, items, penalty=0.1):
    """Returns equations 12 and 13, summed over users with one positive and one negative item each."""
    total = 0
    for user, (positive, negative) in zip(users.tolist(), items.view(-1, 2).tolist(), strict=True):
        u, i, j = everything[NUM_ENTITIES + user], everything[positive], everything[negative]
        total = total - torch.log(torch.sigmoid(u @ i - u @ j)) + penalty / 2 * (u @ u + i @ i + j @ j)
    return total


def slow_kg_loss(model, batch, penalty=0.1):
    nodes, total = slow_nodes(model), 0
    for head, relation, tail, negative in zip(*(column.tolist() for column in batch), strict=True):
        w, e = model.projections[relation], model.relations.weight[relation]
        h, t, n = nodes[head] @ w, nodes[tail] @ w, nodes[negative] @ w
        good, bad = ((h + e - t) ** 2).sum(), ((h + e - n) ** 2).sum()
        total = total - torch.log(torch.sigmoid(bad - good)) + penalty / 2 * (h @ h + e @ e + t @ t + n @ n)
    return total


# --- what the model computes -----------------------------------------------------------------------------------------


def batch_of_users():
    """Returns users, (4,), and two items of each one, (8,); both repeat."""
    return torch.tensor([0, 3, 3, 1]), torch.tensor([0, 5, 2, 5, 2, 2, 4, 0])


def cf_loss(represented, penalty=0.1):
    users, items, *penalised = represented
    scores = (users.unsqueeze(1) * items.view(len(users), 2, -1)).sum(2)
    squares = sum(values.square().sum() for values in penalised)
    return F.softplus(scores[:, 1] - scores[:, 0]).sum() + penalty / 2 * squares


def kg_loss(losses, penalty=0.1):
    loss, squares = losses
    return loss.sum() + penalty * squares.sum()


def batch_of_triples():
    head, tail, relation = torch.tensor(EDGES)[::3].T
    return head, relation, tail, torch.randint(NUM_NODES, head.shape)


def assert_equal_gradients(model, found, expected):
    torch.testing.assert_close(found, expected, **EXACT)
    parameters = list(model.parameters())
    fast = torch.autograd.grad(0.3 * found, parameters, allow_unused=True)
    slow = torch.autograd.grad(0.3 * expected, parameters, allow_unused=True)
    assert any(grad is not None for grad in slow)
    for one, other in zip(fast, slow, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("slope", [0.01, 0.2])
@pytest.mark.parametrize("softmax", ["separate", "coalesced"])
@pytest.mark.parametrize("aggregation", ["bi-interaction", "gcn", "graphsage"])
def test_cf_loss_and_gradients_equal_dense_matrices(aggregation, softmax, slope, monkeypatch):
    monkeypatch.setattr(aggregators, "_CHUNK_ROWS", 4)
    model = make_model(aggregation=aggregation, softmax=softmax, slope=slope)
    model.refresh()
    matrix = slow_attention(model, softmax)
    everything = slow_representations(model, matrix, aggregation, slope)
    users, items = batch_of_users()
    assert_equal_gradients(model, cf_loss(model(users, items)), slow_cf_loss(model, everything, users, items))


@pytest.mark.parametrize("kind", ["random-walk", "symmetric", "reference"])
def test_laplacians_equal_counting_and_propagate_until_the_first_refresh(kind):
    model = make_model(laplacian=kind)
    torch.testing.assert_close(model.attention, slow_laplacian(kind), **EXACT)
    users, items = batch_of_users()
    everything = slow_representations(model, dense(slow_laplacian(kind)), "bi-interaction")
    assert_equal_gradients(model, cf_loss(model(users, items)), slow_cf_loss(model, everything, users, items))


def test_the_public_codes_symmetric_laplacian_is_zero_for_pure_tails():
    model = make_model(laplacian="reference")
    of_interactions = [relation < 2 for _, _, relation in EDGES]
    assert (model.attention[of_interactions] == 0).all()
    model.set_laplacian("symmetric")
    assert (model.attention > 0).all()


def test_kg_loss_and_gradients_equal_a_loop_over_triples():
    model = make_model()
    batch = batch_of_triples()
    assert_equal_gradients(model, kg_loss(model.transr(*batch)), slow_kg_loss(model, batch))


@pytest.mark.parametrize("relation", [[5, 0, 5, 3, 0, 0], [7]])
def test_the_grouped_projection_equals_the_gathered_projection_of_a_gpu(relation):
    """Most relations do not occur."""
    model = make_model()
    relation = torch.tensor(relation)
    x = torch.randn(len(relation), 3, WIDTH, requires_grad=True)
    grouped = kgat._GroupedProjection.apply(x, model.projections, relation)
    gathered = x @ model.projections.index_select(0, relation)
    torch.testing.assert_close(grouped, gathered, **EXACT)
    weights = torch.randn_like(grouped)
    fast = torch.autograd.grad((grouped * weights).sum(), (x, model.projections))
    slow = torch.autograd.grad((gathered * weights).sum(), (x, model.projections))
    torch.testing.assert_close(fast, slow, **EXACT)


@pytest.mark.parametrize("chunk", [1, 7, 2**12])
@pytest.mark.parametrize("softmax", ["separate", "coalesced"])
def test_attention_equals_a_loop_over_edges(softmax, chunk, monkeypatch):
    monkeypatch.setitem(kgat._CHUNK_EDGES, "cpu", chunk)
    model = make_model(softmax=softmax)
    values = model.compute_attention()
    torch.testing.assert_close(dense(values), slow_attention(model, softmax), **EXACT)
    heads = torch.tensor(EDGES)[:, 0]
    sums = torch.zeros(NUM_NODES).index_add(0, heads, values)[heads.unique()]
    torch.testing.assert_close(sums, torch.ones_like(sums), **EXACT)


def test_softmax_forms_differ_where_edges_are_parallel_and_nowhere_else():
    model = make_model()
    separate, coalesced = slow_attention(model, "separate"), slow_attention(model, "coalesced")
    pairs = [edge[:2] for edge in EDGES]
    num_tails = Counter(head for head, _ in set(pairs))
    heads_with_parallel = {head for head, tail in pairs if pairs.count((head, tail)) > 1 and num_tails[head] > 1}
    differs = {node for node in range(NUM_NODES) if not torch.allclose(separate[node], coalesced[node])}
    assert differs == heads_with_parallel and 0 < len(differs) < NUM_NODES


def test_represent_uses_current_attention_and_training_the_last_refresh():
    model = make_model()
    model.refresh()
    users, items = batch_of_users()
    before = model(users, items)
    all_users, all_items = model.represent()
    torch.testing.assert_close((before.users, before.items), (all_users[users], all_items[items]), **EXACT)
    with torch.no_grad():
        model.projections.mul_(3)
    torch.testing.assert_close(tuple(model(users, items)), tuple(before), rtol=0, atol=0)
    all_users, all_items = model.represent()
    assert not torch.allclose(all_users[users], before.users)
    model.refresh()
    torch.testing.assert_close(model(users, items).items, all_items[items], **EXACT)


def test_a_loaded_model_uses_the_saved_attention():
    model, other = make_model(), make_model(laplacian="symmetric")
    model.refresh()
    expected = model(*batch_of_users()).users
    assert not torch.allclose(other(*batch_of_users()).users, expected)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(*batch_of_users()).users, expected, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{"message_dropout": 0.3}, {"node_dropout": 0.4}])
def test_dropout_is_the_same_however_a_batch_is_split(settings):
    model = make_model(**settings).train()
    users, items = batch_of_users()

    def represented(part):
        torch.manual_seed(3)
        return model(users[part], items.view(-1, 2)[part].flatten())

    whole = represented(slice(None))
    parts = [represented(slice(0, 1)), represented(slice(1, None))]
    torch.testing.assert_close(torch.cat([part.users for part in parts]), whole.users, **EXACT)
    torch.testing.assert_close(torch.cat([part.items for part in parts]), whole.items, **EXACT)
    assert not torch.allclose(whole.users, model(users, items).users)
    in_evaluation, (all_users, all_items) = model.eval()(users, items), model.represent()
    torch.testing.assert_close(
        (in_evaluation.users, in_evaluation.items), (all_users[users], all_items[items]), **EXACT
    )


@pytest.mark.parametrize("aggregation", ["bi-interaction", "gcn", "graphsage"])
def test_message_dropout_applies_to_layer_inputs_and_normalised_outputs(aggregation):
    model = make_model(message_dropout=0.3, aggregation=aggregation).train()
    users, items = batch_of_users()
    torch.manual_seed(3)
    masks = [dropout_mask((NUM_NODES, width), 0.3, torch.empty(0)) for width in LAYER_DIMS]
    everything = slow_representations(model, dense(model.attention), aggregation, masks=masks)
    torch.manual_seed(3)
    assert_equal_gradients(model, cf_loss(model(users, items)), slow_cf_loss(model, everything, users, items))


def test_gradients_with_node_dropout_equal_finite_differences():
    model = make_model(node_dropout=0.4).train()

    def loss():
        torch.manual_seed(3)
        return cf_loss(model(*batch_of_users()))

    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def loss_at(distance):
        with torch.no_grad():
            for parameter, along in zip(parameters, direction, strict=True):
                parameter.add_(along, alpha=distance)
        return loss().item()

    step = 1e-6
    ahead, behind = loss_at(step), loss_at(-2 * step)
    slope = sum((grad * along).sum() for grad, along in zip(grads, direction, strict=True) if grad is not None)
    assert (ahead - behind) / (2 * step) == pytest.approx(slope.item(), rel=1e-6)


def test_the_initial_scale_is_that_of_a_single_table():
    model = KGAT(make_graph(), NUM_USERS, NUM_ITEMS, WIDTH, RELATION_WIDTH, LAYER_DIMS)
    bound = math.sqrt(6 / (NUM_NODES + WIDTH))
    largest = [table.weight.abs().max().item() for table in (model.users, model.items, model.entities)]
    assert 0.7 * bound < min(largest) and max(largest) <= bound


def test_autocast_changes_nothing():
    model = make_model().float()
    triples = batch_of_triples()

    def everything():
        model.refresh()
        return (*model(*batch_of_users()), *model.transr(*triples), *model.represent())

    expected = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(everything(), expected, rtol=0, atol=0)


def test_the_small_graph_has_parallel_edges_and_every_relation():
    pairs = [edge[:2] for edge in EDGES]
    assert max(pairs.count(pair) for pair in pairs) >= 3
    assert {relation for *_, relation in EDGES} == set(range(NUM_RELATIONS))
    assert all(earlier < later for earlier, later in itertools.pairwise(EDGES))

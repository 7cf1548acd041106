"""Tests that manifold-constrained hyper-connections are exact, train, and start as the plain residual network."""

import pytest
import torch

from models.sequential.mhc import HyperConnection, doubly_stochastic, hyper_connections
from models.sequential.sasrec import SASRec, residuals

WIDTH, STREAMS, NUM_ITEMS, MAXLEN = 16, 4, 40, 10


pytestmark = pytest.mark.usefixtures("double_precision")


def plain_sinkhorn(logits, num_iterations):
    matrix = logits.exp()
    for _ in range(num_iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return rounded(matrix)


def rounded(matrix):
    """Scales columns with too large a sum down, and spreads what rows and columns then lack over the matrix."""
    matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=1)
    row, column = (1 - matrix.sum(-1)).clamp(min=0), (1 - matrix.sum(-2)).clamp(min=0)
    return matrix + torch.einsum("...i,...j->...ij", row, column) / row.sum(-1)[..., None, None].clamp(min=1e-12)


@pytest.mark.parametrize("num_iterations", [1, 20])
def test_the_matrix_and_its_gradient_equal_plain_normalisation(num_iterations):
    logits = torch.randn(3, 5, STREAMS, STREAMS, requires_grad=True)
    probe = torch.randn_like(logits)
    fast, slow = doubly_stochastic(logits, num_iterations), plain_sinkhorn(logits, num_iterations)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    (of_fast,) = torch.autograd.grad((fast * probe).sum(), logits)
    (of_slow,) = torch.autograd.grad((slow * probe).sum(), logits)
    torch.testing.assert_close(of_fast, of_slow, rtol=0, atol=1e-10)
    assert of_fast.abs().max() > 1e-3


def test_large_logits_give_a_finite_doubly_stochastic_matrix():
    logits = (100 * torch.randn(50, STREAMS, STREAMS)).float().requires_grad_()
    result = doubly_stochastic(logits, 20)
    (gradient,) = torch.autograd.grad(result.square().sum(), logits)
    assert (result >= 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(result.sum(dim), torch.ones(50, STREAMS, dtype=torch.float32), rtol=0, atol=1e-5)
    assert torch.isfinite(gradient).all()


def plain_connection(connection, streams, sublayer):
    """Computes equations 7 and 8 of the paper for one token's streams, (n, C), with explicit coefficients."""
    flat = streams.flatten()
    v = flat / (flat.square().mean() + 1e-8).sqrt()

    def coefficients(part):
        return part.gate * (part.phi @ v) + part.bias

    post = 2 * torch.sigmoid(coefficients(connection.post))
    pre = torch.sigmoid(coefficients(connection.pre))
    logits = coefficients(connection.residual).view(STREAMS, STREAMS)
    residual = plain_sinkhorn(logits, connection.residual.num_iterations)
    read = sum(pre[j] * streams[j] for j in range(STREAMS))
    out = sublayer(torch.nn.functional.layer_norm(read, (WIDTH,), connection.norm.weight, connection.norm.bias, 1e-8))
    return torch.stack(
        [sum(residual[i, j] * streams[j] for j in range(STREAMS)) + post[i] * out for i in range(STREAMS)]
    )


def test_a_connection_equals_its_equations():
    connection = HyperConnection(WIDTH, 1, STREAMS, 0.5, 20, in_full_precision=False, opens=False, closes=False)
    for parameter in connection.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    weight = torch.randn(WIDTH, WIDTH)
    streams = torch.randn(2, 3, STREAMS, WIDTH, requires_grad=True)
    fast = connection(streams, lambda query, context: torch.tanh(query @ weight.T))
    slow = torch.stack(
        [
            torch.stack([plain_connection(connection, token, lambda x: torch.tanh(weight @ x)) for token in row])
            for row in streams
        ]
    )
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)
    probe, inputs = torch.randn_like(fast), [streams, *connection.parameters()]
    gradients = torch.autograd.grad((fast * probe).sum(), inputs)
    for of_fast, of_slow in zip(gradients, torch.autograd.grad((slow * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(of_fast, of_slow, rtol=0, atol=1e-10)


def make_models(init_gate, num_blocks=2):
    """Returns a plain pre-norm network, and one with hyper-connections and otherwise the same weights."""
    plain = SASRec(NUM_ITEMS, MAXLEN, WIDTH, num_blocks, dropout=0.0, connections=residuals(WIDTH, num_blocks, "pre"))
    hyper = SASRec(
        NUM_ITEMS, MAXLEN, WIDTH, num_blocks, dropout=0.0,
        connections=hyper_connections(WIDTH, num_blocks, STREAMS, init_gate),
    )  # fmt: skip
    missing, unexpected = hyper.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(".post." in name or ".pre." in name or ".residual." in name for name in missing)
    return plain, hyper


def make_batch(num_users=16):
    items = torch.randint(1, NUM_ITEMS + 1, (num_users, MAXLEN))
    return items, torch.full((num_users,), MAXLEN)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_at_the_start_the_network_is_the_plain_residual_one(num_blocks):
    batch = make_batch()
    plain, hyper = make_models(init_gate=0.0, num_blocks=num_blocks)
    torch.testing.assert_close(hyper.encode(*batch), plain.encode(*batch), rtol=0, atol=1e-10)
    plain, hyper = make_models(init_gate=0.01, num_blocks=num_blocks)  # by default, tokens have a small effect
    difference = (hyper.encode(*batch) - plain.encode(*batch)).abs().max()
    assert 0 < difference < 0.05


class Recorder:
    """Recorder of the streams that each connection of a model receives."""

    def __init__(self, model):
        self.streams = {}
        for name, module in model.named_modules():
            if isinstance(module, HyperConnection) and not module.opens:
                module.register_forward_pre_hook(lambda _, args, name=name: self.streams.update({name: args[0]}))

    def smallest_spread(self):
        """Returns the smallest distance, over connections, of streams from their mean, relative to its norm."""
        return min(
            float(((x - x.mean(-2, keepdim=True)).norm() / (x.mean(-2).norm() * STREAMS**0.5)).detach())
            for x in self.streams.values()
        )


def train(model, num_steps=60):
    """Trains on sequences in which every item is followed by the next one, and returns the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    length = torch.full((16,), MAXLEN)
    for _ in range(num_steps):
        items = (torch.randint(0, NUM_ITEMS, (16, 1)) + torch.arange(MAXLEN + 1)) % NUM_ITEMS + 1
        logits = model.encode(items[:, :-1], length) @ model.items.weight.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), items[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_residual_streams_differ_get_gradients_and_mix_doubly_stochastically():
    _, model = make_models(init_gate=0.01, num_blocks=3)
    recorder = Recorder(model)
    model.encode(*make_batch())
    assert recorder.smallest_spread() < 0.01  # streams start as copies
    assert train(model) < 1.0  # guessing gives 3.7
    assert recorder.smallest_spread() > 0.03

    model.encode(*make_batch()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, f"{name} receives no gradient"

    model.encode(*make_batch())
    moved = []
    for name, module in model.named_modules():
        if isinstance(module, HyperConnection) and not (module.opens or module.closes):
            matrix = module.residual(module._projected(recorder.streams[name])["residual"])
            assert (matrix >= 0).all()
            assert (matrix.sum(-1) - 1).abs().max() < 1e-3
            assert (matrix.sum(-2) - 1).abs().max() < 1e-3
            moved.append(float((matrix - torch.eye(STREAMS)).abs().max().detach()))
    assert min(moved) > 0.05  # mixing has left the identity everywhere


def test_equal_weights_would_keep_the_streams_equal():
    """This is the negative control: without the uneven initial h_pre, streams stay copies of each other."""
    _, model = make_models(init_gate=0.01, num_blocks=3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, HyperConnection):
                module.post.phi.zero_()
                if not module.opens:
                    module.pre.bias.fill_(0.0)
                    module.pre.phi.zero_()
                if not module.opens and not module.closes:
                    module.residual.phi.zero_()
    recorder = Recorder(model)
    train(model)
    assert recorder.smallest_spread() < 0.005


def test_full_precision_keeps_the_connection_out_of_autocast():
    torch.set_default_dtype(torch.float32)
    _, model = make_models(init_gate=0.5)
    batch = make_batch()
    streams = torch.randn(2, 3, STREAMS, WIDTH)

    def coefficient_error(in_full_precision):
        connection = model.blocks[0].feed_forward_connection
        connection.in_full_precision = in_full_precision
        exact = connection(streams, lambda query, _: query)
        with torch.autocast("cpu", torch.bfloat16):
            return float((connection(streams, lambda query, _: query) - exact).abs().max().detach())

    assert coefficient_error(in_full_precision=True) == 0
    assert coefficient_error(in_full_precision=False) > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model.encode(*batch)).all()

"""Tests SASRec and TiSASRec against a slow form of the papers' equations, one query at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from models.layers.dropout import Dropout
from models.sequential.mhc import hyper_connections
from models.sequential.sasrec import SASRec, residuals
from models.sequential.tisasrec import TiSASRec

NUM_ITEMS, MAXLEN, WIDTH, TIME_SPAN = 30, 12, 8, 9
VARIANTS = [
    (model, order, heads) for model in (SASRec, TiSASRec) for order in ("original", "pre", "post") for heads in (1, 2)
]


pytestmark = pytest.mark.usefixtures("double_precision")


def make_model(kind, order="original", heads=1, dropout=0.0, connections=None):
    extra = {"time_span": TIME_SPAN} if kind is TiSASRec else {}
    connections = connections or residuals(WIDTH, 2, order)
    model = kind(NUM_ITEMS, MAXLEN, WIDTH, 2, heads, dropout, connections=connections, **extra)
    for parameter in model.parameters():  # initial biases and gains have no effect, which would hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def make_batch(lengths=(12, 7, 1)):
    length = torch.tensor(lengths)
    real = torch.arange(max(lengths)) < length[:, None]
    items = torch.randint(1, NUM_ITEMS + 1, real.shape) * real
    times = torch.randint(0, 5, real.shape).cumsum(1) * real
    return items, length, times


def reference(model, order, items, times):
    """Returns the states after each of one user's items, as a list of (WIDTH,) tensors."""
    position = range(MAXLEN - len(items), MAXLEN)
    x = [math.sqrt(WIDTH) * model.items.weight[i] for i in items]
    if isinstance(model, SASRec):
        x = [x_t + model.position_embedding.weight[p] for x_t, p in zip(x, position, strict=True)]
    for block in model.blocks:
        inputs, x = norm_in(block.attention_connection, order, x)
        attended = [attend(model, block.attention, t, inputs, position, times) for t in range(len(items))]
        x = norm_out(block.attention_connection, order, [a + b for a, b in zip(x, attended, strict=True)])
        inputs, x = norm_in(block.feed_forward_connection, order, x)
        first, second = block.feed_forward.layers[0], block.feed_forward.layers[3]
        added = [second.weight @ F.relu(first.weight @ q + first.bias) + second.bias for q, _ in inputs]
        x = norm_out(block.feed_forward_connection, order, [a + b for a, b in zip(x, added, strict=True)])
    return [layer_norm(model.norm, x_t) for x_t in x]


def layer_norm(norm, x):
    centred = x - x.mean()
    return centred / (centred.square().mean() + 1e-8).sqrt() * norm.weight + norm.bias


def norm_in(connection, order, x):
    """Returns [(query input, context)] of the sub-layer, and the stream that its output is added to."""
    normalised = x if order == "post" else [layer_norm(connection.norm, x_t) for x_t in x]
    context = normalised if order == "pre" else x
    return list(zip(normalised, context, strict=True)), normalised if order == "original" else x


def norm_out(connection, order, x):
    return [layer_norm(connection.norm, x_t) for x_t in x] if order == "post" else x


def attend(model, attention, t, inputs, position, times):
    projections = attention.projections
    query = projections.query.weight @ inputs[t][0] + projections.query.bias
    keys = [projections.key.weight @ context for _, context in inputs[: t + 1]]
    values = [projections.value.weight @ context + projections.value.bias for _, context in inputs[: t + 1]]
    if isinstance(model, TiSASRec):
        interval = [min(TIME_SPAN, abs(int(times[t] - times[j]))) for j in range(t + 1)]
        for table, tables in ((keys, "keys"), (values, "values")):
            for j in range(t + 1):
                table[j] = table[j] + getattr(model, f"position_{tables}").weight[position[j]]
                table[j] = table[j] + getattr(model, f"interval_{tables}").weight[interval[j]]
    out = []
    width = WIDTH // projections.num_heads
    for head in range(projections.num_heads):
        part = slice(head * width, (head + 1) * width)
        logits = torch.stack([query[part] @ key[part] for key in keys]) / math.sqrt(width)
        out.append(sum(a * value[part] for a, value in zip(logits.softmax(0), values, strict=True)))
    return torch.cat(out)


@pytest.mark.parametrize(("kind", "order", "heads"), VARIANTS)
def test_states_and_gradients_equal_the_equations(kind, order, heads):
    model = make_model(kind, order, heads)
    items, length, times = make_batch()
    found = model.encode(items, length, times)
    expected = [reference(model, order, items[b, :n], times[b, :n]) for b, n in enumerate(length.tolist())]
    probe = torch.randn(*found.shape)
    loss = sum((found[b, t] * probe[b, t]).sum() for b, states in enumerate(expected) for t in range(len(states)))
    slow_loss = sum((s * probe[b, t]).sum() for b, states in enumerate(expected) for t, s in enumerate(states))
    for b, states in enumerate(expected):
        torch.testing.assert_close(found[b, : len(states)], torch.stack(states), rtol=0, atol=1e-10)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for (name, _), fast, slow in zip(
        model.named_parameters(), gradients, torch.autograd.grad(slow_loss, parameters), strict=True
    ):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        assert name == "items.weight" or fast.abs().max() > 1e-6, f"{name} is not learned"


MODELS = [
    ("SASRec", lambda: make_model(SASRec)),
    ("TiSASRec", lambda: make_model(TiSASRec, "pre", heads=2)),
    ("SASRec+mHC", lambda: make_model(SASRec, connections=hyper_connections(WIDTH, 2))),
    ("TiSASRec+mHC", lambda: make_model(TiSASRec, connections=hyper_connections(WIDTH, 2))),
]
every_model = pytest.mark.parametrize("make", [make for _, make in MODELS], ids=[name for name, _ in MODELS])


@every_model
@pytest.mark.parametrize("training", [False, True])
def test_padding_never_changes_an_output(make, training):
    model = make().train(training)
    items, length, times = make_batch((7, 5, 3))
    alone = [model.encode(items[b : b + 1, :n], length[b : b + 1], times[b : b + 1, :n]) for b, n in enumerate(length)]
    padding = torch.arange(MAXLEN) >= length[:, None]
    wide_items, wide_times = F.pad(items, (0, 5)), F.pad(times, (0, 5))
    wide_items[padding] = torch.randint(0, NUM_ITEMS + 1, (int(padding.sum()),))
    wide_times[padding] = torch.randint(0, 1000, (int(padding.sum()),))
    together = model.encode(wide_items, length, wide_times)
    for b, n in enumerate(length):
        torch.testing.assert_close(together[b, :n], alone[b][0], rtol=0, atol=1e-12)


@every_model
def test_future_items_change_no_earlier_state(make):
    model = make()
    items, length, times = make_batch((12, 12, 12))
    before = model.encode(items, length, times)
    changed_items, changed_times = items.clone(), times.clone()
    changed_items[:, 8:] = changed_items[:, 8:] % NUM_ITEMS + 1
    changed_times[:, 8:] += 3
    after = model.encode(changed_items, length, changed_times)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.isclose(before[:, 8:], after[:, 8:]).all(-1).any()


@every_model
def test_the_last_state_equals_the_last_of_all_states(make):
    model = make().eval()
    items, length, times = make_batch()
    everything = model.encode(items, length, times)
    last = model.encode(items, length, times, only_last=True)
    torch.testing.assert_close(last[:, 0], everything[torch.arange(3), length - 1], rtol=0, atol=1e-12)
    scores = model(items, length, times)
    assert scores.shape == (3, NUM_ITEMS + 1)
    assert (scores[:, 0] == -math.inf).all()
    torch.testing.assert_close(scores[:, 1:], last[:, 0] @ model.items.weight[1:].T)


def test_times_and_intervals_matter_up_to_the_time_span():
    model = make_model(TiSASRec)
    items, length, times = make_batch((5, 5))
    other = times + torch.tensor([0, 0, 1, 1, 1])
    assert not torch.allclose(model.encode(items, length, times), model.encode(items, length, other))
    far = times * 0 + torch.tensor([0, 10, 20, 30, 40])
    farther = far * 7
    assert torch.equal(model.encode(items, length, far), model.encode(items, length, farther))


def test_a_history_longer_than_maxlen_and_missing_times_are_refused():
    items = torch.ones(1, MAXLEN + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="exceed maxlen 12"):
        make_model(SASRec).encode(items, torch.tensor([MAXLEN + 1]))
    with pytest.raises(ValueError, match="needs the times"):
        make_model(TiSASRec).encode(items[:, :3], torch.tensor([3]))


def test_attention_with_dropout_has_the_same_training_path():
    """Dropout has a separate path on a CPU; with a probability near 0 it must give the same states."""
    items, length, times = make_batch()
    model = make_model(SASRec, heads=2, dropout=1e-9)
    training = model.encode(items, length, times)
    torch.testing.assert_close(training, model.eval().encode(items, length, times), rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_dropout_drops_its_rate_and_keeps_the_mean(p):
    x = torch.ones(1001, 333)
    dropped = Dropout(p)(x)
    share = float((dropped == 0).double().mean())
    assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / x.numel()))
    assert dropped.max().item() == pytest.approx(1 / (1 - p), rel=1e-4)
    columns = (dropped == 0).double().mean(0)  # no 16-bit piece of a random word is biased
    assert (columns - p).abs().max() < 6 * math.sqrt(p * (1 - p) / len(x))
    torch.manual_seed(1)
    first = Dropout(p)(x)
    torch.manual_seed(1)
    assert torch.equal(first, Dropout(p)(x))
    assert torch.equal(Dropout(p).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)


def test_dropout_passes_gradients_where_it_passes_values():
    x = torch.ones(1000, requires_grad=True)
    dropped = Dropout(0.3)(x)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped.detach())

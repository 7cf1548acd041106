"""Tests TinyHAR and DeepConvLSTM against slow references, and what depends on the batch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.har.deepconvlstm import DeepConvLstm
from models.har.tinyhar import TinyHar

MODELS = (TinyHar, DeepConvLstm)


def windows(num: int, num_channels: int = 9, length: int = 128) -> Tensor:
    shape = (num, num_channels, length)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def model(build: type[nn.Module], **options) -> nn.Module:
    """Returns a float64 model with every weight moved off its starting value, so that gates and norms matter."""
    torch.manual_seed(0)
    net = build(**options).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2.0)
    return net


def slow_convolution(signal: Tensor, conv: nn.Conv2d) -> Tensor:
    """Convolves a signal, (filters in, steps), of one channel of one window into (filters out, steps out)."""
    weight, stride, padding = conv.weight[:, :, 0], conv.stride[1], conv.padding[1]
    padded = functional.pad(signal, (padding, padding))
    starts = range(0, padded.shape[1] - weight.shape[2] + 1, stride)
    sums = [(weight * padded[:, start : start + weight.shape[2]]).sum(dim=(1, 2)) for start in starts]
    return torch.stack(sums, dim=1) + conv.bias[:, None]


def slow_batch_norm(signals: list[Tensor], norm: nn.BatchNorm2d) -> list[Tensor]:
    """Normalises signals, (filters, steps), of every channel of every window."""
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        everything = torch.cat(signals, dim=1)
        mean = everything.mean(dim=1)
        variance = (everything - mean[:, None]).square().mean(dim=1)
    scale = norm.weight / (variance + norm.eps).sqrt()
    return [(signal - mean[:, None]) * scale[:, None] + norm.bias[:, None] for signal in signals]


def slow_encoder(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Encodes (B, channels, T) as (B, channels, filters, steps), each channel of each window alone."""
    signals = [channel[None] for window in x for channel in window]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            signals = [slow_convolution(signal, layer) for signal in signals]
        elif isinstance(layer, nn.BatchNorm2d):
            signals = slow_batch_norm(signals, layer)
        else:
            signals = [signal * (signal > 0) for signal in signals]
    return torch.stack(signals).unflatten(0, x.shape[:2])


def slow_lstm(steps: Tensor, lstm: nn.LSTM) -> Tensor:
    """Returns the hidden state after every step, (T, units), of one window with steps of shape (T, inputs)."""
    state = memory = steps.new_zeros(lstm.hidden_size)
    states = []
    for step in steps:
        gates = lstm.weight_ih_l0 @ step + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ state + lstm.bias_hh_l0
        enter, keep, new, show = gates.chunk(4)
        memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
        state = show.sigmoid() * memory.tanh()
        states.append(state)
    return torch.stack(states)


def slow_channel_attention(net: TinyHar, channels: Tensor) -> Tensor:
    """Mixes the channels, (channels, filters), of one time step of one window."""
    attention = net.channel_attention
    mixed = []
    for own in channels:
        query = attention.query.weight @ own
        likelihoods = [math.e ** (query @ (attention.key.weight @ other)) for other in channels]
        values = [attention.value.weight @ other for other in channels]
        answer = sum(likelihood * value for likelihood, value in zip(likelihoods, values, strict=True))
        mixed.append(own + attention.gate * answer / sum(likelihoods))
    return torch.stack(mixed)


def slow_pooling(net: TinyHar, states: Tensor) -> Tensor:
    """Pools the states, (T, units), of one window."""
    pooling = net.pooling
    scores = [pooling.score.weight[0] @ (pooling.hidden.weight @ s + pooling.hidden.bias).tanh() for s in states]
    likelihoods = [math.e**score for score in scores]
    context = sum(likelihood * state for likelihood, state in zip(likelihoods, states, strict=True))
    return states[-1] + pooling.gate * context / sum(likelihoods)


def slow_tinyhar(net: TinyHar, x: Tensor) -> Tensor:
    features = slow_encoder(net.encoder, x)
    mixed = [
        torch.stack([slow_channel_attention(net, window[:, :, t]) for t in range(features.shape[3])])
        for window in features
    ]
    dropped = net.dropout(torch.stack(mixed))
    pooled = []
    for window in dropped:
        fused = [(net.fusion.weight @ channels.flatten() + net.fusion.bias).clamp(min=0) for channels in window]
        pooled.append(slow_pooling(net, slow_lstm(torch.stack(fused), net.lstm)))
    return net.dropout(torch.stack(pooled)) @ net.classifier.weight.T + net.classifier.bias


def slow_deepconvlstm(net: DeepConvLstm, x: Tensor) -> Tensor:
    features = slow_encoder(net.encoder, x)
    first = [
        slow_lstm(torch.stack([window[:, :, t].flatten() for t in range(features.shape[3])]), net.lstm1)
        for window in features
    ]
    last = [slow_lstm(states, net.lstm2)[-1] for states in net.dropout(torch.stack(first))]
    return net.dropout(torch.stack(last)) @ net.classifier.weight.T + net.classifier.bias


def outcome(forward: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the logits, and the gradients of their sum of squares for the windows and every parameter."""
    torch.manual_seed(1)  # for dropout
    x = x.clone().requires_grad_()
    logits = forward(x)
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), [x, *net.parameters()])]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("build", "slow", "length"), [(TinyHar, slow_tinyhar, 23), (DeepConvLstm, slow_deepconvlstm, 24)]
)
def test_equals_a_slow_obvious_reference(build, slow, length, train) -> None:
    """In training, the same seed must drop the same elements, so dropout must sit where the reference has it."""
    net = model(build, num_channels=4, num_classes=3).train(train)
    x = windows(3, num_channels=4, length=length)
    for actual, expected in zip(outcome(net, net, x), outcome(lambda x: slow(net, x), net, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("build", "num_parameters"), [(TinyHar, 42_704), (DeepConvLstm, 556_358)])
def test_has_the_stated_number_of_parameters(build, num_parameters) -> None:
    assert sum(parameter.numel() for parameter in build().parameters()) == num_parameters


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("length", [17, 18, 19, 20, 128])
def test_shapes_and_options_are_as_given(build, length) -> None:
    net = build(num_channels=5, num_classes=4, dropout=0.3)
    assert net(torch.randn(2, 5, length)).shape == (2, 4)
    assert net.dropout.p == 0.3


def test_tinyhar_convolves_rectifies_then_normalises() -> None:
    """The slow reference takes layers and strides from the model, so they are stated here."""
    encoder = TinyHar().encoder
    assert [type(layer) for layer in encoder] == 4 * [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]
    assert [conv.stride for conv in encoder[::3]] == [(1, 1), (1, 2), (1, 1), (1, 2)]
    assert encoder(torch.randn(2, 1, 9, 41)).shape == (2, 24, 9, 11)


def test_tinyhar_accepts_the_shortest_window() -> None:
    assert TinyHar()(torch.randn(2, 9, 1)).shape == (2, 6)


def test_recurrent_weights_start_orthogonal() -> None:
    net = DeepConvLstm()
    gates = [gate for lstm in (net.lstm1, net.lstm2) for gate in lstm.weight_hh_l0.detach().chunk(4)]
    for gate in gates:
        torch.testing.assert_close(gate @ gate.T, torch.eye(128), rtol=0, atol=1e-5)
    assert not torch.equal(gates[0], gates[4])


@pytest.mark.parametrize("build", MODELS)
def test_every_parameter_has_a_gradient(build) -> None:
    net = model(build).train()
    functional.cross_entropy(net(windows(8, length=40)), torch.arange(8) % 6).backward()
    for name, parameter in net.named_parameters():
        # Rounding makes about 1e-16 of a gradient that is zero.
        assert parameter.grad.abs().flatten().median() > 1e-8, name


def test_closed_gates_learn_to_open() -> None:
    torch.manual_seed(0)
    net = TinyHar().double().train()
    gates = [net.channel_attention.gate, net.pooling.gate]
    behind = [net.channel_attention.query, net.channel_attention.value, net.pooling.hidden, net.pooling.score]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, label = windows(8, length=40), torch.arange(8) % 6
    functional.cross_entropy(net(x), label).backward()
    assert all(gate == 0 and gate.grad != 0 for gate in gates)
    assert all(not layer.weight.grad.any() for layer in behind)
    optimizer.step()
    functional.cross_entropy(net(x), label).backward()
    assert all(layer.weight.grad.abs().median() > 1e-12 for layer in behind)


@pytest.mark.parametrize("build", MODELS)
def test_dropout_is_active_only_in_training(build) -> None:
    x = windows(4, length=32)
    net = model(build).eval()
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))
    certain = model(build, dropout=0.0).train()
    assert torch.equal(certain(x), certain(x))


def last_channel_first(weight: Tensor) -> None:
    """Moves the last channel of the weight, (outputs, 9 * filters), to the front in place."""
    by_channel = weight.unflatten(1, (9, -1))
    weight.copy_(by_channel.roll(1, dims=1).flatten(1))


@pytest.mark.parametrize("build", MODELS)
def test_channels_are_encoded_equally_until_fusion(build) -> None:
    net = model(build).eval()
    x = windows(2, length=32)
    before = net(x)
    with torch.no_grad():
        last_channel_first(net.fusion.weight if build is TinyHar else net.lstm1.weight_ih_l0)
    torch.testing.assert_close(net(x.roll(1, dims=1)), before, rtol=1e-10, atol=1e-10)


def test_deepconvlstm_pads_nothing() -> None:
    net = model(DeepConvLstm)
    x = windows(2, length=40).unsqueeze(1)
    features = net.encoder(x)
    assert features.shape[-1] == 40 - 16
    torch.testing.assert_close(net.encoder(x[..., 3:-2]), features[..., 3:-2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("build", "train"), [(TinyHar, False), (DeepConvLstm, False), (DeepConvLstm, True)])
def test_other_samples_of_a_batch_never_change_an_output(build, train) -> None:
    net = model(build, dropout=0.0).train(train)
    x = windows(5, length=32)
    together = net(x)
    others = torch.cat([x[:1], 100 * windows(4, length=32)])
    torch.testing.assert_close(net(others)[0], together[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net(x[:1])[0], together[0], rtol=1e-10, atol=1e-10)


def test_batch_norm_is_tinyhars_exception() -> None:
    net = model(TinyHar, dropout=0.0).train()
    x = windows(5, length=32)
    assert not torch.allclose(net(x)[0], net(x[:1])[0], rtol=0.01, atol=0.01)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in synchronised.modules()) == 4
    assert not list(DeepConvLstm().buffers())


@pytest.mark.parametrize("build", MODELS)
def test_a_state_dict_is_complete(build) -> None:
    trained, fresh = model(build), build().double()
    x = windows(3, length=32)
    trained.train()(x)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.eval()(x), trained.eval()(x))

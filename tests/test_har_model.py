"""HarNet: every mode against a slow obvious reference; samples do not see each other; no useless parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.har import HarNet

MODES = ("early", "flatten", "average", "first")


def windows(num: int, length: int = 128) -> Tensor:
    return torch.randn(num, 9, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def model(mode: str, **options) -> HarNet:
    torch.manual_seed(0)
    return HarNet(mode, **options).double()


def slow_group_norm(h: Tensor, norm: nn.GroupNorm) -> Tensor:
    """h: (C, T), one sample."""
    groups = []
    for group in h.chunk(norm.num_groups):
        deviation = group - group.mean()
        groups.append(deviation / (deviation.square().mean() + norm.eps).sqrt())
    return torch.cat(groups) * norm.weight[:, None] + norm.bias[:, None]


def slow_encoder(net: HarNet, signal: Tensor) -> Tensor:
    """signal: (C, T), one sample. Returns (num_features,)."""
    h = signal
    for layer in net.encoder.layers:
        if isinstance(layer, nn.Conv1d):
            kernel_size = layer.weight.shape[2]
            padded = functional.pad(h, (kernel_size // 2, kernel_size // 2))
            starts = range(0, padded.shape[1] - kernel_size + 1, 2)
            h = torch.stack([(layer.weight * padded[:, s : s + kernel_size]).sum(dim=(1, 2)) for s in starts], dim=1)
        elif isinstance(layer, nn.GroupNorm):
            h = slow_group_norm(h, layer)
        else:
            h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    return torch.cat([h.mean(dim=1), h.max(dim=1).values])


@pytest.mark.parametrize("mode", MODES)
def test_equals_a_slow_obvious_reference(mode) -> None:
    net = model(mode).eval()
    x = windows(2, length=40)
    for sample, logits in zip(x, net(x), strict=True):
        if mode == "early":
            features = slow_encoder(net, sample)
        else:
            channels = [slow_encoder(net, sample[c : c + 1]) for c in range(9)]
            combine = {
                "flatten": torch.cat(channels),
                "average": torch.stack(channels).mean(dim=0),
                "first": channels[0],
            }
            features = combine[mode]
        torch.testing.assert_close(logits, net.head(features[None])[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_batch_mates_never_change_an_output(mode) -> None:
    net = model(mode).train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = windows(5)
    together = net(x)
    others = torch.cat([x[:1], 100 * windows(4)])
    torch.testing.assert_close(net(others)[0], together[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net(x[:1])[0], together[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hidden_dims", [(), (32,), (48, 32)])
def test_every_parameter_has_a_gradient(mode, hidden_dims) -> None:
    net = model(mode, hidden_dims=hidden_dims)
    x = windows(8, length=64)
    functional.cross_entropy(net(x), torch.arange(8) % 6).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        # A gradient that is zero in truth would be rounding noise, about 1e-16 here.
        assert parameter.grad.abs().flatten().median() > 1e-7, name


def test_no_buffers_no_batch_norm() -> None:
    for mode in MODES:
        assert not list(model(mode).buffers())


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_options(mode) -> None:
    net = HarNet(mode, num_channels=4, num_classes=3, hidden_dims=(20, 10), dropout=0.5, widths=(8, 16))
    assert net(torch.randn(2, 4, 33)).shape == (2, 3)
    assert [m.out_features for m in net.head if isinstance(m, nn.Linear)] == [20, 10, 3]
    assert {m.p for m in net.head if isinstance(m, nn.Dropout)} == {0.5}


def test_first_looks_at_channel_0_only_and_average_at_no_order() -> None:
    x = windows(3)
    shuffled = x[:, torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    first, average = model("first").eval(), model("average").eval()
    assert torch.equal(first(x), first(torch.cat([x[:, :1], 7 * x[:, 1:]], dim=1)))
    torch.testing.assert_close(average(x), average(shuffled))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'late'.*early, flatten, average, first"):
        HarNet("late")

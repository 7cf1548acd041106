"""Tests HarNet: every mode against a slow reference, the independence of samples, and that each parameter is used."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.har.harnet import HarNet

MODES = ("early", "flatten", "average", "first")


def windows(num: int, length: int = 128) -> Tensor:
    return torch.randn(num, 9, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def model(mode: str, **options) -> HarNet:
    torch.manual_seed(0)
    return HarNet(mode, **options).double()


def slow_group_norm(h: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalises one sample, (C, T)."""
    groups = []
    for group in h.chunk(norm.num_groups):
        deviation = group - group.mean()
        groups.append(deviation / (deviation.square().mean() + norm.eps).sqrt())
    return torch.cat(groups) * norm.weight[:, None] + norm.bias[:, None]


def members_layer(layer: nn.Conv1d | nn.GroupNorm, member: int, num_members: int) -> nn.Module:
    """Returns one member's part of an encoder's layer as a separate layer."""
    own = {name: value.chunk(num_members)[member] for name, value in layer.state_dict().items()}
    if isinstance(layer, nn.GroupNorm):
        alone: nn.Module = nn.GroupNorm(layer.num_groups // num_members, layer.num_channels // num_members)
    else:
        width = layer.out_channels // num_members
        alone = nn.Conv1d(own["weight"].shape[1], width, layer.kernel_size[0], stride=2, bias=False)
    alone.double().load_state_dict(own)
    return alone


def slow_encoder(net: HarNet, signal: Tensor, member: int) -> Tensor:
    """Encodes one sample, (C, T), as (num_features,)."""
    moving = signal[:6] / 0.03
    h = torch.cat([signal, torch.log(moving + (moving**2 + 1).sqrt()) / 3])
    for layer in net.encoder.layers:
        if isinstance(layer, nn.GELU):
            h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
            continue
        alone = members_layer(layer, member, len(net.heads))
        if isinstance(alone, nn.Conv1d):
            kernel_size = alone.kernel_size[0]
            padded = functional.pad(h, (kernel_size // 2, kernel_size // 2))
            starts = range(0, padded.shape[1] - kernel_size + 1, 2)
            h = torch.stack([(alone.weight * padded[:, s : s + kernel_size]).sum(dim=(1, 2)) for s in starts], dim=1)
        else:
            h = slow_group_norm(h, alone)
    return torch.cat([h.mean(dim=1), h.max(dim=1).values])


@pytest.mark.parametrize("mode", MODES)
def test_equals_a_slow_obvious_reference(mode) -> None:
    net = model(mode, num_members=3).eval()
    x = windows(2, length=40)
    for sample, member_logits, answer in zip(x, net.member_logits(net.features(x)), net(x), strict=True):
        shares = []
        for member, head in enumerate(net.heads):
            if mode == "early":
                features = slow_encoder(net, sample, member)
            else:
                channels = [slow_encoder(net, sample[c : c + 1], member) for c in range(9)]
                combine = {
                    "flatten": torch.cat(channels),
                    "average": torch.stack(channels).mean(dim=0),
                    "first": channels[0],
                }
                features = combine[mode]
            logits = head(features[None])[0]
            torch.testing.assert_close(member_logits[member], logits, rtol=1e-10, atol=1e-10)
            shares.append(logits.softmax(0))
        torch.testing.assert_close(answer.softmax(0), torch.stack(shares).mean(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_ensemble_members_share_no_state(mode) -> None:
    """One member's loss has no gradient in the others, and members start from different weights."""
    net = model(mode, num_members=3)
    x = windows(4, length=40)
    net.member_logits(net.features(x))[:, 1].square().sum().backward()
    for name, parameter in net.encoder.named_parameters():
        used = [part.abs().sum() > 0 for part in parameter.grad.chunk(3)]
        assert used == [False, True, False], name
    assert all(p.grad is None or not p.grad.any() for i in (0, 2) for p in net.heads[i].parameters())
    logits = net.member_logits(net.features(x))
    assert not torch.allclose(logits[:, 0], logits[:, 1])


@pytest.mark.parametrize("mode", MODES)
def test_other_samples_of_a_batch_never_change_an_output(mode) -> None:
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
    logits = net.member_logits(net.features(x))
    functional.cross_entropy(logits.flatten(0, 1), (torch.arange(8) % 6).repeat_interleave(4)).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        # Rounding makes about 1e-16 of a gradient that is zero.
        assert parameter.grad.abs().flatten().median() > 1e-7, name


def test_models_without_buffers_need_no_synchronisation() -> None:
    for mode in MODES:
        assert not list(model(mode).buffers())


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_options_are_as_given(mode) -> None:
    net = HarNet(mode, num_channels=4, num_classes=3, hidden_dims=(20, 10), dropout=0.5, widths=(8, 16))
    assert net(torch.randn(2, 4, 33)).shape == (2, 3)
    assert [m.out_features for m in net.heads[0] if isinstance(m, nn.Linear)] == [20, 10, 3]
    assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {0.5}


def test_mode_first_uses_channel_0_and_mode_average_ignores_order() -> None:
    x = windows(3)
    shuffled = x[:, torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    first, average = model("first").eval(), model("average").eval()
    assert torch.equal(first(x), first(torch.cat([x[:, :1], 7 * x[:, 1:]], dim=1)))
    torch.testing.assert_close(average(x), average(shuffled))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'late'.*early, flatten, average, first"):
        HarNet("late")

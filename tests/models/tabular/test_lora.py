"""Tests that LoRA changes nothing at first, trains only adapters, and merges them up to rounding."""

import copy

import pytest
import torch
from torch import nn

from models.tabular.lora import LoRALinear, add_adapters, merge_adapters
from trainer.common.errors import UserError


class Net(nn.Module):
    """Network with a fused projection that has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(6, 18, bias=False), "out": nn.Linear(6, 6)})
        self.norm = nn.LayerNorm(6)
        self.head = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))

    def forward(self, x):
        query, key, value = self.attention["qkv"](self.norm(x)).chunk(3, dim=-1)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return self.head(x + self.attention["out"](mixed))


LAYERS = ["attention.qkv", "attention.out", "head.0", "head.2"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def trained(net: nn.Module, x: torch.Tensor, num_steps: int = 20) -> None:
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.05)
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def test_adapters_change_nothing_at_first() -> None:
    net, x = Net(), torch.randn(4, 5, 6)
    expected = net(x)
    assert add_adapters(net) == LAYERS
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


def test_an_adapted_layer_equals_its_equation() -> None:
    layer = LoRALinear(nn.Linear(6, 4), rank=2, alpha=3.0)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(5, 6)
    expected = [layer.weight @ row + layer.bias + 3 / 2 * (layer.lora_b @ (layer.lora_a @ row)) for row in x]
    torch.testing.assert_close(layer(x), torch.stack(expected))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_merged_adapters_equal_unmerged_adapters(dtype, tolerance) -> None:
    net, x = Net().to(dtype), torch.randn(4, 5, 6, dtype=dtype)
    plain = copy.deepcopy(net)
    add_adapters(net, rank=2, alpha=4.0)
    trained(net, x)
    expected = net.eval()(x)
    assert (expected - plain(x)).abs().max() > 0.1
    merge_adapters(net)
    torch.testing.assert_close(net(x), expected, rtol=tolerance, atol=tolerance)
    assert [type(module) for module in net.modules()] == [type(module) for module in plain.modules()]
    assert all(parameter.requires_grad and parameter.dtype == dtype for parameter in net.parameters())
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(plain(x), net(x), rtol=0, atol=0)


def test_only_adapters_learn() -> None:
    net, x = Net(), torch.randn(4, 5, 6)
    before = copy.deepcopy(net.state_dict())
    add_adapters(net, targets=["*.qkv", "head.[0-9]"], rank=2)
    trained(net, x)
    after = net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    adapters = {f"{layer}.{name}" for layer in ("attention.qkv", "head.0", "head.2") for name in ("lora_a", "lora_b")}
    assert after.keys() - before.keys() == adapters
    assert {name for name, p in net.named_parameters() if p.grad is not None} == adapters
    assert all(p.grad.abs().max() > 0 for name, p in net.named_parameters() if name in adapters)


def test_adapters_compute_under_autocast() -> None:
    net, x = Net(), torch.randn(4, 5, 6)
    add_adapters(net, rank=2)
    trained(net, x, num_steps=3)
    with torch.autocast("cpu", torch.bfloat16):
        low = net(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), net(x), rtol=0.05, atol=0.05)
    low.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters() if p.requires_grad)


def test_a_target_that_matches_no_layer_is_named() -> None:
    with pytest.raises(
        UserError, match=r"^--lora-targets \*\.kv: matches no linear layer; the layers include attention.qkv, .*head"
    ):
        add_adapters(Net(), targets=["*.qkv", "*.kv"])

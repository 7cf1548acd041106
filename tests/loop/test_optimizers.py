"""The optimizer without torch's wrappers is torch's optimizer."""

import copy

import pytest
import torch

from trainer.loop.optimizers import without_wrappers


def trained(optimizer_type, num_steps, hook=None, state=None):
    """Weights after some steps, the optimizer's state, and what the hooks saw."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    optimizer = optimizer_type(
        [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1, fused=True
    )
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    seen = []
    if hook is not None:
        getattr(optimizer, hook)(lambda *_: seen.append(weights[0].sum().item()))
    for i in range(num_steps):
        sum((weight * (i + 1)).sin().sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in weights]), optimizer.state_dict(), seen


@pytest.mark.parametrize("hook", [None, "register_step_pre_hook", "register_step_post_hook"])
def test_same_bits_and_the_same_hooks(hook):
    plain = without_wrappers(torch.optim.AdamW)
    expected, ours = trained(torch.optim.AdamW, 5, hook), trained(plain, 5, hook)
    assert torch.equal(ours[0], expected[0])
    assert ours[2] == expected[2] and len(ours[2]) == (5 if hook else 0)
    assert str(ours[1]) == str(expected[1])
    on = [trained(kind, 3, state=expected[1])[0] for kind in (torch.optim.AdamW, plain)]
    assert torch.equal(*on)


def test_a_step_builds_no_graph():
    weights, _, _ = trained(without_wrappers(torch.optim.AdamW), 2)
    assert not weights.requires_grad

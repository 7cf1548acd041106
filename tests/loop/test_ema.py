import torch
from torch import nn

from trainer.loop.ema import ExponentialMovingAverage
from trainer.parallel.strategy import SingleDevice


def reference(history, decay):
    """The recursion written out."""
    average = history[0]
    for n, weights in enumerate(history[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = d * average + (1 - d) * weights
    return average


def test_average_follows_the_recursion_and_restores():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = ExponentialMovingAverage(model, 0.4)
    history = [model.weight.detach().clone()]
    for _ in range(12):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        history.append(model.weight.detach().clone())
        average.update(torch.tensor(True), "train", list(model.parameters()))
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), reference(history, 0.4), rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, history[-1])


def test_state_goes_through_a_checkpoint():
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    average, restored = ExponentialMovingAverage(model, 0.9), ExponentialMovingAverage(other, 0.9)
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(1)
        average.update(torch.tensor(True), "train", list(model.parameters()))
    state = {"model": model.state_dict()}
    average.put_into(state, SingleDevice(torch.device("cpu")).full_weights)
    other.load_state_dict(state["model"])
    restored.restore(state)
    other.load_state_dict(state["training_model"])
    for m, a in ((model, average), (other, restored)):
        with torch.no_grad():
            m.weight.mul_(2)
        a.update(torch.tensor(True), "train", list(m.parameters()))
    with average.applied(), restored.applied():
        assert torch.equal(model.weight, other.weight)


def test_off_is_the_identity():
    model = nn.Linear(2, 2)
    average = ExponentialMovingAverage(model, 0)
    average.update(torch.tensor(True), "train", list(model.parameters()))
    state = {"model": model.state_dict()}
    average.put_into(state, SingleDevice(torch.device("cpu")).full_weights)
    assert list(state) == ["model"]


def test_a_phase_averages_what_it_trains_at_its_own_pace():
    model = nn.ModuleDict({"gen": nn.Linear(1, 1), "disc": nn.Linear(1, 1)})
    average = ExponentialMovingAverage(model, 0.9)
    history = {name: [part.weight.detach().clone()] for name, part in model.items()}
    for phase in ("disc", "gen", "disc", "disc", "gen"):
        with torch.no_grad():
            model[phase].weight.add_(1)
        history[phase].append(model[phase].weight.detach().clone())
        average.update(True, phase, list(model[phase].parameters()))
    with average.applied():
        for name, part in model.items():
            torch.testing.assert_close(part.weight.detach(), reference(history[name], 0.9))

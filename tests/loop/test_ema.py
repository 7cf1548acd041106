import torch
from torch import nn

from trainer.loop.ema import ExponentialMovingAverage


def reference(history, decay):
    average = history[0]
    for n, weights in enumerate(history[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = d * average + (1 - d) * weights
    return average


def test_a_phase_averages_its_own_weights_at_its_own_rate():
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

"""Gradients of several processes, summed in one piece: what some of them lack, and how parameters lie in memory."""

from functools import partial

import pytest
import torch
from torch import nn

from trainer.common.errors import UserError
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel import ddp
from trainer.parallel.ddp import Replicated
from trainer.parallel.flat_gradients import FlatGradients
from trainer.parallel.launch import launch
from trainer.parallel.process_group import ProcessGroup


def parameters():
    transposed = torch.randn(3, 4, dtype=torch.float64).T
    channels_last = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    others = [torch.randn(5), torch.randn(2, dtype=torch.complex64), torch.tensor(1.0), torch.empty(0)]
    return [torch.nn.Parameter(value) for value in (transposed, channels_last, *others)]


def with_gradients(lacking):
    params = parameters()
    for number, parameter in enumerate(params):
        parameter.grad = None if number in lacking else torch.randn_like(parameter)
    return params


def summed(*lacking):
    """The parameters of each process after the exchange, and their gradients before. lacking: by process, numbers."""
    of_processes = [with_gradients(own) for own in lacking]
    before = [[None if p.grad is None else p.grad.clone() for p in params] for params in of_processes]
    flats = [FlatGradients(params) for params in of_processes]
    sent = [[] for _ in flats]  # what each process has of each type
    for own, flat in zip(sent, flats, strict=True):
        flat.sum(lambda values, own=own: own.append(values.clone()))
    totals = [sum(parts) for parts in zip(*sent, strict=True)]
    for params, grads, flat in zip(of_processes, before, flats, strict=True):
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        waiting = iter(totals)
        flat.sum(lambda values, waiting=waiting: values.copy_(next(waiting)))
    return of_processes, before


@pytest.mark.parametrize("lacking", [[(), ()], [(0,), ()], [(0, 3, 5), (1, 3, 4)], [(0, 1, 2, 3, 4, 5), ()]], ids=str)
def test_all_have_the_sum_and_none_of_what_nobody_has(lacking):
    of_processes, before = summed(*lacking)
    for params in of_processes:
        for number, parameter in enumerate(params):
            grads = [own[number] for own in before if own[number] is not None]
            assert (parameter.grad is None) == (not grads)
            if grads:
                assert torch.equal(parameter.grad, sum(grads)) and parameter.grad.stride() == parameter.stride()


def test_a_step_leaves_nothing_to_the_next():
    params = with_gradients(())
    flat = FlatGradients(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    flat.sum(lambda values: None)
    params[0].grad = None
    flat.sum(lambda values: None)
    assert params[0].grad is None and torch.equal(params[1].grad, torch.ones_like(params[1]))


# --- DistributedDataParallel, of larger models -----------------------------------------------------------------------


class LeavesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return {"loss": self.used(x).sum()}


def steps_of_large(environment, finds_unused):
    """Exit status 0 where two steps work, 3 where the flag that helps is named."""
    ddp.OVERLAP_BYTES = 0
    group = ProcessGroup(environment, MultiDeviceFlags("ddp"), DeviceFlags("cpu"))
    strategy = Replicated(group, finds_unused=finds_unused)
    net = strategy.wrap(strategy.place(LeavesOut, lambda model: [], lambda objective: None))
    try:
        for _ in range(2):
            with strategy.gradient_sync(net, enabled=True):
                net(torch.ones(3, 2))["loss"].backward()
        return 0
    except UserError as error:
        return 3 if "a forward left out parameters" in str(error) and "--find-unused-parameters" in str(error) else 4
    finally:
        group.close()


@pytest.mark.slow
def test_a_large_model_that_leaves_out_parameters_needs_the_flag():
    assert launch(partial(steps_of_large, finds_unused=True), 2) == 0
    assert launch(partial(steps_of_large, finds_unused=False), 2) == 3

"""`FlatGradients` sums gradients over ranks, even if some are missing, and whatever their memory layout."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers.forks import call_on_ranks
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
    """Returns each process's parameters after the exchange, and gradients before. lacking: parameters without one."""
    of_processes = [with_gradients(own) for own in lacking]
    before = [[None if p.grad is None else p.grad.clone() for p in params] for params in of_processes]
    flats = [FlatGradients(params) for params in of_processes]
    sent = [[] for _ in flats]  # what each process sends, one tensor per dtype
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
def test_every_rank_has_the_sum_and_no_unused_gradient(lacking):
    of_processes, before = summed(*lacking)
    for params in of_processes:
        for number, parameter in enumerate(params):
            grads = [own[number] for own in before if own[number] is not None]
            assert (parameter.grad is None) == (not grads)
            if grads:
                assert torch.equal(parameter.grad, sum(grads)) and parameter.grad.stride() == parameter.stride()


def test_a_step_leaves_no_gradients_to_the_next():
    params = with_gradients(())
    flat = FlatGradients(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    flat.sum(lambda values: None)
    params[0].grad = None
    flat.sum(lambda values: None)
    assert params[0].grad is None and torch.equal(params[1].grad, torch.ones_like(params[1]))


# --- sparse gradients ------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Model in which the outputs of the embedding and of the linear layer share the memory of their gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.embedding = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)
        self.unseen = nn.Embedding(3, 2, sparse=True)

    def forward(self, batch):
        x, rows = batch
        hidden = self.linear(x) if rows is None else self.linear(x) + self.embedding(rows)
        return {"loss": (hidden.square() * x).sum()}


def gradients_of_rows(environment):
    """Returns 0 if two processes, of which one may see no row, have the gradients of a single process."""
    x = torch.arange(1.0, 9.0).view(4, 2)
    group = ProcessGroup(environment, MultiDeviceFlags("ddp"), DeviceFlags("cpu"))
    wrong = 0
    for bytes_that_overlap in (0, 2**20):
        for rows in ([torch.tensor([1, 3]), torch.tensor([3, 4])], [torch.tensor([1, 1]), None]):
            ddp.OVERLAP_BYTES = bytes_that_overlap
            strategy = Replicated(group)
            own = strategy.place(Rows, lambda model: [], lambda objective: None)
            net, single = strategy.wrap(own), Rows()
            batches = [*zip(x.split(2), rows, strict=True)]
            for batch in batches:
                single(batch)["loss"].backward()
            with strategy.gradient_sync(net, enabled=True):
                (net(batches[group.rank])["loss"] * strategy.gradient_divisor).backward()
            strategy.exchange([*own.parameters()])
            wrong += own.unseen.weight.grad is not None
            for parameter, expected in zip(own.parameters(), single.parameters(), strict=True):
                if expected.grad is not None:
                    same_layout = parameter.grad.layout == expected.grad.layout
                    wrong += not same_layout or not torch.allclose(parameter.grad.to_dense(), expected.grad.to_dense())
    group.close()
    return 4 if wrong else 0


@pytest.mark.slow
def test_sparse_gradients_are_summed_and_change_no_others():
    assert launch(gradients_of_rows, 2) == 0


# --- DistributedDataParallel, of larger models -----------------------------------------------------------------------


class LeavesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return {"loss": self.used(x).sum()}


def steps_of_large(environment, finds_unused):
    """Returns 0 if two steps succeed, and 3 if an error names the flag that helps."""
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
        told = "a forward pass did not use some parameters", "--find-unused-parameters"
        return 3 if all(part in str(error) for part in told) else 4
    finally:
        group.close()


def refuses_another_shape(environment):
    """Returns 0 if an error names the parameter whose shape differs on rank 1, before anything is sent."""
    group = ProcessGroup(environment, MultiDeviceFlags("ddp"), DeviceFlags("cpu"))
    strategy = Replicated(group)
    try:
        strategy.wrap(strategy.place(lambda: nn.Linear(2, 3 + group.rank), lambda model: [], lambda objective: None))
        return 4
    except UserError as error:
        expected = "weight is torch.float32 of shape (4, 2) instead of torch.float32 of shape (3, 2)"
        return 0 if expected in str(error) else 5
    finally:
        group.close()


def test_a_model_that_differs_between_ranks_is_refused(tmp_path):
    assert call_on_ranks(refuses_another_shape, 2, tmp_path) == [0, 0]


@pytest.mark.slow
def test_a_large_model_with_unused_parameters_needs_the_flag():
    assert launch(partial(steps_of_large, finds_unused=True), 2) == 0
    assert launch(partial(steps_of_large, finds_unused=False), 2) == 3

"""Strategy for `--multi-gpu ddp`, and its base class."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.tensors import empty_like, map_tensors, with_shapes_of
from trainer.common.torch_private import (
    WithoutCompiler,
    after_first_gradients,
    rebuild_buckets,
)
from trainer.failure.heartbeat import EXCHANGE
from trainer.parallel.devices import device_label
from trainer.parallel.flat_gradients import FlatGradients, sum_sparse
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.rendezvous import refuse_differences
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, sparse_parameters

T = TypeVar("T")

OVERLAP_BYTES = 4 * 2**20
"""Total parameter size in bytes above which gradients are all-reduced during the backward pass; see docs/design.md."""


class OverlappingExchange(WithoutCompiler, nn.parallel.DistributedDataParallel):
    """DistributedDataParallel that calls `before_exchange` before a step's last backward pass waits for other ranks."""

    before_exchange: Callable[[], None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if self.require_backward_grad_sync and outputs["loss"].requires_grad:
            # Queue the call before PyTorch's own callback, which waits for the last gradients.
            outputs["loss"].register_hook(lambda _: after_first_gradients(self.before_exchange))
        return outputs


class Distributed(Strategy):
    """Base class of strategies with one process per device; all processes start from rank 0's state.

    name: name of the strategy in messages.
    """

    name: str
    group: ProcessGroup

    def describe(self) -> str:
        num_hosts = len(set(self.group.hosts))
        places = f" on {num_hosts} hosts" if num_hosts > 1 else ""
        labels = self.group.all_gather_object(device_label(self.device))
        kinds = f"{len(labels)} x {labels[0]}" if len(set(labels)) == 1 else ", ".join(labels)
        return f"{self.name} over {self.group.backend}{places}: {kinds}"

    @torch.no_grad()
    def sync_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        # NCCL does not support sparse tensors, and gloo corrupts them.
        dense = {name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided}
        self._refuse_others(dense)
        self.group.activity.enter(EXCHANGE)
        for tensor in dense.values():
            whole = tensor.contiguous()
            _broadcast(whole)
            if whole is not tensor:
                tensor.copy_(whole)

    def _refuse_others(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises UserError on all ranks if tensors differ between ranks in name, shape or dtype; gloo would crash."""
        own = {name: f"{tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}
        if self.group.agrees(own):
            return
        every = self.group.all_gather_object(own)
        names = {name: None for kinds in every for name in kinds}
        advice = "build the same model on all ranks, or register a buffer that may differ with persistent=False"
        refuse_differences([{name: kinds.get(name, "missing") for name in names} for kinds in every], advice)

    def broadcast(self, value: Tensor) -> Tensor:
        self.group.activity.enter(EXCHANGE)
        whole = value.to(self.device).contiguous() if self.group.is_main else empty_like(value, self.device)
        _broadcast(whole)
        return whole

    def load_on_main(self, function: Callable[[], T], large: Collection[str]) -> T:
        loaded: list[T] = []

        def load() -> T:
            loaded.append(function())
            return with_shapes_of(large, loaded[0])

        outlined = self.group.on_main(load)
        return loaded[0] if self.group.is_main else outlined

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        own = model.state_dict()
        for name, value in weights.items():
            own[name].copy_(self._own_part(self.broadcast(value), own[name]))
        model.load_state_dict(own)  # runs hooks that derive other state from the loaded state

    def _own_part(self, whole: Tensor, own: Tensor) -> Tensor:
        """Returns this process's shard of a full tensor. own: the current shard."""
        return whole

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # All processes already have the scalars, such as step counts.
        return map_tensors(state, lambda value: self.broadcast(value) if value.dim() else value)


class Replicated(Distributed):
    """Strategy that keeps the whole model in every process and sums gradients over processes.

    The gradients of a small model are summed after a step's last backward pass, in one flat buffer per dtype
    (`FlatGradients`), or with `--parts` in a binary tree. For a larger model without `--parts`, DistributedDataParallel
    averages gradients over processes during the pass. Sparse gradients are always summed after the pass, because until
    then they may share memory with a gradient that the pass still uses.

    sync_bn: whether batch norms compute statistics over the samples of all processes. finds_unused: whether a forward
    pass may leave parameters unused; otherwise DistributedDataParallel waits for the gradients of all parameters.
    """

    name = "DistributedDataParallel"

    def __init__(
        self, group: ProcessGroup, num_parts: int = 0, sync_bn: bool = False, finds_unused: bool = False
    ) -> None:
        super().__init__(group, num_parts)
        self._sync_bn, self._finds_unused = sync_bn, finds_unused
        self._sparse: set[Tensor] = set()
        self._flat: dict[tuple[int, ...], FlatGradients] = {}

    def place(
        self,
        build: Callable[[], Objective],
        blocks: Callable[[nn.Module], Sequence[nn.Module]],
        complete: Callable[[Objective], None],
    ) -> Objective:
        objective = super().place(build, blocks, complete)
        self._sparse = {p for p in sparse_parameters(objective) if p.requires_grad}
        if self._sparse and self.group.backend == "nccl":
            raise UserError(
                "--backend nccl: does not support sparse gradients (nn.Embedding(sparse=True)); use "
                "--backend gloo, or build those embeddings without sparse=True"
            )
        num_bytes = sum(p.nbytes for p in objective.parameters() if p not in self._sparse)
        self.overlaps = num_bytes > OVERLAP_BYTES and not self.num_parts
        self.gradient_divisor = self.group.world_size if self.overlaps else 1
        return objective

    def wrap(self, net: nn.Module) -> nn.Module:
        if self._sync_bn:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        self.sync_tensors(dict(chain(net.named_parameters(), net.named_buffers())))
        sparse = [p for p in net.parameters() if p in self._sparse and p.requires_grad]
        if not self.overlaps or all(p in self._sparse for p in net.parameters() if p.requires_grad):
            return net
        for parameter in sparse:  # DistributedDataParallel ignores parameters that require no gradient
            parameter.requires_grad_(False)
        wrapped = OverlappingExchange(
            net,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
            init_sync=False,
        )
        wrapped.broadcast_buffers = False  # True fails for some dtypes; evaluations and saves broadcast the buffers
        for parameter in sparse:
            parameter.requires_grad_(True)
        wrapped.before_exchange = self.group.activity.wait_for_others
        return wrapped

    def build_buckets(self, net: nn.Module) -> None:
        # Otherwise the next forward pass would rebuild the buckets, and might wait for a rank that ran out of memory.
        if isinstance(net, OverlappingExchange):
            with _naming_left_out():
                rebuild_buckets(net)

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(net, OverlappingExchange):
            return nullcontext()
        return _naming_left_out() if enabled else net.no_sync()

    def exchange(self, params: Sequence[Tensor]) -> None:
        if self.overlaps and not self._sparse:
            return
        self.group.activity.enter(EXCHANGE)
        for parameter in params if self._sparse else ():
            if parameter in self._sparse:
                sum_sparse(parameter, self.group.sum_gradients, self.gradient_divisor)
        if self.overlaps:
            return
        self.flat_gradients(params).sum(self.group.sum_in_tree if self.num_parts else self.group.sum_gradients)

    def flat_gradients(self, params: Sequence[Tensor]) -> FlatGradients:
        key = tuple(map(id, params))
        if key not in self._flat:
            self._flat[key] = FlatGradients([p for p in params if p not in self._sparse])
        return self._flat[key]


def _broadcast(values: Tensor) -> None:
    """Broadcasts rank 0's contiguous tensor in place, as bytes, because gloo does not support all dtypes."""
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), src=0)


@contextmanager
def _naming_left_out() -> Iterator[None]:
    """Context that converts DistributedDataParallel's error about unused parameters to UserError."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            raise
        raise UserError(
            "--multi-gpu ddp: a forward pass did not use some parameters, but DDP waits for their gradients; add "
            "--find-unused-parameters"
        ) from None

"""Trains with `torch.distributed.fsdp.fully_shard`, which shards parameters, gradients and optimizer states.

Each block in `Task.blocks` is sharded as a unit; the other parameters form the root unit. A unit's parameters are
gathered only for its forward and backward pass, so that few units are gathered at a time. After the backward pass, its
gradients are reduce-scattered. Other modules import this module lazily, because the import takes seconds.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.jit import RecursiveScriptModule

from trainer.common.errors import UserError
from trainer.common.tensors import map_tensors
from trainer.common.torch_private import TorchDispatchMode, has_hooks, make_outermost, set_timeout, tree_flatten
from trainer.failure.heartbeat import EXCHANGE
from trainer.parallel.ddp import Distributed
from trainer.parallel.left_out import LeftOut
from trainer.parallel.process_group import ProcessGroup
from trainer.task import Objective, sparse_parameters

T = TypeVar("T")


class Sharded(Distributed):
    """Strategy that shards every parameter as a DTensor along its first dimension, with one process per device.

    Collectives use the dtype of the parameters, because mixed precision is left to autocast, as in other strategies.

    shard_size: number of processes that share one copy of the model, by default all; a divisor of the number of
    processes. reshards: whether to free a block's gathered parameters between its forward and backward pass.
    """

    name = "Fully sharded"
    exchanges_in_forward = True
    has_full_state = False

    def __init__(self, group: ProcessGroup, shard_size: int | None, reshards: bool) -> None:
        super().__init__(group)
        self.gradient_divisor = group.world_size
        self.shard_size = shard_size or group.world_size
        num_copies = group.world_size // self.shard_size
        shape = (self.shard_size,) if num_copies == 1 else (num_copies, self.shard_size)
        names = ("replicate", "shard")[-len(shape) :]
        self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for each in self._mesh.get_all_groups():  # these groups do not inherit the default group's timeout
            set_timeout(each, self.device, timedelta(seconds=group.device_timeout_s))
        self._is_whole, self._reshards = False, reshards

    def describe(self) -> str:
        copies = self.group.world_size // self.shard_size
        models = f"{copies} copies of the model, each" if copies > 1 else "the model"
        return f"{super().describe()}, {models} in {self.shard_size} shard(s)"

    # --- the model ---------------------------------------------------------------------------------------------------

    def place(
        self,
        build: Callable[[], Objective],
        blocks: Callable[[nn.Module], Sequence[nn.Module]],
        complete: Callable[[Objective], None],
    ) -> Objective:
        """Builds the model in rank 0's host memory, and on other ranks on the meta device if possible.

        Broadcasts and shards the units one by one, so that no device holds the full model.
        """
        objective = self._built(build, complete)
        its_blocks = list(blocks(objective.model))
        # Check here and not in `complete`, which runs only on rank 0.
        self.group.together(lambda: refuse_what_cannot_be_cut(objective, its_blocks))
        objective.call_equally()
        for helper in objective.helpers.values():  # helpers are replicated, not sharded
            self._send(helper, nn.Module.named_parameters)
            self._send(helper, nn.Module.named_buffers)
        for unit in [*its_blocks, objective]:
            self._send(unit, nn.Module.named_parameters)
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=self._frees(unit, objective))
        self._send(objective, nn.Module.named_buffers)
        # Otherwise the unit that runs first would become the root, for example in `Objective.start_evaluation`.
        make_outermost(objective)
        objective.register_forward_hook(self._free_after_evaluation)
        self._left_out = LeftOut(objective, its_blocks)
        return objective

    def _frees(self, unit: object, objective: object) -> bool:
        """Returns whether a unit's parameters are freed after its forward pass; the root keeps its parameters."""
        return self._reshards and unit is not objective

    def _built(self, build: Callable[[], Objective], complete: Callable[[Objective], None]) -> Objective:
        built: list[Objective] = []

        def build_whole() -> list[tuple[str, torch.Size, torch.dtype]]:
            built.append(build())
            complete(built[0])
            return meta_state_of(built[0])

        outline = self.group.on_main(build_whole)
        return built[0] if self.group.is_main else built_as_outline(build, outline)

    def _send(self, unit: nn.Module, tensors_of: Callable[..., Iterable[tuple[str, Tensor]]]) -> None:
        """Broadcasts a unit's parameters or buffers from rank 0, except parameters that are already sharded.

        tensors_of: `nn.Module.named_parameters` or `nn.Module.named_buffers`.
        """
        sent: dict[Tensor, Tensor] = {}  # tied tensors stay tied
        for module in unit.modules():
            for name, own in tensors_of(module, recurse=False, remove_duplicate=False):
                if isinstance(own, DTensor):
                    continue
                if own not in sent:
                    whole = self.broadcast(own.detach())
                    sent[own] = nn.Parameter(whole, own.requires_grad) if isinstance(own, nn.Parameter) else whole
                setattr(module, name, sent[own])

    def build_buckets(self, net: nn.Module) -> None:
        """Forgets which parameters had gradients in the trial backward pass; FSDP has no buckets to build."""
        self._left_out.forget()

    def _free_after_evaluation(self, objective: nn.Module, *_: object) -> None:
        """Reshards after a forward pass without gradients; an unsharded root would miss the next weight updates."""
        if not torch.is_grad_enabled() and not self._is_whole:
            for unit in _units(objective):
                unit.reshard()

    @contextmanager
    def unsharded(self, objective: Objective) -> Iterator[None]:
        self.group.activity.enter(EXCHANGE)
        self._is_whole = True
        units = _units(objective)
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            self._is_whole = False
            for unit in units:
                unit.reshard()
                unit.set_reshard_after_forward(self._frees(unit, objective), recurse=False)

    # --- what a step needs -------------------------------------------------------------------------------------------

    def exchange(self, params: Sequence[Tensor]) -> None:
        """Removes gradients of parameters that no process used. Backward passes have already reduced all gradients."""
        self._left_out.agree(params, self.group)

    def global_norm(self, own: Tensor) -> Tensor:
        norms = [torch.empty_like(own) for _ in range(self.shard_size)]
        dist.all_gather(norms, own, group=self._mesh.get_group(self._mesh.ndim - 1))
        return torch.linalg.vector_norm(torch.stack(norms))

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if any(kind.__name__ == "Muon" for each in optimizers for kind in type(each).__mro__):
            raise UserError(
                "--multi-gpu fsdp: Muon orthogonalises whole matrices, but a process holds only shards; use "
                "--multi-gpu ddp or another optimizer"
            )
        for each in optimizers:
            kept = [name for name, value in each.state_dict().items() if isinstance(value, dict) and name != "state"]
            if kept:
                raise UserError(
                    f"--multi-gpu fsdp: {type(each).__name__} keeps {kept[0]!r} outside 'state', but "
                    "only 'state' can be sharded like the parameters; use --multi-gpu ddp or another optimizer"
                )
        hooked = [p for each in optimizers for group in each.param_groups for p in group["params"] if has_hooks(p)]
        if hooked:
            raise UserError(_hooked(f"a parameter of shape {tuple(hooked[0].shape)}"))

    # --- saving and restoring ----------------------------------------------------------------------------------------

    def full_tensor(self, value: Tensor) -> Tensor:
        """Copies a full tensor to rank 0's host memory; devices hold only one unsharded tensor at a time."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.to("cpu", copy=True) if self.group.is_main else value

    def _own_part(self, whole: Tensor, own: Tensor) -> Tensor:
        return _part_like(whole, own) if isinstance(own, DTensor) else whole

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_number = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        moments = {
            number: map_tensors(kept, partial(self._own_moment, parameter=of_number[number]))
            if number in of_number
            else kept
            for number, kept in state.get("state", {}).items()
        }
        return state | ({"state": moments} if "state" in state else {})

    def _own_moment(self, value: Tensor, parameter: Tensor) -> Tensor:
        if value.dim() == 0:  # all processes have the scalars, such as step counts
            return value
        whole = self.broadcast(value)
        if value.shape == parameter.shape and isinstance(parameter, DTensor):
            return _part_like(whole, parameter)
        return DTensor.from_local(whole, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


def _units(objective: nn.Module) -> list[FSDPModule]:
    return [module for module in objective.modules() if isinstance(module, FSDPModule)]


def refuse_what_cannot_be_cut(objective: Objective, blocks: Sequence[nn.Module]) -> None:
    """Raises UserError if the objective's model cannot be sharded with these blocks."""
    if any(p.requires_grad for p in sparse_parameters(objective)):
        raise UserError(
            "--multi-gpu fsdp: does not support sparse gradients (nn.Embedding(sparse=True)); use --multi-gpu "
            "ddp, or build those embeddings without sparse=True"
        )
    unit_of = {module: number for number, block in enumerate(blocks, 1) for module in block.modules()}
    found: dict[Tensor, dict[str, int]] = {}
    for path, module in objective.model.named_modules():
        if isinstance(module, RecursiveScriptModule):
            raise UserError(
                f"--multi-gpu fsdp: {path or 'the model'} is made by torch.jit.script, which does not support fsdp's "
                "hooks; do not script it, or use --multi-gpu ddp"
            )
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            label = f"{path}.{name}".lstrip(".")
            if parameter.dim() == 0 or (parameter.requires_grad and not parameter.numel()):
                what = "has no elements" if parameter.dim() else "is a scalar"
                raise UserError(f"--multi-gpu fsdp: {label} {what} and cannot be sharded; give it the shape (1,)")
            if has_hooks(parameter):
                raise UserError(_hooked(label))
            found.setdefault(parameter, {})[label] = unit_of.get(module, 0)
    split = [names for names in found.values() if len(set(names.values())) > 1]
    if split:
        raise UserError(
            f"--multi-gpu fsdp: {' and '.join(split[0])} are tied, but a block of Task.blocks contains only one of "
            "these parameters; leave the block out of Task.blocks, or do not tie them"
        )
    of_kind: dict[tuple[int, bool], str] = {}  # the first complex and the first real parameter of each unit
    for parameter, names in found.items():
        label, unit = next(iter(names.items()))
        of_kind.setdefault((unit, parameter.is_complex()), label)
        if (unit, not parameter.is_complex()) in of_kind and parameter.requires_grad:
            pair = " and ".join(of_kind[unit, is_complex] for is_complex in (True, False))
            raise UserError(
                f"--multi-gpu fsdp: {pair} are sharded together, but only the first is complex; store it as "
                "pairs of real numbers, apply torch.view_as_complex to them in the forward pass, or use --multi-gpu ddp"
            )


def _hooked(label: str) -> str:
    return (
        f"--multi-gpu fsdp: {label} has a gradient hook, which fsdp never calls because the backward pass uses a "
        "gathered copy of the parameter; register it in each forward pass, or use --multi-gpu ddp"
    )


def meta_state_of(objective: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Returns (name, shape, dtype) of every parameter and buffer."""
    params = objective.named_parameters(remove_duplicate=False)
    buffers = objective.named_buffers(remove_duplicate=False)
    return [(name, value.shape, value.dtype) for name, value in [*params, *buffers]]


def built_as_outline(build: Callable[[], Objective], outline: object) -> Objective:
    """Builds an objective on the meta device if possible, and otherwise on the CPU.

    outline: result of `meta_state_of` for rank 0's objective.
    """
    try:
        with torch.device("meta"), _Made() as made:
            objective = build()
        # Other tensors must not be on the meta device, because only parameters and buffers are broadcast.
        sent = {*map(id, objective.parameters()), *map(id, objective.buffers())}
        if meta_state_of(objective) == outline and all(id(value) in sent for value in made.without_content()):
            return objective
    except Exception:  # the task reads values, which meta tensors do not have
        pass
    return build()


class _Made(TorchDispatchMode):
    """Tracks every tensor created in this mode, including tensors that no module contains."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made.extend(weakref.ref(leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
        return result

    def without_content(self) -> list[Tensor]:
        """Returns the tracked tensors that are on the meta device and still alive."""
        alive = (made() for made in self._made)
        return [value for value in alive if value is not None and value.is_meta]


def _part_like(whole: Tensor, own: DTensor) -> DTensor:
    """Shards a full tensor with the placements of `own`, a DTensor of the same shape."""
    mesh = own.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=own.placements)

"""Implements `Group` with torch.distributed."""

import faulthandler
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import reduce
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.common.errors import UserError, reason
from trainer.common.process import within
from trainer.common.torch_private import num_exchanges
from trainer.failure.diagnosis import GroupDiagnosis
from trainer.failure.errors import EXIT_BAD_INPUT, Failure, exit_at_once, print_error
from trainer.failure.heartbeat import EXCHANGE, HeartbeatMonitor, Neighbours, process_space
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel.devices import cores_per_rank, usable_cores, usable_gpus
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.group import Group, result_or_refusal
from trainer.parallel.rendezvous import ALIKE, join

T = TypeVar("T")

CLOSE_WITHIN_S = 5.0
MAIN_LEAVES_WITHIN_S = 20.0
"""Seconds for which other ranks wait for rank 0 to exit after a failure, less than torchrun's timeout of 30 s."""

MEETING_MARGIN_S = 3.0
"""Seconds to wait beyond PyTorch's own timeout, so that PyTorch can raise its error, which names the cause."""

NCCL_PATIENCE, NCCL_MARGIN_S = 2, 60.0
"""Factor and addend that convert `--dist-timeout-s` to the timeout of NCCL's collectives."""

Member = tuple[str, int, str, set[int]]
"""Host name, process id, PID namespace, and usable cores of a process."""

DIRECT_BYTES = 3 * 2**18
"""Maximum number of bytes that a process sends to all others directly, not in a ring (benchmarks/exchange.py)."""


class ProcessGroup(Group):
    """Group of several processes with one device each. Collectives between devices use `backend`; others use gloo.

    backend: "gloo" or "nccl". hosts: host name of each rank.
    """

    is_launched = True
    diagnosis: GroupDiagnosis

    def __init__(
        self,
        environment: RankEnvironment,
        flags: MultiDeviceFlags,
        devices: DeviceFlags,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Joins the other processes and selects this process's device.

        facts: plain values by name, such as flags, that must be equal on all processes. Raises UserError on all
        processes if facts differ, and Failure if a process does not join.
        """
        super().__init__()
        self.rank, self.world_size = environment.rank, environment.world_size
        self.exits_with_signal = environment.is_self_launched
        self._timeout_s = flags.dist_timeout_s
        self._tells_user = environment.tells_user
        if dist.is_initialized():
            raise UserError(
                "torch.distributed is already initialised; call torch.distributed.destroy_process_group() first"
            )
        if environment.world_size % (flags.shard_size or 1):
            with self._told_once():
                raise UserError(
                    f"--shard-size {flags.shard_size}: must evenly divide the number of processes "
                    f"({environment.world_size})"
                )
        gpus = usable_gpus(devices.device, flags.gpu_ids)
        self.backend = flags.backend or ("nccl" if gpus else "gloo")
        rank = environment.rank
        with ExitStack() as on_failure:
            on_failure.callback(_leave_group)
            store, members = self._meet(environment, f"cpu:gloo,cuda:{self.backend}" if gpus else "gloo")
            with self._told_once():
                self.require_same(facts, ALIKE)
            self.hosts = [host for host, *_ in members]
            same_host = [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]
            self.num_cores = cores_per_rank([members[other][3] for other in same_host])
            self.local_world_size = environment.local_world_size or len(same_host)
            if not environment.is_self_launched:
                self.num_idle_gpus = max(0, len(gpus) - len(same_host))
            local_rank = same_host.index(rank) if environment.local_rank is None else environment.local_rank
            with self._told_once(), self._failing_in_start_up():
                self.use([self.together(lambda: _rank_device(local_rank, gpus))])
            on_failure.pop_all()
        names = [f"process {process} on {host}" for host, process, *_ in members]
        own_space = members[rank][2]
        self._neighbours = Neighbours(
            {
                other: process
                for other, (_, process, space, _) in enumerate(members)
                if space == own_space and other != rank
            }
        )
        monitor = HeartbeatMonitor(store, self.rank, self.world_size, self.activity, self._neighbours)
        reports_lost_store = local_rank == 0 or rank == 1
        self.diagnosis = GroupDiagnosis(self.activity, monitor, rank, names, flags.dist_timeout_s, reports_lost_store)
        monitor.on_beat, monitor.on_loss = self.diagnosis.consider_others, self.diagnosis.consider_loss
        faulthandler.enable(file=2)  # prints the stack of a hanging process when another process kills it

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        """Context that converts a UserError raised by all processes to Failure, except on processes that print it."""
        try:
            yield
        except UserError as error:
            raise error if self._tells_user else Failure(str(error), EXIT_BAD_INPUT) from None

    def check_devices(self) -> None:
        if self.backend != "nccl":
            return
        with self._failing_in_start_up():
            gpus = self.all_gather_object(str(torch.cuda.get_device_properties(self.device).uuid))
        sharing = first_sharing_ranks([*zip(self.hosts, gpus, strict=True)])
        if sharing:  # a collective of NCCL would fail without naming the cause
            raise UserError(
                f"--backend nccl: needs one process per GPU, but ranks {' and '.join(map(str, sharing))} share a GPU "
                f"on {self.hosts[sharing[0]]}; start fewer processes there (--nproc, --nproc_per_node), or use "
                "--backend gloo"
            )

    @contextmanager
    def _failing_in_start_up(self) -> Iterator[None]:
        """Context for the first use of the device: prints errors of the device and raises Failure."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # an error of CUDA, or of a collective after another process failed
            problem = f"rank {self.rank} of {self.world_size} failed in start-up: {reason(error)}"
            print_error(problem)
            raise Failure(problem) from None

    def _meet(self, environment: RankEnvironment, backend: str) -> tuple[dist.Store, list[Member]]:
        """Joins the other processes. Prints an error and raises Failure on every process if some do not join."""
        rank, world_size, timeout_s = self.rank, self.world_size, self._timeout_s

        def meet() -> tuple[dist.Store, list[Member]]:
            store = join(environment, timeout_s)
            timeout, limit = timedelta(seconds=timeout_s), timedelta(seconds=self.device_timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            # Separate groups, so that a step's small all-reduce never waits for gradients or for work on rank 0.
            self._host_group = dist.new_group(backend="gloo", timeout=timeout)
            self._step_group = dist.new_group(backend="gloo", timeout=timeout)
            return store, self.all_gather_object(
                (socket.gethostname(), os.getpid(), process_space(), set(usable_cores()))
            )

        try:
            met = within(timeout_s + MEETING_MARGIN_S, meet)
            if met is None:
                raise RuntimeError("no answer")
            return met
        except RuntimeError as error:  # a DistError, or an error of gloo or a file store
            problem = (
                f"rank {rank} of {world_size} could not join the other ranks at {environment.meeting_place} within "
                f"--dist-timeout-s {timeout_s:g}: {reason(error)}"
            )
            print_error(problem)
            raise Failure(problem) from None

    @property
    def device_timeout_s(self) -> float:
        """Timeout of collectives between devices, in seconds.

        After its timeout NCCL aborts a process without naming the cause, so collectives on the host time out earlier.
        """
        if self.backend != "nccl":
            return self._timeout_s
        return NCCL_PATIENCE * self._timeout_s + NCCL_MARGIN_S

    def sum(self, values: Tensor) -> Tensor:
        self.activity.enter(EXCHANGE)
        values = values.clone()
        dist.all_reduce(values, group=self._step_group)
        return values

    @property
    def num_exchanges(self) -> int:
        return num_exchanges(dist.group.WORLD)

    def start_sum(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self._step_group, async_op=True)

        def wait() -> Sequence[float]:
            self.activity.enter(EXCHANGE)
            work.wait()
            return tensor.tolist()

        return wait

    def barrier(self) -> None:
        # Otherwise only the device would wait, until NCCL's watchdog aborts the process without naming the cause.
        if self.backend == "nccl":
            self.activity.enter(EXCHANGE)
            dist.barrier(group=self._step_group)

    def start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        work = dist.all_reduce(values, async_op=True)

        def wait() -> None:
            self.activity.enter(EXCHANGE)
            work.wait()

        return wait

    def sum_gradients(self, values: Tensor) -> None:
        """Sums a device tensor over processes in place; the result is bitwise equal on every process.

        On a GPU the host does not wait for the sum, unless the tensor is sparse. A process sends a small CPU tensor
        directly to all others, with the latency of one message instead of the 2 (world_size - 1) of a ring.
        """
        if values.is_cpu and not values.is_sparse and self._is_small(values):
            values.copy_(reduce(torch.add, self._swapped([values] * self.world_size)))
        else:
            dist.all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        self.activity.enter(EXCHANGE)
        found = values.new_empty(self.world_size, *values.shape)
        dist.all_gather([*found], values)
        return found

    def sum_in_tree(self, values: Tensor) -> None:
        self.activity.enter(EXCHANGE)
        if self.backend == "gloo" and not values.is_cpu:  # gloo sends point-to-point from host memory only
            sum_of_neighbours(self.all_gather(values), out=values)
        elif self._is_small(values):
            sum_of_neighbours(self._swapped([values] * self.world_size), out=values)
        else:  # each process sums one slice, and sends no more bytes than in a ring
            slices = values.tensor_split(self.world_size)
            own = slices[self.rank]
            sum_of_neighbours(self._swapped(slices), out=own)
            self._swapped([own] * self.world_size, slices)

    def _is_small(self, values: Tensor) -> bool:
        return values.nbytes * (self.world_size - 1) <= DIRECT_BYTES

    def _swapped(self, sent: Sequence[Tensor], into: Sequence[Tensor] = ()) -> list[Tensor]:
        """Sends one tensor to each rank; returns the tensors that this rank received, ordered by sender.

        sent: one tensor for each rank. into: receive buffers; by default new tensors.
        """
        own = sent[self.rank]
        found = [*into] or [torch.empty_like(own) for _ in sent]
        found[self.rank] = own
        others = [other for other in range(self.world_size) if other != self.rank]
        ops = [dist.P2POp(dist.isend, sent[other], other) for other in others]
        ops += [dist.P2POp(dist.irecv, found[other], other) for other in others]
        limit = [timedelta(seconds=self._timeout_s)] if sent[0].is_cpu else []  # on a GPU a limit blocks the host
        for work in dist.batch_isend_irecv(ops) if ops else ():  # a single process has no peers
            work.wait(*limit)
        return found

    def all_gather_object(self, value: T) -> list[T]:
        self.activity.enter(EXCHANGE)
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def gather_object(self, value: T) -> list[T]:
        self.activity.enter(EXCHANGE)
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._host_group)
        return values or []

    def on_main(self, function: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        if self.is_main:
            self.diagnosis.monitor.may_force_end = False
            answer[:] = result_or_refusal(function)
            self.diagnosis.monitor.may_force_end = True
        self.activity.enter(EXCHANGE if self.is_main else "waiting for rank 0")
        dist.broadcast_object_list(answer, src=0, group=self._host_group)
        result, refusal = answer
        if refusal is not None:
            raise refusal
        return result

    def can_replace_rank0(self, lost: Sequence[int], has_state: bool) -> bool:
        for rank in lost:
            self._neighbours.end(rank)
        # The process that failed first must not wait: rank 0 may wait until that process closes its connections.
        may_wait = has_state and not self.diagnosis.failed_itself
        return self.is_main or (may_wait and self._neighbours.await_end(0, MAIN_LEAVES_WITHIN_S))

    def close(self) -> None:
        self.diagnosis.monitor.close()
        self._neighbours.close()
        status = self.diagnosis.exit_status
        if status is None:
            with suppress(RuntimeError):
                # This process may host the store, and so must not exit before all processes are done.
                dist.barrier(group=self._host_group)
            dist.destroy_process_group()
            # Dropping the last references ends the groups' threads, which would abort the process if they freed a
            # tensor while the interpreter shuts down.
            del self._host_group, self._step_group
            return
        # With unfinished collectives on a GPU, destroying the group or exiting the interpreter may never return.
        closing = threading.Thread(target=dist.destroy_process_group, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)
        if closing.is_alive():
            exit_at_once(status)


def sum_of_neighbours(values: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
    """Sums tensors in a binary tree: neighbours, then neighbouring pairs, and so on.

    values: a power-of-two number of tensors. out: receives the sum of two or more values; may be one of the values.
    """
    while len(values) > 2:
        values = [one + other for one, other in zip(values[::2], values[1::2], strict=True)]
    return torch.add(*values, out=out) if len(values) == 2 else values[0]


def first_sharing_ranks(gpus: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the ranks that share the first shared GPU, or [] if no GPU is shared. gpus: (host, GPU id) by rank."""
    ranks = [[rank for rank, other in enumerate(gpus) if other == gpu] for gpu in gpus]
    return next((sharing for sharing in ranks if len(sharing) > 1), [])


def _leave_group() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):
            within(CLOSE_WITHIN_S, dist.destroy_process_group)


def available_backends() -> list[str]:
    """Returns which of "gloo" and "nccl" this build of PyTorch supports."""
    return [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]


def _rank_device(local_rank: int, gpus: Sequence[int]) -> torch.device:
    """Returns GPU gpus[local_rank]; if there is just one GPU, gpus[0]; if there is none, the CPU."""
    if not gpus:
        return torch.device("cpu")
    index = local_rank if len(gpus) > 1 else 0
    if index >= len(gpus):
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {len(gpus)} usable GPUs ({gpus}); start fewer "
            "processes per machine, or choose other GPUs with --gpu-ids or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", gpus[index])

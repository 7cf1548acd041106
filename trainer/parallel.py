"""One device, DataParallel or DistributedDataParallel, behind one interface.

This is the only file that talks to other processes.
"""

import hashlib
import inspect
import os
import re
import socket
import struct
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.errors import BadInput
from data.loading import Batch
from trainer.blame import Break, blame, blame_store_host
from trainer.bulletin import Bulletin, LastWords, Note, StoreLost
from trainer.failure import EXIT_AGAIN, EXIT_BAD_INPUT, EXIT_FAILED, Failure, StartAgain, reason, tell
from trainer.ranks import DeviceFlags, MultiDeviceFlags, RankEnvironment, torchrun_agent
from trainer.task import Objective, Sums
from trainer.whereabouts import Whereabouts

T = TypeVar("T")

EXCHANGE = "the exchange with the other ranks"
CLOSE_WITHIN_S = 5.0

# Buffers are agreed before evaluating and saving, not in every forward; newer releases renamed the option.
_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


class PendingSum:
    """A sum over processes under way; for one process it is there at once."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def wait(self) -> Sequence[float]:
        """The sums."""
        return self._values


class _PendingAllReduce(PendingSum):
    def __init__(self, values: Sequence[float], group: dist.ProcessGroup, whereabouts: Whereabouts) -> None:
        self._tensor = torch.tensor(values, dtype=torch.float64)
        self._work = dist.all_reduce(self._tensor, group=group, async_op=True)
        self._whereabouts = whereabouts

    def wait(self) -> Sequence[float]:
        self._whereabouts.enter(EXCHANGE)
        self._work.wait()
        return self._tensor.tolist()


class Parallel(ABC):
    """How the run is spread over devices. Everything outside sees only this interface.

    shard: (rank, world_size) of this process, for splitting data. num_replicas: devices that this process feeds.
    gradient_divisor: what the wrapper divides summed gradients by. local_world_size: processes of this run on this
    machine. redoes_steps: whether this process can try a step again by itself. whereabouts: where this process is; the
    loop says so.
    """

    device: torch.device
    num_replicas: int = 1
    shard: tuple[int, int] = (0, 1)
    gradient_divisor: int = 1
    local_world_size: int = 1
    redoes_steps: bool = True

    def __init__(self) -> None:
        self.whereabouts = Whereabouts()

    @cached_property
    def agents(self) -> list[str]:
        """The torchrun agents that started this run's processes; none without torchrun. All processes ask for them."""
        return sorted({agent for agent in self._gather(torchrun_agent()) if agent is not None})

    def _gather(self, value: T) -> list[T]:
        """The value of every process."""
        return [value]

    @property
    def is_main(self) -> bool:
        return self.shard[0] == 0

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.shard[1]

    @abstractmethod
    def describe(self) -> str:
        """The devices, in a few words."""

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        """The module that training calls. `example` is a batch whose samples do not count."""
        return net

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        """The module that evaluation calls: without gradient hooks, but on all devices of this process."""
        return net

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this backward adds up gradients over processes."""
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes of a CPU tensor; the same bits on every process."""
        return values

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        """The same for a few numbers, without waiting."""
        return PendingSum(values)

    def sum_in_place(self, values: Tensor) -> None:
        """Sum over processes of a tensor on this process's device, carried by what carries gradients."""

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls the function on the main process alone; its result, or its BadInput, reaches every process."""
        return function()

    def sync_buffers(self, objective: nn.Module) -> None:
        """Gives every process the buffers (running statistics) of the main one, before evaluating and saving."""

    def together(self, function: Callable[[], T]) -> T:
        """Calls the function on every process. If any of them raises BadInput, all raise what was said."""
        return function()

    def seed_dropout(self, *key: int) -> None:
        """Makes what follows on the devices' generators a function of the key and of this process."""
        packed = struct.pack(f"<{len(key) + 1}q", *key, self.shard[0])
        seed = int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little")
        self._seed_generators(seed)

    def _seed_generators(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def full_state(self, objective: Objective, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
        """Weights and moments, whole and without any wrapper's prefix."""
        return {
            "model": objective.model.state_dict(),
            "optimizers": {phase: optimizer.state_dict() for phase, optimizer in optimizers.items()},
        }

    def load_full_state(
        self, state: Mapping[str, Any], objective: Objective, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        objective.model.load_state_dict(state["model"])
        for phase, optimizer in optimizers.items():
            # Moments come from the checkpoint, but weight decay and the like from this command line.
            options = [
                {k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(state["optimizers"][phase])
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)

    def expect_promptness(self) -> None:
        """After every step: from the first one on the others are waited for no longer than `--hang-timeout-s`."""

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whatever goes wrong within it is explained to the user, on one process, and ends all of them.

        A BadInput leaves it as it is: on the main process also the one of another. Every other exception becomes a
        Failure.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from None

    def explain(self, error: BaseException) -> BaseException:
        """What to raise instead of an exception, once the user knows of it; see `explaining`."""
        if isinstance(error, BadInput | Failure) or not isinstance(error, Exception):
            return error
        message = f"failed in {self.whereabouts}: {reason(error)}"
        tell(message, error)
        return Failure(message)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        """record: called if another process has failed and this one is stuck, just before it is ended."""

    def close(self) -> None:
        """Leaves the group of processes."""


class SingleDevice(Parallel):
    """The identity."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def describe(self) -> str:
        return _device_label(self.device)


class ForReplicas(nn.Module):
    """Gives every sum a leading dimension, along which DataParallel gathers its replicas."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return {name: value.unsqueeze(0) for name, value in self.net(batch, phase).items()}


class SumOverReplicas(nn.Module):
    """Adds up what DataParallel gathered."""

    def __init__(self, replicas: nn.Module) -> None:
        super().__init__()
        self.replicas = replicas

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        return {name: values.sum(0) for name, values in self.replicas(batch, phase).items()}


class DataParallel(Parallel):
    """One process that splits every micro-batch over several GPUs."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.device = self.devices[0]
        self.num_replicas = len(self.devices)

    def describe(self) -> str:
        return f"DataParallel on {', '.join(_device_label(device) for device in self.devices)}"

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        replicas = nn.DataParallel(ForReplicas(net), device_ids=[device.index for device in self.devices])
        return SumOverReplicas(replicas)

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the wrapper's scatter moves each part to its own device

    def _seed_generators(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for replica, device in enumerate(self.devices):
            torch.cuda.default_generators[device.index].manual_seed(seed + replica)


class Distributed(Parallel):
    """One process per device; gradients are averaged by DistributedDataParallel."""

    redoes_steps = False

    def __init__(self, environment: RankEnvironment, flags: MultiDeviceFlags, devices: DeviceFlags) -> None:
        super().__init__()
        self.shard = (environment.rank, environment.world_size)
        self.gradient_divisor = environment.world_size
        self._find_unused_parameters = flags.find_unused_parameters
        self._sync_bn = flags.sync_bn
        self._patience_s = {"--dist-timeout-s": flags.dist_timeout_s, "--hang-timeout-s": flags.hang_timeout_s}
        self._is_prompt = False
        self._failure_status: int | None = None
        timeout = timedelta(seconds=flags.dist_timeout_s)
        on_gpu = torch.cuda.is_available() and devices.device != "cpu"
        self.backend = flags.backend or ("nccl" if on_gpu else "gloo")
        store = self._meet(environment, f"cpu:gloo,cuda:{self.backend}" if on_gpu else "gloo", timeout)
        # Their own groups, so that the few numbers of a step never queue behind gradients, nor behind what the main
        # process does for all, which may take long.
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        self._step_group = dist.new_group(backend="gloo", timeout=timeout)
        local_rank, self.local_world_size = self._place_on_host(environment)
        self._speaks_for_host = local_rank == 0 or environment.rank == 1
        try:
            self.device = self.together(lambda: _rank_device(local_rank, on_gpu, flags.gpu_ids))
        except BadInput as error:
            raise error if self.is_main else Failure(str(error), EXIT_BAD_INPUT) from None
        if on_gpu:
            torch.cuda.set_device(self.device)
        host = socket.gethostname()
        self._labels = self._gather(f"{host} {_device_label(self.device)}")
        self._members = self._gather(f"process {os.getpid()} on {host}")
        # A store may outlive a group of processes, and must not confuse the next one by what this one noted.
        notes = dist.PrefixStore(self._gather(uuid.uuid4().hex)[0], store)
        self._bulletin = Bulletin(notes, self.shard, self.whereabouts)

    def _meet(self, environment: RankEnvironment, backend: str, timeout: timedelta) -> dist.Store:
        """Joins the others; returns the store at which they met. Raises BadInput if they do not come."""
        rank, world_size = self.shard
        # The store of a single torchrun agent still holds the addresses of the attempt before, at which nobody is any
        # more. Several agents meet at a new store each time, and do not count their restarts alike.
        is_one_agent = environment.local_world_size == world_size
        attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if is_one_agent else 0}"
        try:
            store, _, _ = next(dist.rendezvous(environment.init_method, rank, world_size, timeout=timeout))
            store.set_timeout(timeout)
            dist.init_process_group(
                backend, store=dist.PrefixStore(attempt, store), rank=rank, world_size=world_size, timeout=timeout
            )
            return store
        except RuntimeError as error:  # a DistError, or what a store in a file says
            raise BadInput(
                f"rank {rank} of {world_size} could not meet the others at {environment.meeting_place} within "
                f"--dist-timeout-s {timeout.total_seconds():g}: {str(error).splitlines()[0]}"
            ) from None

    def _place_on_host(self, environment: RankEnvironment) -> tuple[int, int]:
        """(local rank, local world size); a launcher that did not say is replaced by comparing host names."""
        if environment.local_rank is not None and environment.local_world_size is not None:
            return environment.local_rank, environment.local_world_size
        hosts = self._gather(socket.gethostname())
        same_host = [rank for rank, host in enumerate(hosts) if host == hosts[environment.rank]]
        local_rank = environment.local_rank
        return same_host.index(environment.rank) if local_rank is None else local_rank, len(same_host)

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.shard[1]
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def describe(self) -> str:
        hosts = {label.split(" ", 1)[0] for label in self._labels}
        devices = [label.split(" ", 1)[1] for label in self._labels]
        places = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
        kinds = ", ".join(devices) if len(set(devices)) > 1 else f"{len(devices)} x {devices[0]}"
        return f"DistributedDataParallel over {self.backend}{places}: {kinds}"

    def wrap(self, net: nn.Module, example: Batch, phase: str) -> nn.Module:
        if self._sync_bn:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        wrapped = nn.parallel.DistributedDataParallel(
            net,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
            **_NO_BUFFER_BROADCAST,
        )
        self._settle_buckets(wrapped, example, phase)
        return wrapped

    def _settle_buckets(self, net: nn.Module, example: Batch, phase: str) -> None:
        """One backward that changes nothing.

        DistributedDataParallel regroups its buckets after the first backward, which changes the order of
        summation; without this pass the first step of a resumed run would differ from the same step unbroken.
        """
        buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
        sums = net(self.to_device(example), phase)
        (sums["loss"] * 0).backward()
        net.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def evaluation_module(self, net: nn.Module) -> nn.Module:
        return net.module  # type: ignore[return-value]

    def gradient_sync(self, net: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else net.no_sync()  # type: ignore[operator]

    def sum(self, values: Tensor) -> Tensor:
        self.whereabouts.enter(EXCHANGE)
        values = values.clone()
        dist.all_reduce(values, group=self._step_group)
        return values

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        return _PendingAllReduce(values, self._step_group, self.whereabouts)

    def sum_in_place(self, values: Tensor) -> None:
        self.whereabouts.enter(EXCHANGE)
        dist.all_reduce(values)

    def on_main(self, function: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        if self.is_main:
            self._bulletin.may_be_ended = False
            try:
                answer[0] = function()
            except BadInput as error:
                answer[1] = str(error)
            self._bulletin.may_be_ended = True
        self.whereabouts.enter(EXCHANGE if self.is_main else "waiting for rank 0")
        dist.broadcast_object_list(answer, src=0, group=self._host_group)
        if answer[1] is not None:
            raise BadInput(answer[1])
        return answer[0]

    def sync_buffers(self, objective: nn.Module) -> None:
        self.whereabouts.enter(EXCHANGE)
        for buffer in objective.buffers():
            dist.broadcast(buffer, src=0)

    def together(self, function: Callable[[], T]) -> T:
        result, said = None, None
        try:
            result = function()
        except BadInput as error:
            said = str(error)
        self.whereabouts.enter(EXCHANGE)
        messages = dict.fromkeys(message for message in self._gather(said) if message is not None)
        if messages:
            raise BadInput("\n".join(messages))
        return result  # type: ignore[return-value]

    def expect_promptness(self) -> None:
        if self._is_prompt:
            return
        self._is_prompt = True
        timeout = timedelta(seconds=self._patience_s["--hang-timeout-s"])
        # NCCL ends a process that has waited too long itself, and explains nothing: it is given more time, in which
        # the ranks miss each other in the exchange of the next step.
        groups = [(self._step_group, torch.device("cpu"))]
        if self.backend == "gloo":
            groups.append((dist.group.WORLD, self.device))
        for group, device in groups:
            group._get_backend(device)._set_default_timeout(timeout)

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, Failure):
            return error
        explained = self._explain_break(error) if _is_broken_exchange(error) else self._explain_own(error)
        self._failure_status = explained.status if isinstance(explained, Failure) else EXIT_BAD_INPUT
        return explained

    def _explain_own(self, error: BaseException) -> BaseException:
        """An exception of this process, which the others are told about."""
        self._bulletin.may_be_ended = False
        rank, world_size = self.shard
        if isinstance(error, BadInput):
            words = LastWords(rank, EXIT_BAD_INPUT, str(error), refused=True)
        elif isinstance(error, StartAgain):
            message = f"rank {rank} of {world_size} is {error}"
            words = LastWords(rank, EXIT_AGAIN, message, memory_limit=error.memory_limit)
        elif isinstance(error, Exception):
            message = f"rank {rank} of {world_size} failed in {self.whereabouts}: {reason(error)}"
            words = LastWords(rank, EXIT_FAILED, message)
        else:  # the user wants the process to end at once
            words = LastWords(rank, EXIT_FAILED, "")
        counts = words
        with suppress(StoreLost):
            counts = self._bulletin.speak(words)
        if isinstance(error, BadInput) or not isinstance(error, Exception):
            return error
        if counts != words:
            return self._follow(counts)
        tell(words.message, None if isinstance(error, StartAgain) else error)
        return _failure(words)

    def _explain_break(self, error: BaseException) -> BaseException:
        """An exchange failed: because of another process, which has left its last words or is missing."""
        self._bulletin.may_be_ended = False
        rank = self.shard[0]
        timeout = re.search(r"Timed out waiting (\d+)ms", str(error))
        waited = int(timeout[1]) / 1000 if timeout else None
        flag = next((f"{name} {limit:g}" for name, limit in self._patience_s.items() if limit == waited), "")
        found = Break(rank, str(self.whereabouts), waited, flag, reason(error))

        def compose(answers: Mapping[int, Note], notes: Mapping[int, Note]) -> LastWords:
            return LastWords(rank, EXIT_FAILED, blame(found, answers, notes, self._members))

        try:
            words = self._bulletin.find_out(compose)
        except StoreLost:
            words = LastWords(rank, EXIT_FAILED, blame_store_host(found, self._members))
            if not self._speaks_for_host:
                return _failure(words)
        if words.rank == rank:
            tell(words.message)
        return self._follow(words)

    def _follow(self, words: LastWords) -> BaseException:
        """The end of this process because of another one, which has told the user; a BadInput the main one tells."""
        return BadInput(words.message) if words.refused and self.is_main else _failure(words)

    def before_forced_end(self, record: Callable[[Failure], None]) -> None:
        self._bulletin.before_the_end = lambda words: record(_failure(words))

    def close(self) -> None:
        self._bulletin.close()
        if self._failure_status is None:
            with suppress(RuntimeError):
                # The store may be this process's: it stays until nobody uses it any more.
                dist.barrier(group=self._host_group)
            dist.destroy_process_group()
            return
        # With exchanges on a GPU that never end, neither this nor the end of the interpreter need come back.
        closing = threading.Thread(target=dist.destroy_process_group, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)
        if closing.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._failure_status)


def _failure(words: LastWords) -> Failure:
    return Failure(words.message, words.status, words.memory_limit)


def available_backends() -> list[str]:
    """Of "gloo" and "nccl", those that this build of torch has."""
    found = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in found.items() if is_available()] if dist.is_available() else []


def _is_broken_exchange(error: BaseException) -> bool:
    """Whether another process is to blame for what a collective raised."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _rank_device(local_rank: int, on_gpu: bool, gpu_ids: Sequence[int] | None) -> torch.device:
    """The local_rank-th GPU of those chosen; the only one where the launcher shows each process just one."""
    if not on_gpu:
        return torch.device("cpu")
    usable = list(gpu_ids) if gpu_ids is not None else list(range(torch.cuda.device_count()))
    if len(usable) == 1:
        return torch.device("cuda", usable[0])
    if local_rank >= len(usable):
        raise BadInput(
            f"local rank {local_rank} has no GPU: this machine offers {len(usable)} ({usable}); start fewer "
            "processes per machine, or choose others with --gpu-ids or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", usable[local_rank])


def _device_label(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def data_parallel(devices: DeviceFlags, flags: MultiDeviceFlags, say: Callable[[str], None]) -> Parallel:
    """`--multi-gpu dp` on whatever there is."""
    if devices.device == "cpu" or not torch.cuda.is_available():
        say("DataParallel needs at least two GPUs and none is in use: training on the CPU.")
        return SingleDevice(torch.device("cpu"))
    ids = list(flags.gpu_ids) if flags.gpu_ids is not None else list(range(torch.cuda.device_count()))
    if len(ids) < 2:
        say(f"DataParallel needs at least two GPUs and there is one: training on cuda:{ids[0]}.")
        return SingleDevice(torch.device("cuda", ids[0]))
    return DataParallel([torch.device("cuda", i) for i in ids])

"""Profiles the time and memory of any model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.loading.torch_datasets import draws_put_back
from trainer.loop.memory import lacks_memory
from trainer.loop.module_state import leaving_no_trace
from trainer.loop.precision import AMP_DTYPES
from trainer.profiling.meters import MIB, Timer, forget_peak, peak_memory_mib, spread
from trainer.profiling.report import require_writable, write_json

MOST_BATCHES = 8
"""Largest number of batches that are read from the loader, kept on the device and used in turn."""

Results = dict[str, Any]
LossFunction = Callable[[Any, Any], Tensor]
"""Function that returns the loss, given a model's output and the targets."""


@dataclass(eq=False)
class PerformanceProfiler:
    """Measures a model's time and memory on batches of a loader.

        profiler = PerformanceProfiler(model, loader, "cuda", loss=nn.functional.cross_entropy)
        print(profiler.profile_forward_pass()["forward_ms_median"])
        profiler.run_full_profile("profile.json")

    loader: iterable of batches; at most `MOST_BATCHES` are read. A batch is a tensor, a pair (inputs, targets), or a
    mapping of tensors, for which the model returns a mapping with "loss". Dim 0 is the batch dimension. loss: function
    of output and targets; default: the output's "loss" or else the output's sum. device: device to measure on;
    default: the model's device. repeats: number of measurements, after `warm_up` measurements that do not count.

    Results are plain dictionaries with units in their keys. Times are reported as median, 10th and 90th percentile; on
    a GPU they are measured with CUDA events. Each call restores the model (device, modes, gradients, buffers) and the
    random number generators.
    """

    model: nn.Module
    loader: Iterable[Any]
    device: torch.device | str | None = None
    loss: LossFunction | None = None
    repeats: int = 20
    warm_up: int = 3

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warm_up < 0:
            raise ValueError(f"repeats {self.repeats} must be at least 1, and warm_up {self.warm_up} at least 0")
        # a tensor's device has an index, unlike "cuda"
        self._device = torch.empty(0, device=self.device or _device_of(self.model)).device
        self._batches: list[Any] = []
        self.timer = Timer(self._device)
        """Timer for the user's own code: `with profiler.timer("augmentation"): ...`."""

    def profile_forward_pass(self) -> Results:
        """Measures `forward_ms_*` in train mode with gradients, and `inference_ms_*` in eval mode without gradients.

        Also returns `samples_per_second`, `inference_samples_per_second` and `batch_size`.
        """
        with self._measuring() as batches:
            self.model.train()
            forward = self._timed(batches, "forward", "samples_per_second")
            self.model.eval()
            with torch.no_grad():
                inference = self._timed(batches, "inference", "inference_samples_per_second")
            return {**forward, **inference, "batch_size": _mean_size(batches)}

    def profile_backward_pass(self) -> Results:
        """Measures `backward_ms_*` of the backward pass, and `forward_backward_ms_*` of forward, loss and backward.

        Also returns `samples_per_second`, `peak_memory_mib`, `loss` (of the first batch), and `batch_size`.
        """
        with self._measuring() as batches:
            return {**self._train(batches)["float32"], "batch_size": _mean_size(batches)}

    def profile_memory(self) -> Results:
        """Measures `parameters_mib`, `buffers_mib`, `gradients_mib`, `saved_for_backward_mib` and `peak_memory_mib`.

        `saved_for_backward_mib` counts the tensors, except weights, that autograd saves for a batch. `peak_memory_mib`
        is the peak during forward and backward; on a GPU it counts tensors, on the CPU the whole process.
        """
        with self._measuring() as batches:
            self.model.train()
            weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
            saved: dict[int, int] = {}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            forget_peak(self._device)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = _training_loss(self.model, batches[0], self.loss)
            loss.backward()
            num_bytes = {
                "parameters": sum(p.nbytes for p in self.model.parameters()),
                "buffers": sum(b.nbytes for b in self.model.buffers()),
                "gradients": sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None),
                "saved_for_backward": sum(saved.values()),
            }
            found = {f"{name}_mib": size / MIB for name, size in num_bytes.items()}
            return {**found, "peak_memory_mib": peak_memory_mib(self._device), "batch_size": _num_samples(batches[0])}

    def benchmark_batch_sizes(self, sizes: Sequence[int]) -> Results:
        """Measures forward and backward for several batch sizes, with the first batch repeated or cut to each size.

        Returns `batch_sizes`, a list of dictionaries with `batch_size`, `fits` and, if the size fits, the results of
        `profile_backward_pass`. Also returns `fastest_batch_size`, by samples per second, and `largest_batch_size`;
        both are None if no size fits.
        """
        if min(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)}: must be numbers of samples, at least 1 each")
        rows: list[Results] = []
        for size in sizes:
            try:
                with self._measuring() as batches:
                    found = self._train([_resized(batches[0], size)])["float32"]
                rows.append({"batch_size": size, "fits": True, **found})
            except RuntimeError as error:
                # torch's out-of-memory error on the CPU is a RuntimeError with the allocator's name
                if not lacks_memory(error) and "DefaultCPUAllocator" not in str(error):
                    raise
                rows.append({"batch_size": size, "fits": False})
            torch.cuda.empty_cache()
        rates = {row["batch_size"]: row["samples_per_second"] for row in rows if row["fits"]}
        fastest = max(rates, key=rates.__getitem__, default=None)
        return {"batch_sizes": rows, "fastest_batch_size": fastest, "largest_batch_size": max(rates, default=None)}

    def compare_precisions(self) -> Results:
        """Returns the results of `compare_amp_performance`."""
        names = ["float32", *(name for name in AMP_DTYPES if self._device.type == "cuda" or name == "bf16")]
        with self._measuring() as batches:
            found = self._train(batches, names)
        plain_ms, exact = (found["float32"][name] for name in ("forward_backward_ms_median", "loss"))
        for name in names[1:]:
            found[name]["speedup"] = plain_ms / found[name]["forward_backward_ms_median"]
            found[name]["loss_relative_difference"] = abs(found[name]["loss"] - exact) / max(abs(exact), 1e-30)
        return found

    def run_full_profile(self, save_path: str | Path | None = None) -> Results:
        """Runs all measurements except `compare_precisions`; tries batch sizes from 1/4 to 4 times the loader's.

        Writes JSON to `save_path`, creating missing folders; raises OSError before measuring if that is impossible.
        """
        if save_path is not None:
            require_writable(Path(save_path))
        with self._measuring() as batches:
            size = _num_samples(batches[0])
        # at least two samples, which batch norm needs
        sizes = sorted({max(int(part * size), min(size, 2)) for part in (1 / 4, 1 / 2, 1, 2, 4)})
        report = {
            "environment": {"device": str(self._device), "torch": str(torch.__version__), "repeats": self.repeats},
            "forward": self.profile_forward_pass(),
            "backward": self.profile_backward_pass(),
            "memory": self.profile_memory(),
            "batch_sizes": self.benchmark_batch_sizes(sizes),
            "timings": self.timer.results(),
        }
        if save_path is not None:
            write_json(Path(save_path), report)
        return report

    @contextmanager
    def _measuring(self) -> Iterator[list[Any]]:
        """Moves the model to the device until the context ends, and yields the batches there."""
        with _untouched(self.model, self._device):
            if not self._batches:
                batches = islice(self.loader, MOST_BATCHES)
                self._batches = [_mapped(batch, lambda tensor: tensor.to(self._device)) for batch in batches]
            if not self._batches:
                raise ValueError("the loader yields no batch")
            if not _num_samples(self._batches[0]):
                raise ValueError("the loader's first batch is empty")
            yield self._batches

    def _timed(self, batches: Sequence[Any], name: str, rate: str) -> Results:
        timer = Timer(self._device, self.warm_up)
        for i in range(self.warm_up + self.repeats):
            with timer(name):
                _call(self.model, batches[i % len(batches)])
        return _speed(timer, batches, name, rate)

    def _train(self, batches: Sequence[Any], precisions: Sequence[str] = ("float32",)) -> Results:
        """Measures forward and backward, alternating between precisions. Returns `forward_backward_ms_*`,
        `backward_ms_*`, `samples_per_second`, `peak_memory_mib` and `loss` (of the first batch) for each precision.
        """
        gpus = [self._device] if self._device.type == "cuda" else []
        timers = {name: Timer(self._device, self.warm_up) for name in precisions}
        peaks, losses = dict.fromkeys(precisions, 0.0), dict[str, float]()
        self.model.train()
        for i in range(self.warm_up + self.repeats):
            for name, timer in timers.items():
                forget_peak(self._device)
                with torch.random.fork_rng(gpus), timer("forward_backward"):
                    with torch.autocast(self._device.type, AMP_DTYPES.get(name), enabled=name in AMP_DTYPES):
                        loss = _training_loss(self.model, batches[i % len(batches)], self.loss)
                    with timer("backward"):
                        loss.backward()
                self.model.zero_grad(set_to_none=True)
                peaks[name] = max(peaks[name], peak_memory_mib(self._device))
                if i == 0:
                    losses[name] = loss.item()
        return {
            name: {
                **_speed(timer, batches, "forward_backward", "samples_per_second"),
                **spread("backward_", timer.milliseconds("backward")),
                "peak_memory_mib": peaks[name],
                "loss": losses[name],
            }
            for name, timer in timers.items()
        }


def compare_amp_performance(model: nn.Module, loader: Iterable[Any], *args: Any, **options: Any) -> Results:
    """Compares forward and backward without autocast ("float32"), with bf16 autocast and, on a GPU, with fp16 autocast.

    Takes the arguments of `PerformanceProfiler`. Alternates between the precisions, so that changes in the machine's
    speed affect all of them. Returns `forward_backward_ms_*`, `samples_per_second` and `peak_memory_mib` for each
    precision; for autocast, also `speedup` over "float32" and `loss_relative_difference` on the first batch.
    """
    return PerformanceProfiler(model, loader, *args, **options).compare_precisions()


def _speed(timer: Timer, batches: Sequence[Any], name: str, rate: str) -> Results:
    """Returns `{name}_ms_*`, and under the key `rate` the samples per second at the median duration."""
    durations = spread(f"{name}_", timer.milliseconds(name))
    return {**durations, rate: 1e3 * _mean_size(batches) / durations[f"{name}_ms_median"]}


# --- any batch, any model ----------------------------------------------------------------------------------------


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(value, function) for name, value in batch.items()}
    return [_mapped(value, function) for value in batch] if isinstance(batch, list | tuple) else batch


def _num_samples(batch: Any) -> int:
    """Returns the size of dim 0 of a batch's first tensor. Raises TypeError for a batch without tensors."""
    if isinstance(batch, Mapping | list | tuple) and batch:
        return _num_samples(next(iter(batch.values() if isinstance(batch, Mapping) else batch)))
    if not isinstance(batch, Tensor):
        raise TypeError(f"a batch must be a tensor, or a mapping or sequence of tensors, not {type(batch).__name__}")
    return len(batch) if batch.dim() else 1


def _mean_size(batches: Sequence[Any]) -> float:
    return sum(map(_num_samples, batches)) / len(batches)


def _resized(batch: Any, size: int) -> Any:
    available = _num_samples(batch)
    index = torch.arange(size) % available

    def take(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)] if tensor.dim() and len(tensor) == available else tensor

    return _mapped(batch, take)


def _call(model: nn.Module, batch: Any) -> Any:
    return model(*batch[: max(1, len(batch) - 1)]) if isinstance(batch, list | tuple) else model(batch)


def _training_loss(model: nn.Module, batch: Any, loss: LossFunction | None) -> Tensor:
    """Returns a scalar for the backward pass: loss(output, targets), the output's "loss", or the output's sum.

    Raises ValueError if no parameter requires gradients. Raises TypeError if `loss` is given but the batch has no
    targets, or if no gradients can be computed from the output.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"the {type(model).__name__} has no parameter to train, so there is no backward pass")
    if loss is not None:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise TypeError(f"with a loss function, a batch must be (inputs, targets), not a {type(batch).__name__}")
        return loss(_call(model, batch), batch[-1]).sum()
    output = _call(model, batch)
    found = output.get("loss") if isinstance(output, Mapping) else output
    found = found[0] if isinstance(found, list | tuple) else found
    if not isinstance(found, Tensor) or not found.requires_grad:
        raise TypeError(
            f'cannot compute gradients from the model\'s {type(output).__name__}: return a "loss" entry, or pass a '
            "loss function with batches of (inputs, targets)"
        )
    return found.float().sum()


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Clears gradients and moves the model to the device; at the end restores the model and random generators."""
    home = _device_of(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    gpus = [each for each in {device, home} if each.type == "cuda"]
    try:
        with leaving_no_trace(model), draws_put_back(), torch.random.fork_rng(gpus):
            model.zero_grad(set_to_none=True)
            model.to(device)
            yield
    finally:
        model.to(home)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))

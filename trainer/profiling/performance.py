"""The library: where any model's time and memory go. See `PerformanceProfiler`."""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.loading.files import replace_text
from trainer.loop.precision import AMP_DTYPES
from trainer.profiling.any_model import (
    LossFunction,
    call,
    device_of,
    forward_loss,
    mapped,
    num_samples,
    resized,
    untouched,
)
from trainer.profiling.memory import MIB, forget_peak, peak_memory_mib
from trainer.profiling.targets import probe_file
from trainer.profiling.timing import Timer, spread

MOST_BATCHES = 8
"""Batches of the loader that are kept on the device and used in turn."""


class PerformanceProfiler:
    """Measures a model on batches of a loader.

        profiler = PerformanceProfiler(model, loader, "cuda", loss=nn.functional.cross_entropy)
        print(profiler.profile_forward_pass()["forward_ms_median"])
        profiler.run_full_profile("profile.json")

    loader: any iterable of batches; at most `MOST_BATCHES` are read. A batch is a tensor; or a mapping of tensors, of
    which the model returns sums with "loss" among them; or (inputs, targets), with a function `loss(output, targets)`.
    Samples are on dim 0. Without a loss, backward runs from the sum of the output.
    device: where to measure; by default where the model is. repeats: how often each thing is timed, after `warm_up`
    times that do not count.

    Results are plain dictionaries with units in their keys: times in milliseconds, by median, 10th and 90th percentile,
    taken on the device (by events on a GPU); memory in MiB. After each call the model is as it was: device, modes,
    gradients, buffers; and so are the random generators.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        loss: LossFunction | None = None,
        repeats: int = 20,
        warm_up: int = 3,
    ) -> None:
        if repeats < 1 or warm_up < 0:
            raise ValueError(f"repeats {repeats} must be at least 1, warm_up {warm_up} at least 0")
        self._model = model
        self._loader = loader
        self._device = device_of(model) if device is None else _with_index(torch.device(device))
        self._loss = loss
        self._repeats = repeats
        self._warm_up = warm_up
        self._batches: list[Any] = []
        self._loading_ms: list[float] = []
        self._timer = Timer(self._device)

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Collects the duration of what happens within it: `with profiler.timer("augmentation"): ...`."""
        return self._timer(name)

    def timings(self) -> dict[str, dict[str, float]]:
        """What `timer` has collected, by name: `ms_median`, `ms_p10`, `ms_p90`, `ms_total`, `count`."""
        return self._timer.results()

    def profile_data_loading(self) -> dict[str, float]:
        """How long the loader takes for a batch: `data_ms_*`. The first one, which starts workers, does not count."""
        with self._measuring():
            return spread("data", self._loading_ms[1:] or self._loading_ms)

    def profile_forward_pass(self) -> dict[str, float]:
        """`forward_ms_*`, in train mode and recording for backward; `inference_ms_*`, in eval mode and without that.

        Also `samples_per_second` of the first, `inference_samples_per_second` of the second, and `batch_size`.
        """
        with self._measuring() as batches:
            self._model.train()
            forward = self._timed("forward", batches, lambda batch: call(self._model, batch))
            self._model.eval()
            with torch.no_grad():
                inference = self._timed("inference", batches, lambda batch: call(self._model, batch))
        size = _mean_size(batches)
        return {
            **forward,
            "samples_per_second": 1e3 * size / forward["forward_ms_median"],
            **inference,
            "inference_samples_per_second": 1e3 * size / inference["inference_ms_median"],
            "batch_size": size,
        }

    def profile_backward_pass(self) -> dict[str, float]:
        """`backward_ms_*` of the backward pass alone, `forward_backward_ms_*` of both with the loss between them.

        Also `samples_per_second` of both together, and `batch_size`.
        """
        with self._measuring() as batches:
            durations = self._timed_training(batches)
        size = _mean_size(batches)
        return {
            **durations,
            "samples_per_second": 1e3 * size / durations["forward_backward_ms_median"],
            "batch_size": size,
        }

    def profile_memory(self) -> dict[str, float]:
        """In MiB: `parameters_mib`, `buffers_mib`, `gradients_mib`, `saved_for_backward_mib`, `peak_memory_mib`.

        Saved for backward is what autograd keeps between the passes for one batch, the weights left out. The peak of a
        forward and a backward is that of the device's tensors on a GPU, and of the whole process elsewhere.
        """
        with self._measuring() as batches:
            self._model.train()
            weights = {p.untyped_storage().data_ptr() for p in self._model.parameters()}
            saved: dict[int, int] = {}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            forget_peak(self._device)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = forward_loss(self._model, batches[0], self._loss)
            loss.backward()
            peak = peak_memory_mib(self._device)
            gradients = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        return {
            "parameters_mib": sum(p.nbytes for p in self._model.parameters()) / MIB,
            "buffers_mib": sum(b.nbytes for b in self._model.buffers()) / MIB,
            "gradients_mib": gradients / MIB,
            "saved_for_backward_mib": sum(saved.values()) / MIB,
            "peak_memory_mib": peak,
            "batch_size": num_samples(batches[0]),
        }

    def benchmark_batch_sizes(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Forward and backward for batches of other sizes, made of the samples of the first batch.

        `batch_sizes`: for each its `batch_size`, `fits`, and if so `forward_backward_ms_*`, `backward_ms_*`,
        `samples_per_second` and `peak_memory_mib`. `fastest_batch_size`: the one of most samples per second;
        `largest_batch_size`: the largest that fits; None if none does.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)}: must be numbers of samples, at least 1 each")
        rows = []
        for size in sizes:
            with self._measuring() as batches:
                rows.append({"batch_size": size, **self._of_size(batches[0], size)})
        fitting = [row for row in rows if row["fits"]]
        fastest = max(fitting, key=lambda row: row["samples_per_second"], default=None)
        return {
            "batch_sizes": rows,
            "fastest_batch_size": fastest["batch_size"] if fastest else None,
            "largest_batch_size": max((row["batch_size"] for row in fitting), default=None),
        }

    def run_full_profile(self, save_path: str | Path | None = None) -> dict[str, Any]:
        """All of the above, with batch sizes from a quarter to four times the loader's. Written as JSON if asked to.

        Folders that the path lacks are made. Raises OSError, before anything is measured, if it cannot be written.
        """
        if save_path is not None:
            probe_file(Path(save_path))
        with self._measuring() as batches:
            size = num_samples(batches[0])
            if not size:
                raise ValueError("the loader's first batch is empty")
        # Not a single sample, of which batch norm refuses to train.
        sizes = sorted({max(size // 4, min(size, 2)), max(size // 2, min(size, 2)), size, 2 * size, 4 * size})
        report = {
            "environment": self._environment(),
            "data": self.profile_data_loading(),
            "forward": self.profile_forward_pass(),
            "backward": self.profile_backward_pass(),
            "memory": self.profile_memory(),
            "batch_sizes": self.benchmark_batch_sizes(sizes),
            "timings": self.timings(),
        }
        if save_path is not None:
            Path(save_path).parent.mkdir(parents=True, exist_ok=True)
            replace_text(Path(save_path), json.dumps(report, indent=2) + "\n")
        return report

    def _environment(self) -> dict[str, Any]:
        is_gpu = self._device.type == "cuda"
        return {
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if is_gpu else platform.processor() or "cpu",
            "num_threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "repeats": self._repeats,
            "warm_up": self._warm_up,
        }

    @contextmanager
    def _measuring(self) -> Iterator[list[Any]]:
        """The batches on the device, and the model beside them until the end."""
        with untouched(self._model, self._device):
            if not self._batches:
                self._batches = [mapped(batch, lambda t: t.to(self._device)) for batch in self._read()]
            if not self._batches:
                raise ValueError("the loader yields no batch")
            yield self._batches

    def _read(self) -> Iterator[Any]:
        started = time.perf_counter()
        for batch in islice(self._loader, MOST_BATCHES):
            self._loading_ms.append(1e3 * (time.perf_counter() - started))
            yield batch
            started = time.perf_counter()

    def _timed(self, name: str, batches: Sequence[Any], work: Callable[[Any], object]) -> dict[str, float]:
        timer = Timer(self._device)
        for i in range(self._warm_up + self._repeats):
            with timer(name):
                work(batches[i % len(batches)])
        return spread(name, timer.milliseconds(name)[self._warm_up :])

    def _timed_training(self, batches: Sequence[Any]) -> dict[str, float]:
        """`forward_backward_ms_*` of a forward and a backward pass, `backward_ms_*` of the backward pass alone."""
        self._model.train()
        timer = Timer(self._device)
        for i in range(self._warm_up + self._repeats):
            train_once(self._model, batches[i % len(batches)], self._loss, timer, "float32")
        return {
            **spread("backward", timer.milliseconds("backward")[self._warm_up :]),
            **spread("forward_backward", timer.milliseconds("both")[self._warm_up :]),
        }

    def _of_size(self, batch: Any, size: int) -> dict[str, Any]:
        try:
            forget_peak(self._device)
            durations = self._timed_training([resized(batch, size)])
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            return {"fits": False}
        return {
            "fits": True,
            **durations,
            "samples_per_second": 1e3 * size / durations["forward_backward_ms_median"],
            "peak_memory_mib": peak_memory_mib(self._device),
        }


def train_once(model: nn.Module, batch: Any, loss: LossFunction | None, timer: Timer, precision: str) -> Tensor:
    """One forward and backward, timed under the names "both" and "backward"; returns the loss. Clears gradients.

    precision: "float32", which stands for the model's own, or a name of AMP_DTYPES to autocast to.
    """
    dtype = AMP_DTYPES.get(precision)
    kind = device_of(model).type
    with timer("both"):
        with torch.autocast(kind, dtype) if dtype is not None else nullcontext():
            result = forward_loss(model, batch, loss)
        with timer("backward"):
            result.backward()
    model.zero_grad(set_to_none=True)
    return result.detach()


def compare_amp_performance(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    loss: LossFunction | None = None,
    repeats: int = 20,
    warm_up: int = 3,
) -> dict[str, dict[str, float]]:
    """Forward and backward in the model's own precision and under autocast to bf16 and, on a GPU, fp16.

    The precisions take turns, so that a change of the machine's speed hits all of them. By precision:
    `forward_backward_ms_*`, `samples_per_second`, `peak_memory_mib`, and for the autocast ones `speedup` over float32
    and `loss_relative_difference`, that of the first batch. Arguments are those of `PerformanceProfiler`; the model is
    left as it was.
    """
    profiler = PerformanceProfiler(model, loader, device, loss, repeats, warm_up)
    on_gpu = profiler._device.type == "cuda"
    names = ["float32", *(name for name in AMP_DTYPES if on_gpu or name == "bf16")]
    timers = {name: Timer(profiler._device) for name in names}
    peaks, first_losses = dict.fromkeys(names, 0.0), {}
    with profiler._measuring() as batches:
        model.train()
        for i in range(-warm_up, repeats):
            for name in names:
                timer = timers[name] if i >= 0 else Timer(profiler._device)
                forget_peak(profiler._device)
                with torch.random.fork_rng([profiler._device] if on_gpu else []):
                    value = train_once(model, batches[i % len(batches)], loss, timer, name)
                peaks[name] = max(peaks[name], peak_memory_mib(profiler._device))
                if i == 0:
                    first_losses[name] = float(value)
    size = _mean_size(batches)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        durations = spread("forward_backward", timers[name].milliseconds("both"))
        median = durations["forward_backward_ms_median"]
        found[name] = {**durations, "samples_per_second": 1e3 * size / median, "peak_memory_mib": peaks[name]}
    exact = first_losses["float32"]
    for name in names[1:]:
        found[name]["speedup"] = (
            found["float32"]["forward_backward_ms_median"] / found[name]["forward_backward_ms_median"]
        )
        found[name]["loss_relative_difference"] = abs(first_losses[name] - exact) / max(abs(exact), 1e-30)
    return found


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was not enough. For the CPU's torch has no exception of its own, only the allocator's name."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _mean_size(batches: Sequence[Any]) -> float:
    return sum(map(num_samples, batches)) / len(batches)


def _with_index(device: torch.device) -> torch.device:
    """cuda -> cuda:0, or whichever is the current one: the name that tensors go by."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

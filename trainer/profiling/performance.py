"""The library: where any model's time and memory go. See `PerformanceProfiler`."""

import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.loop.memory import lacks_memory
from trainer.loop.precision import AMP_DTYPES
from trainer.profiling import model_adapter
from trainer.profiling.meters import MIB, Timer, forget_peak, peak_memory_mib, spread
from trainer.profiling.report import require_writable, write_json

MOST_BATCHES = 8
"""Batches of the loader that are kept on the device and used in turn."""

Results = dict[str, Any]


@dataclass(eq=False)
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

    Results are plain dictionaries with units in their keys: times by median, 10th and 90th percentile, taken on the
    device (by events on a GPU). After each call the model is as it was: device, modes, gradients, buffers; and so are
    the random generators.
    """

    model: nn.Module
    loader: Iterable[Any]
    device: torch.device | str | None = None
    loss: model_adapter.LossFunction | None = None
    repeats: int = 20
    warm_up: int = 3

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warm_up < 0:
            raise ValueError(f"repeats {self.repeats} must be at least 1, warm_up {self.warm_up} at least 0")
        # A tensor knows which GPU "cuda" is.
        self._device = torch.empty(0, device=self.device or model_adapter.device_of(self.model)).device
        self._batches: list[Any] = []
        self._loading_ms: list[float] = []
        self.timer = Timer(self._device)
        """Collects the duration of what happens within it: `with profiler.timer("augmentation"): ...`."""

    def timings(self) -> dict[str, dict[str, float]]:
        """What `timer` has collected, by name: `ms_median`, `ms_p10`, `ms_p90`, `ms_total`, `count`."""
        return self.timer.results()

    def profile_data_loading(self) -> dict[str, float]:
        """How long the loader takes for a batch: `data_ms_*`. The first one, which starts workers, does not count."""
        with self._measuring():
            return spread("data_", self._loading_ms[1:] or self._loading_ms)

    def profile_forward_pass(self) -> dict[str, float]:
        """`forward_ms_*`, in train mode and recording for backward; `inference_ms_*`, in eval mode and without that.

        Also `samples_per_second` of the first, `inference_samples_per_second` of the second, and `batch_size`.
        """
        with self._measuring() as batches:
            self.model.train()
            forward = self._call(batches, "forward", "samples_per_second")
            self.model.eval()
            with torch.no_grad():
                inference = self._call(batches, "inference", "inference_samples_per_second")
            return {**forward, **inference, "batch_size": _mean_size(batches)}

    def profile_backward_pass(self) -> dict[str, float]:
        """`backward_ms_*` of the backward pass alone, `forward_backward_ms_*` of both with the loss between them.

        Also `samples_per_second` of both together, `peak_memory_mib`, and `batch_size`.
        """
        with self._measuring() as batches:
            found, _ = self._train(batches)
            return {**found["float32"], "batch_size": _mean_size(batches)}

    def profile_memory(self) -> dict[str, float]:
        """In MiB: `parameters_mib`, `buffers_mib`, `gradients_mib`, `saved_for_backward_mib`, `peak_memory_mib`.

        Saved for backward is what autograd keeps between the passes for one batch, the weights left out. The peak of a
        forward and a backward is that of the device's tensors on a GPU, and of the whole process elsewhere.
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
                loss = model_adapter.training_loss(self.model, batches[0], self.loss)
            loss.backward()
            peak = peak_memory_mib(self._device)
            gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return {
            "parameters_mib": sum(p.nbytes for p in self.model.parameters()) / MIB,
            "buffers_mib": sum(b.nbytes for b in self.model.buffers()) / MIB,
            "gradients_mib": gradients / MIB,
            "saved_for_backward_mib": sum(saved.values()) / MIB,
            "peak_memory_mib": peak,
            "batch_size": model_adapter.num_samples(batches[0]),
        }

    def benchmark_batch_sizes(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Forward and backward for batches of other sizes, made of the samples of the first batch.

        `batch_sizes`: for each its `batch_size`, `fits`, and if so `forward_backward_ms_*`, `backward_ms_*`,
        `samples_per_second` and `peak_memory_mib`. `fastest_batch_size`: the one of most samples per second;
        `largest_batch_size`: the largest that fits; None if none does.
        """
        if min(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)}: must be numbers of samples, at least 1 each")
        rows: list[Results] = []
        for size in sizes:
            try:
                with self._measuring() as batches:
                    found, _ = self._train([model_adapter.resized(batches[0], size)])
                rows.append({"batch_size": size, "fits": True, **found["float32"]})
            except RuntimeError as error:
                # For the CPU's torch has no exception of its own, only the allocator's name.
                if not lacks_memory(error) and "DefaultCPUAllocator" not in str(error):
                    raise
                rows.append({"batch_size": size, "fits": False})
            torch.cuda.empty_cache()
        rates = {row["batch_size"]: row["samples_per_second"] for row in rows if row["fits"]}
        return {
            "batch_sizes": rows,
            "fastest_batch_size": max(rates, key=rates.__getitem__, default=None),
            "largest_batch_size": max(rates, default=None),
        }

    def compare_precisions(self) -> Results:
        """See `compare_amp_performance`."""
        names = ["float32", *(name for name in AMP_DTYPES if self._device.type == "cuda" or name == "bf16")]
        with self._measuring() as batches:
            found, losses = self._train(batches, names)
        plain_ms, exact = found["float32"]["forward_backward_ms_median"], losses["float32"]
        for name in names[1:]:
            found[name]["speedup"] = plain_ms / found[name]["forward_backward_ms_median"]
            found[name]["loss_relative_difference"] = abs(losses[name] - exact) / max(abs(exact), 1e-30)
        return found

    def run_full_profile(self, save_path: str | Path | None = None) -> dict[str, Any]:
        """All of the above but precisions, with batch sizes from a quarter to four times the loader's.

        Written as JSON if asked to; folders that the path lacks are made. Raises OSError, before anything is measured,
        if it cannot be written.
        """
        if save_path is not None:
            require_writable(Path(save_path))
        with self._measuring() as batches:
            size = model_adapter.num_samples(batches[0])
        # Not a single sample, of which batch norm refuses to train.
        sizes = sorted({max(int(part * size), min(size, 2)) for part in (1 / 4, 1 / 2, 1, 2, 4)})
        is_gpu = self._device.type == "cuda"
        report = {
            "environment": {
                "device": str(self._device),
                "device_name": torch.cuda.get_device_name(self._device) if is_gpu else platform.processor() or "cpu",
                "num_threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "num_parameters": sum(p.numel() for p in self.model.parameters()),
                "repeats": self.repeats,
                "warm_up": self.warm_up,
            },
            "data": self.profile_data_loading(),
            "forward": self.profile_forward_pass(),
            "backward": self.profile_backward_pass(),
            "memory": self.profile_memory(),
            "batch_sizes": self.benchmark_batch_sizes(sizes),
            "timings": self.timings(),
        }
        if save_path is not None:
            write_json(Path(save_path), report)
        return report

    @contextmanager
    def _measuring(self) -> Iterator[list[Any]]:
        """The batches on the device, and the model beside them until the end."""
        with model_adapter.untouched(self.model, self._device):
            self._batches = self._batches or list(self._read())
            if not self._batches:
                raise ValueError("the loader yields no batch")
            if not model_adapter.num_samples(self._batches[0]):
                raise ValueError("the loader's first batch is empty")
            yield self._batches

    def _read(self) -> Iterator[Any]:
        started = time.perf_counter()
        for batch in islice(self.loader, MOST_BATCHES):
            self._loading_ms.append(1e3 * (time.perf_counter() - started))
            yield model_adapter.mapped(batch, lambda tensor: tensor.to(self._device))
            started = time.perf_counter()

    def _call(self, batches: Sequence[Any], name: str, rate: str) -> dict[str, float]:
        timer = Timer(self._device, self.warm_up)
        for i in range(self.warm_up + self.repeats):
            with timer(name):
                model_adapter.call(self.model, batches[i % len(batches)])
        return _speed(timer, batches, name, rate)

    def _train(self, batches: Sequence[Any], precisions: Sequence[str] = ("float32",)) -> tuple[Results, Results]:
        """Forward and backward, in which precisions take turns; by precision what was found, and the first loss.

        Found are `forward_backward_ms_*`, `backward_ms_*`, `samples_per_second`, `peak_memory_mib`.
        """
        gpus = [self._device] if self._device.type == "cuda" else []
        timers = {name: Timer(self._device, self.warm_up) for name in precisions}
        peaks, losses, found = dict.fromkeys(precisions, 0.0), Results(), Results()
        self.model.train()
        for i in range(self.warm_up + self.repeats):
            for name, timer in timers.items():
                forget_peak(self._device)
                with torch.random.fork_rng(gpus):
                    loss = self._train_once(batches[i % len(batches)], timer, AMP_DTYPES.get(name))
                peaks[name] = max(peaks[name], peak_memory_mib(self._device))
                if i == 0:
                    losses[name] = loss.item()
        for name, timer in timers.items():
            speed = _speed(timer, batches, "forward_backward", "samples_per_second")
            backward = spread("backward_", timer.milliseconds("backward"))
            found[name] = {**speed, **backward, "peak_memory_mib": peaks[name]}
        return found, losses

    def _train_once(self, batch: Any, timer: Timer, autocast_to: torch.dtype | None) -> Tensor:
        with timer("forward_backward"):
            with torch.autocast(self._device.type, autocast_to, enabled=autocast_to is not None):
                loss = model_adapter.training_loss(self.model, batch, self.loss)
            with timer("backward"):
                loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def compare_amp_performance(model: nn.Module, loader: Iterable[Any], *args: Any, **options: Any) -> Results:
    """Forward and backward in the model's own precision and under autocast to bf16 and, on a GPU, fp16.

    The precisions take turns, so that a change of the machine's speed hits all of them. By precision:
    `forward_backward_ms_*`, `samples_per_second`, `peak_memory_mib`, and for the autocast ones `speedup` over float32
    and `loss_relative_difference`, that of the first batch. Arguments are those of `PerformanceProfiler`; the model is
    left as it was.
    """
    return PerformanceProfiler(model, loader, *args, **options).compare_precisions()


def _speed(timer: Timer, batches: Sequence[Any], name: str, rate: str) -> dict[str, float]:
    """`{name}_ms_*`, and under the name of the rate samples per second of the median."""
    durations = spread(f"{name}_", timer.milliseconds(name))
    return {**durations, rate: 1e3 * _mean_size(batches) / durations[f"{name}_ms_median"]}


def _mean_size(batches: Sequence[Any]) -> float:
    return sum(map(model_adapter.num_samples, batches)) / len(batches)

"""The flags that the profiling commands have beside those of training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.config import FlagGroup, flag

_JSON = "also write the results to this file"
_STEPS = "optimizer steps to measure"
_SETTLING = "steps before them that do not count"


@dataclass
class StepFlags(FlagGroup):
    """Measuring a step"""

    steps: int = flag(100, _STEPS, at_least=1)
    settling_steps: int = flag(10, _SETTLING, at_least=1)
    trace: Path | None = flag(
        None, "also write a trace of a few more steps to this folder, for https://ui.perfetto.dev or chrome://tracing; "
        "TensorBoard shows it only with the package torch-tb-profiler", metavar="DIR",
    )  # fmt: skip
    json: Path | None = flag(None, _JSON, metavar="FILE")


@dataclass
class ScalingFlags(FlagGroup):
    """Measuring how speed grows with devices"""

    world_sizes: tuple[int, ...] = flag((1, 2), "numbers of devices, as 1,2,4; one device is always measured",
                                        metavar="N", at_least=1)  # fmt: skip
    rounds: int = flag(3, "times that each is started and measured, in turns; medians count", at_least=1)
    steps: int = flag(50, _STEPS + " in each", at_least=1)
    settling_steps: int = flag(10, _SETTLING, at_least=1)
    board: Path | None = flag(None, "also draw the results for TensorBoard in this folder", metavar="DIR")
    json: Path | None = flag(None, _JSON, metavar="FILE")


@dataclass
class BatchSizeFlags(FlagGroup):
    """Measuring batch sizes"""

    min_batch_size: int = flag(8, "the smallest to try; the next ones are twice as large each", at_least=1)
    max_batch_size: int = flag(1024, "the largest to try; on the CPU nothing else bounds it", at_least=1)
    steps: int = flag(20, _STEPS + " for each size", at_least=1)
    settling_steps: int = flag(3, _SETTLING, at_least=1)
    json: Path | None = flag(None, _JSON, metavar="FILE")

    def problems(self) -> list[str]:
        if self.max_batch_size < self.min_batch_size:
            return [f"--max-batch-size {self.max_batch_size}: must be at least --min-batch-size {self.min_batch_size}"]
        return []


@dataclass
class PredictFlags(FlagGroup):
    """Predicting the speed of more devices"""

    world_sizes: tuple[int, ...] = flag((8, 64, 512), "numbers of devices, as 8,64,512", metavar="N", at_least=1)
    bandwidth_gb_s: float | None = flag(
        None, "what a device sends to the next one, in 10^9 bytes per second (default: measured here)", above=0
    )
    latency_us: float | None = flag(
        None, "of one message between two devices, in microseconds (default: measured here)", above=0
    )
    validate: bool = flag(False, "also measure as many devices as this machine has (2 processes on the CPU)")
    rounds: int = flag(3, "times that each measurement is started, in turns; medians count", at_least=1)
    steps: int = flag(50, _STEPS + " in each", at_least=1)
    settling_steps: int = flag(10, _SETTLING, at_least=1)
    json: Path | None = flag(None, _JSON, metavar="FILE")


@dataclass
class CheckFlags(FlagGroup):
    """Checking this machine"""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto takes all GPUs, or the CPU if there is none")
    save_dir: Path = flag(Path("checkpoints"), "where runs are to be saved: the disk that is tested")
    nproc: int | None = flag(
        None, "processes that exchange data, without torchrun (default: one per GPU, 2 on the CPU)", at_least=1
    )
    gpu_ids: tuple[int, ...] | None = flag(
        None, "which of the visible GPUs to use, as 0,1,2 (default: all)", metavar="ID"
    )
    backend: Literal["nccl", "gloo"] | None = flag(
        None, "what carries the exchange (default: nccl on GPUs, gloo on the CPU)"
    )
    dist_timeout_s: float = flag(60.0, "seconds after which a process that waits for another one gives up", above=0)
    json: Path | None = flag(None, _JSON, metavar="FILE")

"""Measures how long saving a large model stalls the training loop, and how much pinned memory it takes."""

import torch

from benchmarks import checkpoint
from benchmarks.autoencoder import Autoencoder
from benchmarks.on_gpu.part import Report, Setting


class Tiny(Autoencoder):
    width, num_layers = 16, 2


def measure(setting: Setting, report: Report) -> None:
    cycles, steps, task = setting.pick((7, 200, checkpoint.LARGE), (2, 2, f"{__file__}:Tiny"))
    for name, value in checkpoint.measure(cycles, steps, setting.device, task).items():
        report.figure(name, value)
    if setting.is_gpu and hasattr(torch.cuda, "host_memory_stats"):
        stats = torch.cuda.host_memory_stats()
        sizes = {name: value for name, value in stats.items() if name.startswith("allocated_bytes")}
        report.figure("page-locked memory, bytes", sizes)

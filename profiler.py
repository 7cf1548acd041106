"""Measures time and memory of training (`python profiler.py --help`), or of any model with PerformanceProfiler."""

import sys

from trainer.profiling.cli import main
from trainer.profiling.performance import PerformanceProfiler, compare_amp_performance

__all__ = ["PerformanceProfiler", "compare_amp_performance", "main"]

if __name__ == "__main__":
    from tasks import TASKS  # not at the top: child processes import this file, and a user may have a package tasks

    sys.exit(main(sys.argv[1:], tasks=TASKS))

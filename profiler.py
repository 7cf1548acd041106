"""Measure where time and memory go: python profiler.py --help, or as a library for any model."""

import sys

from trainer.profiling.cli import main
from trainer.profiling.performance import PerformanceProfiler, compare_amp_performance

__all__ = ["PerformanceProfiler", "compare_amp_performance", "main"]

if __name__ == "__main__":
    from tasks import TASKS  # not in processes that import this file: a user may have a package of that name

    sys.exit(main(sys.argv[1:], tasks=TASKS))

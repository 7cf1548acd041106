"""Public names for task files and scripts, such as `from lockstep import Task`, in a clone or an installed package.

In a clone, this package imports the names from the neighbouring packages. When installed, it contains these packages.
"""

from typing import TYPE_CHECKING, Any

from trainer import __all__ as _of_trainer
from trainer import __getattr__ as _of_name
from trainer import __version__

if TYPE_CHECKING:
    from tasks.tabular_classifier import TabularClassifier
    from trainer import *
    from trainer.profiling.performance import PerformanceProfiler, compare_amp_performance

__all__ = [*_of_trainer, "PerformanceProfiler", "TabularClassifier", "compare_amp_performance"]


def __getattr__(name: str) -> Any:
    if name == "TabularClassifier":
        from tasks.tabular_classifier import TabularClassifier

        return TabularClassifier
    if name in ("PerformanceProfiler", "compare_amp_performance"):
        from trainer.profiling import performance

        return getattr(performance, name)
    return _of_name(name)


def __dir__() -> list[str]:
    return sorted(__all__)

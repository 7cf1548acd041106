"""Public names for task files and scripts, such as `from lockstep import Task`, in a clone or an installed package.

In a clone, this package imports the names from the neighbouring packages. When installed, it contains these packages.
"""

from typing import TYPE_CHECKING, Any

try:
    from trainer import __all__, __version__
    from trainer import __getattr__ as _of_name
except (AttributeError, ImportError) as error:
    raise ImportError(f"{error}; if a file of yours is named trainer.py, rename it: it hides a package") from None

if TYPE_CHECKING:
    from tasks.tabular_classifier import TabularClassifier as TabularClassifier
    from trainer import *
    from trainer.profiling.performance import PerformanceProfiler as PerformanceProfiler
    from trainer.profiling.performance import compare_amp_performance as compare_amp_performance

_NOT_STARRED = ["PerformanceProfiler", "TabularClassifier", "compare_amp_performance"]
"""Names that `from lockstep import *` omits, because a user's modules `data` and `models` may hide what they need."""


def __getattr__(name: str) -> Any:
    if name == "TabularClassifier":
        from tasks.tabular_classifier import TabularClassifier

        return TabularClassifier
    if name in ("PerformanceProfiler", "compare_amp_performance"):
        from trainer.profiling import performance

        return getattr(performance, name)
    return _of_name(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_NOT_STARRED])

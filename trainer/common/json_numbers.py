"""JSON knows no NaN and no infinity: null stands for them, in files that other programs read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def without_nan(value: Any) -> Any:
    """The same with None for each of them, in mappings and sequences of any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [without_nan(item) for item in value] if is_list else value


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics by name, as they were before they were written; an infinity comes back as NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}

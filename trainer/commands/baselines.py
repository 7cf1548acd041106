"""Baselines: scores of simple methods on a run's data, computed before training and shown at its end."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from trainer.common.process import command_of_main
from trainer.flags import RunFlags
from trainer.logs.console import Table, of_headline
from trainer.logs.run_log import RunLog, SilentLog
from trainer.parallel.group import Group
from trainer.task import Baseline, Task


def find_baselines(
    task: Task, group: Group, given: RunFlags, log: RunLog | SilentLog, num_steps: int
) -> dict[str, Baseline]:
    """Scores simple methods and logs the scores; returns the scores to show, best monitored value first.

    All processes must call this function; rank 0 computes the scores. num_steps: optimizer steps of the run.
    """
    if given.no_baselines or task.fitted or type(task).baselines is Task.baselines:
        return {}
    group.activity.enter("scoring simple baselines")
    metric, mode = task.monitor

    sign = -1 if mode == "max" else 1

    def shown(baseline: Baseline) -> Baseline:
        metrics = {name: value for name, value in baseline.metrics.items() if not (given.no_test and "test/" in name)}
        kept = {name: metrics[name] for name in (metric,) if name in metrics} | of_headline(metrics, task.headline)
        return baseline._replace(metrics=kept)

    def found() -> dict[str, Baseline]:
        own = {name: shown(baseline) for name, baseline in task.baselines().items()}
        return dict(sorted(own.items(), key=lambda item: sign * item[1].metrics.get(metric, sign * math.inf)))

    baselines = group.on_main(found)
    values = {name: own.metrics[metric] for name, own in baselines.items() if metric in own.metrics}
    if values:
        log.say(f"Simple baselines reach {metric} {', '.join(f'{x:.4f} ({name})' for name, x in values.items())}.")
    for name, value in values.items():
        log.level(name, metric, value, num_steps)
    return baselines


def beside_baselines(
    baselines: Mapping[str, Baseline], task: str, monitor: tuple[str, str], metrics: dict[str, float],
    best: float | None, folder: Path,
) -> list[str]:  # fmt: skip
    """Returns lines: a table of a run and its baselines, and a note if the run does not beat the best baseline.

    baselines: result of `find_baselines`. task: value of `--task`. monitor: `Task.monitor`. metrics: the run's metrics
    to show. best: the run's best validation score; None without validation.
    """
    if not baselines:
        return []
    (metric, mode), lines = monitor, list[str]()
    own = ({} if best is None else {metric: best}) | metrics
    rows = {"this run": own} | {name: dict(baseline.metrics) for name, baseline in baselines.items()}
    width = max(map(len, rows))
    table = Table(" " * width, lines.append)
    for name, values in rows.items():
        table.row(f"{name:<{width}}", {column: f"{values[column]:.4f}" for column in own if column in values})
    name, first = next(iter(baselines.items()))
    value = first.metrics.get(metric)
    if best is None or value is None or (best > value if mode == "max" else best < value):
        return lines
    flags = f"--task {shlex.quote(task)} {first.flags} --save-dir {shlex.quote(f'{folder}-{name}')}"
    advice = f"; to use it: {command_of_main()} {flags}" if first.flags else ""
    return [*lines, f"On the validation data this run is not better than {name} ({metric} {value:.4f}){advice}"]

"""Loggers of `--logger wandb` (Weights & Biases) and `--logger mlflow` (MLflow).

A resumed run keeps its id in both services.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trainer.common.errors import UserError
from trainer.logs.logger import LoggedRun, Logger, Record
from trainer.task import Picture

PROJECT = "lockstep"


class WandB(Logger):
    """Logs to Weights & Biases; configured by wandb's environment variables. WANDB_PROJECT defaults to lockstep."""

    def __init__(self) -> None:
        self._wandb = _package("wandb")

    def start(self, run: LoggedRun) -> None:
        names = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": run.directory.name, "dir": run.directory}
        self._run = self._wandb.init(id=run.id, resume="allow", config=dict(run.config), **names)

    def metrics(self, record: Record) -> None:
        self._run.log(dict(record.values), step=record.step)

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        self._run.log({name: self._wandb.Image(picture) for name, picture in pictures.items()}, step=step)

    def end(self, state: str) -> None:
        self._run.finish(exit_code=int(state != "finished"))


class MLflow(Logger):
    """Logs to MLflow; configured by environment variables such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self) -> None:
        self._mlflow = _package("mlflow")

    def start(self, run: LoggedRun) -> None:
        tag = f"tags.{PROJECT} = '{run.id}'"
        found = self._mlflow.search_runs(filter_string=tag, output_format="list")
        known = found[0].info.run_id if found else None
        self._mlflow.start_run(known, run_name=run.directory.name, tags={PROJECT: run.id})
        if known is None:
            self._mlflow.log_params(dict(run.config))

    def metrics(self, record: Record) -> None:
        # MLflow forbids "@" in names of metrics, such as ndcg@10
        values = {name.replace("@", "_at_"): value for name, value in record.values.items()}
        self._mlflow.log_metrics(values, record.step)

    def end(self, state: str) -> None:
        self._mlflow.end_run("FINISHED" if state == "finished" else "KILLED")


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"--logger {name}: cannot import {name} ({error}); run pip install {name}") from None


SERVICES: Mapping[str, type[Logger]] = {"wandb": WandB, "mlflow": MLflow}

"""Loggers for tests: one that records its calls, and several that misbehave."""

import json
import os
import threading
import time

from trainer import LoggedRun, Logger

RECORD = "logged.jsonl"
"""Name of the record in the run directory."""


def logged_run(directory, step=0, config=None):
    return LoggedRun("0123456789ab", directory, config or {}, step, last_report=step)


class Recording(Logger):
    """Writes a line for each call, with the method, the process and the arguments."""

    def start(self, run):
        self.file = (run.directory / RECORD).open("a", buffering=1)
        given = {"lr": run.config["lr"], "interval": run.config["log-interval"]}
        self.write("start", id=run.id, step=run.step, last_report=run.last_report, **given)

    def say(self, line):
        self.write("say", line=line)

    def metrics(self, record):
        epoch = record.position.epoch if record.position else None
        self.write("metrics", event=record.event, step=record.step, epoch=epoch, values=dict(record.values))

    def pictures(self, step, pictures):
        self.write("pictures", step=step, shapes={name: picture.shape for name, picture in pictures.items()})

    def end(self, state):
        self.write("end", state=state)
        self.file.close()

    def write(self, method, **told):
        thread = threading.current_thread()
        is_main = thread is threading.main_thread()
        self.file.write(json.dumps({"method": method, "process": os.getpid(), "main_thread": is_main} | told) + "\n")


class WithoutRepeats(Recording):
    """Drops the records that a resumed run repeats, as docs/loggers.md states."""

    def start(self, run):
        path, kept = run.directory / RECORD, []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            record = json.loads(line)
            last = run.step if record.get("event") == "step" else run.last_report
            kept += [line] * (record["method"] == "metrics" and record["step"] <= last)
        path.write_text("".join(kept))
        super().start(run)


class Other(Recording):
    """Second logger, for runs with two loggers."""

    def start(self, run):
        self.file = (run.directory / f"other-{RECORD}").open("a", buffering=1)


class Slow(Recording):
    def write(self, method, **told):
        time.sleep(0.1)
        super().write(method, **told)


class Greedy(Recording):
    """Logger that modifies its arguments."""

    def metrics(self, record):
        super().metrics(record)
        record.values.clear()


class FailsToBegin(Logger):
    def __init__(self):
        raise ConnectionError("no\nserver")


class NeedsMore(Logger):
    def __init__(self, project):
        pass


def misbehaving(method, act):
    def acts(self, *arguments):
        act()

    return type(f"In{method.title()}", (Recording,), {method: acts})


def fail():
    raise ConnectionError("the server\n  is gone")


def block():
    threading.Event().wait()


METHODS = ("start", "say", "metrics", "pictures", "end")
for _method in METHODS:
    globals()[f"FailsIn{_method.title()}"] = misbehaving(_method, fail)
    globals()[f"BlocksIn{_method.title()}"] = misbehaving(_method, block)

"""Loggers for W&B and MLflow follow a run that is resumed, and the example logger posts to a chat."""

import importlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.conftest import ROOT, TINY
from trainer.flags import LOGGERS
from trainer.logs.services import SERVICES

ONE_EPOCH = ["--log-interval", 1, "--epochs", 1]
TWO_EPOCHS = ["--log-interval", 1, "--epochs", 2]


def run_id(directory):
    return json.loads((directory / "config.json").read_text())["run_id"]


@pytest.fixture
def in_two_parts(command, tmp_path):
    """Trains an epoch, resumes for another in a new process; returns the directory."""

    def run(logger, **variables):
        for part in (ONE_EPOCH, TWO_EPOCHS):
            argv = [*TINY, *part, "--save-dir", tmp_path / "run", "--logger", logger]
            out = command("main.py", *argv, **variables).stdout
            assert not [line for line in out.splitlines() if line.startswith("--logger")]
        return tmp_path / "run"

    return run


@pytest.mark.slow
def test_weights_and_biases_gets_flags_and_metrics(in_two_parts):
    pytest.importorskip("wandb", reason="needs wandb")
    directory = in_two_parts("wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    records = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in records] == [f"run-{run_id(directory)}.wandb"] * 2
    for path in records:
        assert b"val/accuracy" in path.read_bytes()


@pytest.mark.slow
def test_mlflow_gets_flags_and_metrics(in_two_parts, tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    directory = in_two_parts("mlflow", MLFLOW_TRACKING_URI=store)
    look = f"""
import json, mlflow
mlflow.set_tracking_uri({store!r})
(run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "grad_norm")
print(json.dumps([run.data.tags["lockstep"], run.data.params["lr"], run.info.status, [m.step for m in history]]))
"""
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [run_id(directory), "0.01", "FINISHED", [1, 2, 3, 4, 5, 6]]


# --- packages that record their calls ----------------------------------------------------------------------------

WANDB = """
calls = []


def init(**settings):
    calls.append(("init", settings))
    return Run()


class Run:
    def log(self, values, step):
        calls.append(("log", step, sorted(values)))

    def finish(self, exit_code):
        calls.append(("finish", exit_code))
"""
MLFLOW = """
from types import SimpleNamespace

runs, calls = {}, []


def search_runs(filter_string, output_format):
    name = filter_string.removeprefix("tags.lockstep = ").strip("'")
    return [SimpleNamespace(info=SimpleNamespace(run_id=runs[name]))] if name in runs else []


def start_run(run_id, run_name, tags):
    runs.setdefault(tags["lockstep"], f"of {run_name}")
    calls.append(("start", run_id))


def log_params(params):
    calls.append(("params", params["lr"]))


def log_metrics(values, step):
    calls.append(("log", step, sorted(values)))


def end_run(status):
    calls.append(("end", status))
"""


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Makes an importable package of a text."""
    (tmp_path / "packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "packages")

    def make(name, text):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "packages" / f"{name}.py").write_text(text)
        return importlib.import_module(name)

    yield make
    for name in LOGGERS:
        sys.modules.pop(name, None)


def test_wandb_resumes_with_the_id_of_the_run(package, run_here, tmp_path):
    calls, directory = package("wandb", WANDB).calls, tmp_path / "run"
    for part in (ONE_EPOCH, TWO_EPOCHS):
        out = run_here(*TINY, *part, "--save-dir", directory, "--logger", "wandb").out
        assert "--logger" not in out
    begun = [settings for name, settings, *_ in calls if name == "init"]
    assert [(its["id"], its["resume"], its["project"]) for its in begun] == [
        (run_id(directory), "allow", "lockstep")
    ] * 2
    assert begun[0]["config"]["lr"] == 0.01
    steps = [step for name, step, *more in calls if name == "log" and "grad_norm" in more[0]]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert any("val/accuracy" in more[0] for name, _, *more in calls if name == "log")
    assert calls.count(("finish", 0)) == 2


def test_mlflow_resumes_the_run_of_the_same_tag(package, run_here, tmp_path):
    calls = package("mlflow", MLFLOW).calls
    for part in (ONE_EPOCH, TWO_EPOCHS):
        assert "--logger" not in run_here(*TINY, *part, "--save-dir", tmp_path / "run", "--logger", "mlflow").out
    assert [call for call in calls if call[0] in ("start", "params", "end")] == [
        ("start", None), ("params", 0.01), ("end", "FINISHED"), ("start", "of run"), ("end", "FINISHED"),
    ]  # fmt: skip
    assert [call[1] for call in calls if call[0] == "log" and "grad_norm" in call[2]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named(name, package, run_here, tmp_path):
    assert SERVICES.keys() == {*LOGGERS}
    (tmp_path / "packages" / f"{name}.py").write_text("raise ImportError('none here')")
    sys.modules.pop(name, None)
    err = run_here(*TINY, *ONE_EPOCH, "--save-dir", tmp_path / "run", "--logger", name, status=2).err
    assert err == f"error: --logger {name}: cannot import {name} (none here); run pip install {name}\n"


class Chat(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_the_example_posts_to_a_chat(train, monkeypatch, tmp_path):
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        server.texts = []
        listens = threading.Thread(target=server.serve_forever, daemon=True)
        listens.start()
        monkeypatch.setenv("WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        out = train(tmp_path, "--logger", ROOT / "examples" / "notify.py:Notify")
        server.shutdown()
        listens.join()
    begin = f"{tmp_path} ({run_id(tmp_path)}): "
    scores = next(line for line in out.splitlines() if line.startswith("Finished, "))
    assert server.texts == [begin + scores, begin + "finished"]

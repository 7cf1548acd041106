"""docs/loggers.md: its loggers follow a run that is stopped and goes on, with the real packages."""

import ast
import inspect
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.conftest import ROOT, TINY
from trainer import Logger

ONE_EPOCH = ["--log-interval", 1, "--epochs", 1]
TWO_EPOCHS = ["--log-interval", 1, "--epochs", 2]


def recipe(heading):
    _, _, text = (ROOT / "docs" / "loggers.md").read_text().partition(f"## {heading}\n")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


@pytest.mark.parametrize("heading", ["Weights & Biases", "MLflow"])
def test_recipes_override_methods_that_there_are(heading):
    (own,) = [node for node in ast.parse(recipe(heading)).body if isinstance(node, ast.ClassDef)]
    methods = {node.name: [argument.arg for argument in node.args.args] for node in own.body}
    assert methods.keys() >= {"start", "metrics", "end"}
    assert methods == {name: list(inspect.signature(getattr(Logger, name)).parameters) for name in methods}


@pytest.fixture
def in_two_parts(command, tmp_path):
    """A run of two epochs, stopped after the first, in processes of its own; returns its directory."""

    def run(heading, class_name, **variables):
        file = tmp_path / f"{class_name.lower()}_logger.py"
        file.write_text(recipe(heading))
        for part in (ONE_EPOCH, TWO_EPOCHS):
            argv = [*TINY, *part, "--save-dir", tmp_path / "run", "--logger", f"{file}:{class_name}"]
            out = command("main.py", *argv, **variables).stdout
            assert not [line for line in out.splitlines() if line.startswith("--logger")]
        return tmp_path / "run"

    return run


def run_id(directory):
    return json.loads((directory / "config.json").read_text())["run_id"]


@pytest.mark.slow
def test_weights_and_biases(in_two_parts):
    pytest.importorskip("wandb", reason="needs wandb")
    directory = in_two_parts("Weights & Biases", "WandB", WANDB_MODE="offline", WANDB_SILENT="true")
    records = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in records] == [f"run-{run_id(directory)}.wandb"] * 2
    for path in records:
        assert b"val/accuracy" in path.read_bytes()


@pytest.mark.slow
def test_mlflow(in_two_parts, tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    directory = in_two_parts("MLflow", "MLflow", MLFLOW_TRACKING_URI=store)
    look = f"""
import json, mlflow
mlflow.set_tracking_uri({store!r})
(run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "grad_norm")
print(json.dumps([run.data.tags["lockstep"], run.data.params["lr"], run.info.status, [m.step for m in history]]))
"""
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [run_id(directory), "0.01", "FINISHED", [1, 2, 3, 4, 5, 6]]


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

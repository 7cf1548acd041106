"""`trainer.fit` trains like the command line and restores its process; `trainer.load` returns the model."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import trainer
from tasks.har import HarTask
from tests.conftest import ROOT, STEPS_PER_EPOCH, TINY, WEIGHTED, assert_same_bits, contents, load
from tests.helpers.weighted_task import Network, Weighted, WeightedObjective
from trainer.api import process_restored
from trainer.common.errors import UserError
from trainer.failure.errors import Failure
from trainer.failure.signals import ONE_CTRL_C_S
from trainer.registry import is_same_task, name_of

SETTINGS = {"epochs": 1, "num_train": 24, "batch_size": 8, "lr": 0.01, "num_threads": 1}
"""The settings of TINY."""


@pytest.fixture(autouse=True)
def alone(no_rank_variables):
    """Removes the rank variables, so that no launcher seems to have started this process."""


class Acting(WeightedObjective):
    """Objective that calls `act` in forward pass number `acts_in` of training."""

    acts_in = None
    num_forwards = 0

    @staticmethod
    def act():
        raise NotImplementedError

    def forward(self, batch, phase="train"):
        if self.training:
            Acting.num_forwards += 1
            if Acting.num_forwards == Acting.acts_in:
                Acting.act()
        return super().forward(batch, phase)


class Actor(Weighted):
    def build_objective(self):
        return Acting(Network(self.config.width, self.config.dropout), self.config.delay_s)


@pytest.fixture
def acts(monkeypatch):
    """Has `Actor` call a function in the forward pass of a later step."""

    def plan(function, steps):
        trials = 1  # a forward pass before the first step
        monkeypatch.setattr(Acting, "num_forwards", 0)
        monkeypatch.setattr(Acting, "acts_in", steps + trials)
        monkeypatch.setattr(Acting, "act", staticmethod(function))

    return plan


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise ZeroDivisionError("by the task") from OverflowError("in it")


def same_run(one, other):
    """Checks that two run directories hold the same scores and, wall times aside, the same last checkpoint."""
    assert_same_bits(load(one / "last.pth"), load(other / "last.pth"))
    metrics = [json.loads((path / "results.json").read_text())["metrics"] for path in (one, other)]
    assert metrics[0] == metrics[1]


# --- the same as the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "no_test": True, "ema_decay": 0.9, "grad_accum_steps": 2}])
def test_fit_trains_like_the_command_line(settings, train, tmp_path, monkeypatch):
    flags = ["--epochs", 2, "--no-test", "--ema-decay", 0.9, "--grad-accum-steps", 2] if settings else []
    train(tmp_path / "cli", *flags)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(int(random.random() * 1e9))
    torch.set_default_dtype(torch.float64)
    try:
        metrics, run = trainer.fit(Weighted, save_dir="fit", fresh=False, resume_from=None, **(SETTINGS | settings))
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    same_run(tmp_path / "cli", tmp_path / "fit")
    assert metrics == json.loads((tmp_path / "fit" / "results.json").read_text())["metrics"] == run.metrics
    configs = [json.loads((tmp_path / name / "config.json").read_text())["config"] for name in ("cli", "fit")]
    assert [config.pop("--save-dir") for config in configs] == [str(tmp_path / "cli"), "fit"]
    assert configs[0] == configs[1]
    assert (run.state, str(run.path)) == ("finished", "fit")


def test_settings_override_files(train, tmp_path):
    lines = [
        f"{name.replace('_', '-')} = {value}" for name, value in (SETTINGS | {"lr": 0.5, "drop_last": "true"}).items()
    ]
    (tmp_path / "my.toml").write_text("\n".join(lines))
    train(tmp_path / "cli", "--batch-size", 7)
    settings = {"lr": 0.01, "batch_size": 7, "drop_last": False}
    trainer.fit(Weighted, config=tmp_path / "my.toml", save_dir=tmp_path / "fit", **settings)
    same_run(tmp_path / "cli", tmp_path / "fit")
    files = [tmp_path / "my.toml", tmp_path / "fit" / "config.json"]
    trainer.fit(Weighted, config=files, save_dir=tmp_path / "again")
    same_run(tmp_path / "cli", tmp_path / "again")


@pytest.mark.parametrize("line", ["seeds = 3", "folds = 2", "eval-only = true", "predict = 'README.md'"])
def test_a_config_file_may_not_start_several_runs(line, tmp_path):
    (tmp_path / "my.toml").write_text(line)
    name = line.partition(" ")[0].replace("-", "_")
    with pytest.raises(trainer.UserError, match=f"^{name}, set in a config file: fit trains one run"):
        trainer.fit(Weighted, config=tmp_path / "my.toml", save_dir=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_config_file_may_start_processes(tmp_path):
    (tmp_path / "two.toml").write_text('multi-gpu = "ddp"\nnproc = 2\ndevice = "cpu"\n')
    _, run = trainer.fit(Weighted, config=tmp_path / "two.toml", save_dir=tmp_path / "run", **SETTINGS)
    assert run.results["world_size"] == 2


def test_a_run_out_of_time_is_paused(tmp_path):
    metrics, run = trainer.fit(Weighted, save_dir=tmp_path, max_minutes=1e-9, **SETTINGS)
    assert (metrics, run.state, run.results) == ({}, "paused", {})
    metrics, run = trainer.fit(Weighted, save_dir=tmp_path, **SETTINGS)
    assert metrics and run.state == "finished"
    longer = SETTINGS | {"epochs": 2, "max_minutes": 1e-9}
    metrics, run = trainer.fit(Weighted, save_dir=tmp_path, **longer)
    assert (metrics, run.state) == ({}, "paused")


def test_each_resumes_runs_of_the_other(train, tmp_path):
    train(tmp_path / "cli")
    train(tmp_path / "cli", "--epochs", 2)
    train(tmp_path / "there")
    trainer.fit(Weighted, save_dir=tmp_path / "there", **(SETTINGS | {"epochs": 2}))
    trainer.fit(Weighted, save_dir=tmp_path / "back", **SETTINGS)
    assert "Resuming after optimizer step 3" in train(tmp_path / "back", "--epochs", 2)
    same_run(tmp_path / "cli", tmp_path / "there")
    same_run(tmp_path / "cli", tmp_path / "back")


def test_the_recorded_command_line_repeats_the_run(cli, tmp_path):
    trainer.fit(Weighted, save_dir=tmp_path, **SETTINGS)
    recorded = json.loads((tmp_path / "config.json").read_text())["command_line"]
    status, out, _ = cli(*recorded)
    assert status == 0 and "This run is finished" in out


def test_a_finished_run_is_found_finished(tmp_path):
    metrics, run = trainer.fit(Weighted, save_dir=tmp_path, **SETTINGS)
    before = contents(tmp_path)
    assert trainer.fit(Weighted, save_dir=tmp_path, **SETTINGS) == (metrics, run)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("step", [1, STEPS_PER_EPOCH + 1])
def test_an_interrupted_fit_saves_and_resumes_bit_identically(step, acts, tmp_path):
    settings = SETTINGS | {"epochs": 2}
    trainer.fit(Actor, save_dir=tmp_path / "whole", **settings)
    acts(interrupt, step)
    metrics, run = trainer.fit(Actor, save_dir=tmp_path / "parts", **settings)
    assert (metrics, run.state, run.results) == ({}, "preempted", {})
    assert trainer.fit(Actor, save_dir=tmp_path / "parts", **settings).run.state == "finished"
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_of_the_scheduler_saves_and_ends_the_script(acts, tmp_path):
    acts(lambda: os.kill(os.getpid(), signal.SIGTERM), 1)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        trainer.fit(Actor, save_dir=tmp_path, **SETTINGS)
    assert trainer.SavedRun(str(tmp_path)).state == "preempted"
    assert trainer.fit(Actor, save_dir=tmp_path, **SETTINGS).run.state == "finished"


def test_a_second_interrupt_does_not_wait(acts, tmp_path):
    acts(lambda: [interrupt(), time.sleep(ONE_CTRL_C_S + 0.1), interrupt()], 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Actor, save_dir=tmp_path, **SETTINGS)
    assert trainer.fit(Actor, save_dir=tmp_path, **SETTINGS).run.state == "finished"


def test_fit_works_in_any_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(trainer.fit(Weighted, save_dir=tmp_path / "a", **SETTINGS)))
    thread.start()
    thread.join()
    trainer.fit(Weighted, save_dir=tmp_path / "b", **SETTINGS)
    assert found[0].run.state == "finished"
    same_run(tmp_path / "a", tmp_path / "b")


def test_history_holds_the_records_in_order(tmp_path):
    run = trainer.fit(Weighted, save_dir=tmp_path, log_interval=1, **SETTINGS).run
    assert [record["event"] for record in run.history] == ["step"] * STEPS_PER_EPOCH + ["epoch", "result"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"a":' * 10**5 + '\n{"event": "st')
    assert len(run.history) == STEPS_PER_EPOCH + 2
    nothing = trainer.SavedRun(tmp_path / "none")
    assert (nothing.state, nothing.results, nothing.metrics, nothing.history) == (None, {}, {}, [])


# --- mistakes ----------------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_together(capsys, tmp_path):
    wrong = {
        "lrr": 1, "num_trian": 3, "epochs": 0, "lr": "fast", "fresh": "yes", "gpu_ids": [], "seeds": 2,
        "predict": "x.csv", "resume_from": tmp_path / "none.pth", "hang_timeout_s": 5, "patience": 3,
    }  # fmt: skip
    with pytest.raises(trainer.UserError) as refusal:
        trainer.fit(Weighted, save_dir=tmp_path / "run", **wrong)
    expected = [
        "lrr: no such setting; did you mean lr?", "num_trian: no such setting; did you mean num_train?",
        "--fresh 'yes': must be True or False", "--gpu-ids: needs at least one value", "seeds: fit trains one run",
        "predict: fit trains one run", "--epochs 0: must be at least 1", "--lr fast: must be a number",
        "--multi-gpu: needs a value", "none.pth: does not exist", "hang_timeout_s: was removed",
        "patience: no such setting; did you mean plateau_patience or early_stopping_patience?",
    ]  # fmt: skip
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(expected) and all(any(part in line for line in lines) for part in expected), lines
    assert capsys.readouterr() == ("", "")
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
    assert not (tmp_path / "run").exists()


def test_a_refusal_is_raised_not_printed(tmp_path, capsys):
    with pytest.raises(trainer.UserError, match="--drop-last"):
        trainer.fit(Weighted, save_dir=tmp_path, drop_last=True, **(SETTINGS | {"batch_size": 100}))
    assert capsys.readouterr().err == ""
    assert trainer.fit(Weighted, save_dir=tmp_path, **SETTINGS).run.state == "finished"


def test_an_error_of_the_task_is_raised_unchanged(acts, capsys, tmp_path):
    acts(fail, 2)
    with pytest.raises(ZeroDivisionError, match="by the task") as raised:
        trainer.fit(Actor, save_dir=tmp_path, **SETTINGS)
    assert raised.traceback[-1].name == "fail"
    assert isinstance(raised.value.__cause__, OverflowError) and not isinstance(raised.value.__context__, Failure)
    assert capsys.readouterr().err == ""
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["state"] == "failed" and "ZeroDivisionError: by the task" in state["message"]
    assert trainer.fit(Actor, save_dir=tmp_path, **SETTINGS).run.state == "finished"


def test_one_run_at_a_time(acts, tmp_path):
    def fit_within():
        trainer.fit(Weighted, save_dir=tmp_path / "inner", **SETTINGS)

    acts(fit_within, 1)
    with pytest.raises(trainer.UserError, match="this process is already training"):
        trainer.fit(Actor, save_dir=tmp_path / "outer", **SETTINGS)
    assert not (tmp_path / "inner").exists()


def test_a_class_that_processes_cannot_import_is_refused(tmp_path):
    class Local(Weighted):
        pass

    with pytest.raises(trainer.UserError, match=r"cannot import .*Local from a notebook, an interactive prompt or"):
        trainer.fit(Local, save_dir=tmp_path / "run", multi_gpu="ddp", nproc=2, device="cpu")
    assert not (tmp_path / "run").exists()
    assert trainer.fit(Local, save_dir=tmp_path / "alone", **SETTINGS).run.state == "finished"


# --- the process afterwards --------------------------------------------------------------------------------------


def global_state():
    return {
        "signals": [signal.getsignal(number) for number in range(1, signal.NSIG)],
        "threads": torch.get_num_threads(),
        "determinism": torch.get_deterministic_debug_mode(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32,
        "attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "dtype": torch.get_default_dtype(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr),
        "group": torch.distributed.is_initialized(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch 2.9 or newer")
def test_a_precision_set_only_for_convolutions_is_restored():
    """Once `conv.fp32_precision` is set, reading torch's older switch `allow_tf32` raises."""
    cudnn = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    try:
        before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
        with process_restored():
            cudnn.allow_tf32 = False
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == before == ("ieee", "tf32")
    finally:
        cudnn.allow_tf32 = True


@pytest.mark.parametrize("end", ["finished", "interrupted", "failed", "refused"])
def test_fit_restores_the_process(end, acts, tmp_path):
    def change_everything():
        random.random()
        np.random.random()
        sys.path.insert(0, str(tmp_path))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # which a run on a GPU sets
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False
        torch.backends.cuda.enable_cudnn_sdp(False)
        {"finished": int, "interrupted": interrupt, "failed": fail, "refused": int}[end]()

    acts(change_everything, 1)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        before = global_state()
        try:
            lr = 1e30 if end == "refused" else 0.01  # it diverges
            trainer.fit(
                Actor,
                save_dir=tmp_path / "run",
                **(SETTINGS | {"num_threads": torch.get_num_threads() + 1, "lr": lr, "warmup_steps": 0}),
            )
            assert end in ("finished", "interrupted")
        except (ZeroDivisionError, trainer.UserError):
            assert end in ("failed", "refused")
        assert global_state() == before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_a_run_ignores_global_settings_of_the_process(around, train, tmp_path):
    train(tmp_path / "cli")
    with around():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
        model = trainer.fit(Weighted, save_dir=tmp_path / "fit", **SETTINGS).run.load()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()) == before
    same_run(tmp_path / "cli", tmp_path / "fit")
    assert {(value.device.type, value.is_inference()) for value in model.parameters()} == {("cpu", False)}


def test_the_lock_of_tqdm_is_restored():
    """A user may have created bars before the trainer is imported."""
    code = "from tqdm import tqdm; lock = tqdm.get_lock(); import trainer.logs.console; assert tqdm.get_lock() is lock"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- the trained model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9, "dtype": "float64"}])
def test_load_returns_the_scored_model(settings, tmp_path):
    run = trainer.fit(Weighted, save_dir=tmp_path, **(SETTINGS | settings | {"epochs": 3, "dropout": 0.5})).run
    expected = load(tmp_path / "best.pth")["model"]
    before, files = global_state(), contents(tmp_path)
    for model in (run.load(), trainer.load(str(tmp_path)), trainer.load(tmp_path, Weighted)):
        assert type(model).__name__ == "Network" and not any(module.training for module in model.modules())
        weights = model.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert {value.device.type for value in weights.values()} == {"cpu"}
    assert global_state() == before and contents(tmp_path) == files


def test_load_finds_a_class_defined_in_a_function(tmp_path):
    """Loading the model must not execute the script again."""
    (tmp_path / "script.py").write_text(f"""
import gc
import trainer
from tests.helpers.weighted_task import Weighted

def make():
    class Mine(Weighted):
        pass
    return Mine

print("script")
mine = make()
trainer.fit(mine, save_dir={str(tmp_path / "run")!r}, **{SETTINGS})
print(type(trainer.load({str(tmp_path / "run")!r})).__name__)
del mine
gc.collect()
try:
    trainer.load({str(tmp_path / "run")!r})
except trainer.UserError as error:
    print(error)
""")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    first, *_, found, last = done.stdout.splitlines()
    assert (first, found, done.stdout.count("script\n"), done.stderr) == ("script", "Network", 1, "")
    assert "does not execute" in last and last.endswith("pass the task class as task=")


def test_load_names_what_is_missing(train, tmp_path):
    with pytest.raises(trainer.UserError, match="contains no intact checkpoint"):
        trainer.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(trainer.UserError, match="contains no intact checkpoint"):
        trainer.load(tmp_path)
    (tmp_path / "gone.py").write_text("from tests.helpers.weighted_task import Weighted\nclass Gone(Weighted): pass\n")
    train(tmp_path / "run", "--task", f"{tmp_path / 'gone.py'}:Gone")
    (tmp_path / "gone.py").unlink()
    sys.modules.pop("gone")
    with pytest.raises(trainer.UserError, match=r"gone\.py:Gone: .* pass the task class as task="):
        trainer.load(tmp_path / "run")
    assert isinstance(trainer.load(tmp_path / "run", Weighted), Network)
    with pytest.raises(trainer.UserError, match="does not fit the model"):
        trainer.load(tmp_path / "run", HarTask)


def test_values_of_the_task_flag():
    class Weighted(HarTask):
        pass

    assert name_of(HarTask) == "har"
    assert name_of(Actor) == f"{__file__}:Actor"
    assert name_of(Weighted).startswith(f"{__file__}:test_values_of_the_task_flag")
    Weighted.__module__, Weighted.__qualname__ = "nowhere", "Weighted"
    assert name_of(Weighted) == "__main__:Weighted"
    assert is_same_task("__main__:Weighted", WEIGHTED) and is_same_task(WEIGHTED, "__main__:Weighted")
    assert not is_same_task("__main__:Other", WEIGHTED) and not is_same_task(f"other.py{WEIGHTED[-9:]}", WEIGHTED)


def test_import_trainer_is_light():
    code = (
        "import sys, trainer; trainer.UserError; assert 'torch' not in sys.modules and 'trainer.cli' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- several processes -------------------------------------------------------------------------------------------

SCRIPT = """
import sys

import trainer
from tests.helpers.weighted_task import Weighted

class Mine(Weighted):
    pass

def main():
    settings = dict(epochs=1, num_train=24, batch_size=8, lr=0.01, num_threads=1, global_batch_size=8)
    for name in sys.argv[1:]:
        metrics, run = trainer.fit(Mine, save_dir=name, {more} **settings)
        assert metrics == run.metrics and bool(metrics) == (run.state == "finished")
        print(f"returned {{run.state}}\\n", end="")
    assert isinstance(trainer.load(name).training, bool)

{guard}
    main()
"""
GUARD = 'if __name__ == "__main__":'
OWN = "multi_gpu='ddp', nproc=2, device='cpu',"


@pytest.fixture
def script(tmp_path, environment):
    """Runs SCRIPT in a folder and session of its own; returns the finished process.

    meanwhile: called with the process while it runs.
    """

    def run(guard=GUARD, more="", launcher=(sys.executable,), folders=("a", "b"), meanwhile=lambda process: None):
        (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard, more=more))
        with subprocess.Popen(
            [*launcher, "script.py", *folders], cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                meanwhile(process)
                out, err = process.communicate(timeout=120)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def flags_of_script(directory, task):
    return ["--task", task, "--save-dir", directory, *TINY[2:], "--global-batch-size", 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "num_told"),
    [({"launcher": ("torchrun", "--nproc_per_node=2")}, 2), ({"more": OWN}, 1)],
    ids=["torchrun", "its own"],
)
def test_fit_in_processes(start, num_told, script, command, tmp_path):
    """Both calls of fit in one script train like the command line, which then finds their runs finished."""
    done = script(**start)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("returned finished") == 2 * num_told
    ddp = ("main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu")
    task = f"{tmp_path / 'script.py'}:Mine"
    command(*ddp, *flags_of_script(tmp_path / "cli", task))
    for name in "ab":
        same_run(tmp_path / "cli", tmp_path / name)
    assert "This run is finished" in command(*ddp, *flags_of_script(tmp_path / "a", task)).stdout


@pytest.mark.slow
def test_all_ranks_raise_the_error(script):
    done = script(launcher=("torchrun", "--nproc_per_node=2", "--no-python", sys.executable), more="lrr=1,")
    assert done.returncode == 1
    assert len(re.findall("UserError: lrr: no such setting", done.stderr)) >= 1


@pytest.mark.slow
def test_a_script_without_a_guard_is_refused(script, tmp_path):
    done = script(more=OWN, guard="if True:")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and 'put the call below `if __name__ == "__main__":`' in done.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_an_interrupt_stops_all_processes_cleanly(script, tmp_path):
    """A notebook's server sends SIGINT to the process that called `fit` and to its whole group."""

    def interrupt_group(process):
        deadline = time.monotonic() + 60
        while trainer.SavedRun(tmp_path / "a").state != "running":
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)

    done = script(more=OWN + "delay_s=0.5,", folders=("a",), meanwhile=interrupt_group)
    assert done.returncode == 0, done.stderr
    assert "returned preempted" in done.stdout
    assert "returned finished" in script(more=OWN, folders=("a",)).stdout


def test_killed_processes_are_not_reported_as_stopped(monkeypatch, tmp_path):
    """state.json still holds the outcome of an earlier start when the processes are killed."""
    (tmp_path / "state.json").write_text('{"state": "preempted"}')
    again = {"save_dir": tmp_path, "multi_gpu": "ddp", "nproc": 2, "device": "cpu"}
    monkeypatch.setattr("trainer.api.start_processes", lambda *_: 128 + signal.SIGKILL)
    with pytest.raises(Failure, match="ended with status 137"):
        trainer.fit(Weighted, **again)
    monkeypatch.setattr("trainer.api.start_processes", lambda *_: 128 + signal.SIGTERM)
    for state in ("preempted", "failed"):
        (tmp_path / "state.json").write_text(f'{{"state": "{state}"}}')
        with pytest.raises(SystemExit, match="143"):
            trainer.fit(Weighted, **again)


@pytest.mark.slow
def test_failed_or_refused_processes_raise(tmp_path):
    settings = SETTINGS | {"multi_gpu": "ddp", "nproc": 2, "device": "cpu", "save_dir": tmp_path}
    with pytest.raises(trainer.UserError, match="started failed; see their messages on standard error"):
        trainer.fit(Weighted, **(settings | {"drop_last": True, "batch_size": 100}))
    with pytest.raises(Failure, match="ended with status 1"):
        trainer.fit(Failing, **settings)


class Failing(Weighted):
    def build_objective(self):
        fail()


class Unlearnable(Weighted):
    def build_objective(self):
        return WeightedObjective(torch.nn.Identity(), 0.0)


def test_a_model_without_parameters_is_refused_with_a_message(tmp_path):
    with pytest.raises(UserError, match=r"Unlearnable.param_groups: phase 'train': trains no parameters"):
        trainer.fit(Unlearnable, save_dir=tmp_path, **SETTINGS)


class Undefined(Weighted):
    def summarise(self, sums):
        return super().summarise(sums) | {"auc": float("nan"), "ratio": float("inf")}


def test_nan_metrics_are_null_in_strict_json(tmp_path):
    metrics, _ = trainer.fit(Undefined, save_dir=tmp_path, **SETTINGS)
    assert np.isnan(metrics["test/auc"])

    def refuse(constant):
        raise AssertionError(constant)

    written = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert (written["metrics"]["test/auc"], written["metrics"]["test/ratio"]) == (None, None)
    assert written["metrics"]["test/loss"] == metrics["test/loss"]

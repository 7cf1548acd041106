"""Tests benchmarks/gpu.py on the CPU."""

import importlib
import json
import re
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu import MACHINE, PARTS, Results, read_flags, run_parts
from benchmarks.on_gpu import exact, part, poisoned, snapshot
from benchmarks.on_gpu.part import Report, Setting
from tests.conftest import ROOT

IN_THIS_PROCESS = [name for name in PARTS if name not in ("ranks", "profiled", "whole")]


@pytest.fixture
def setting(tmp_path, cache_dir, signals_restored):
    (cache_dir / "lockstep").mkdir(exist_ok=True)
    (tmp_path / part.CACHE).symlink_to(cache_dir / "lockstep")
    return Setting("cpu", tmp_path / "part", is_small=True)


def found_by(measure, setting):
    """Returns what a part reports, by name."""
    setting.folder.mkdir()
    found = []
    measure(setting, Report(found.append))
    return {each["name"]: each for each in found}


def wrong(found):
    return [each for each in found.values() if each.get("holds") is False]


# --- the parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_a_benchmark_part_runs_on_the_cpu(name, setting):
    found = found_by(importlib.import_module(f"benchmarks.on_gpu.{name}").measure, setting)
    assert found
    assert not wrong(found)


@pytest.mark.slow
def test_script_runs_on_the_cpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert all(found["status"] == "ended" and found["figures"] for found in parts.values())


def test_part_exact_detects_different_weights(setting, monkeypatch):
    def with_another_seed(setting, name, *flags, device=None, **more):
        return part.run(setting, name, *flags, *(["--seed", 1] if "again" in name else []), device=device, **more)

    monkeypatch.setattr(exact, "run", with_another_seed)
    names = [each["name"] for each in wrong(found_by(exact.measure, setting))]
    assert names == ["kg-lightgcn, weights", "kg-lightgcn, scores"]


def test_values_with_other_bits_are_unequal():
    assert part.unlike({"model": torch.tensor([0.0])}, {"model": torch.tensor([-0.0])}) == ["/model"]
    assert part.unlike({"model": torch.tensor([torch.nan])}, {"model": torch.tensor([torch.nan])}) == []


def test_part_poisoned_detects_an_applied_step(setting, monkeypatch):
    monkeypatch.setattr(
        "trainer.loop.precision._step_on_host", lambda optimizers, *rest: [o.step() for o in optimizers]
    )
    names = [each["name"] for each in wrong(found_by(poisoned.measure, setting))]
    assert {"off", "bf16"} <= set(names)  # weights that are not finite are never saved


def test_part_snapshot_detects_later_changes(setting, monkeypatch):
    monkeypatch.setattr(snapshot, "snapshot", lambda state, reusable: state)
    names = [each["name"] for each in wrong(found_by(snapshot.measure, setting))]
    assert names == [f"copy {count} is of its moment" for count in (1, 2, 3)]


def test_a_benchmark_part_continues_after_an_exception(setting):
    def measure(setting, report):
        report.attempt("first", lambda: 1 / 0)
        report.check("second", True)

    found = found_by(measure, setting)
    assert found["first"] == {"name": "first", "value": "ZeroDivisionError: division by zero", "holds": False}
    assert found["second"]["holds"]


# --- the process that starts the parts ---------------------------------------------------------------------------

TELL = "import json, sys, time; print(json.dumps({'name': 'x', 'value': 3, 'holds': %s}), flush=True); "


def outcome(tmp_path, limit_s, all_s=60.0, **programs):
    """Runs Python programs as parts; returns the parts of the JSON file, and the exit status."""
    commands = {name: [sys.executable, "-c", program] for name, program in programs.items()}
    results = Results(tmp_path / "gpu.json")
    run_parts(commands, dict.fromkeys(commands, limit_s), all_s, tmp_path / "logs", results)
    status = results.conclude()
    return json.loads((tmp_path / "gpu.json").read_text())["parts"], status


@pytest.mark.slow
def test_a_benchmark_part_that_overruns_keeps_its_figures_and_the_next_runs(tmp_path):
    child = "import subprocess; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.monotonic()
    parts, status = outcome(tmp_path, 3.0, long=TELL % True + child, short=TELL % True)
    assert time.monotonic() - started < 50
    assert parts["long"]["status"] == "ended after its 0.05 minutes"
    assert parts["long"]["figures"] == parts["short"]["figures"] == {"x": 3}
    assert parts["short"]["status"] == "ended"
    assert status == 1


def test_failed_checks_and_errors_are_reported(tmp_path, capsys):
    parts, status = outcome(tmp_path, 60.0, wrong=TELL % False, failed="raise SystemExit('in vain')", right=TELL % True)
    assert parts["wrong"] == {
        "status": "ended",
        "figures": {"x": 3},
        "do_not_hold": ["x"],
        "seconds": pytest.approx(0, abs=60),
    }
    assert parts["failed"]["status"].startswith("failed with status 1")
    assert parts["right"]["do_not_hold"] == []
    out = capsys.readouterr().out
    assert "WRONG x: 3" in out
    assert "in vain" in out
    assert "wrong: x\nfailed: failed with status 1" in out
    assert status == 1


def test_no_benchmark_part_starts_without_time_or_machine(tmp_path):
    parts, status = outcome(tmp_path, 60.0, 0.0, short=TELL % True)
    assert parts["short"]["status"] == "left out, because the time was up"
    parts, status = outcome(tmp_path, 60.0, **{MACHINE: "raise SystemExit(1)", "other": TELL % True})
    assert list(parts) == [MACHINE]
    assert status == 1


def test_figures_are_written_before_the_part_ends(tmp_path):
    """A script that is cut short keeps the figures found so far."""
    look = "time.sleep(.5); print(json.dumps({'name': 'seen', 'value': open(sys.argv[-1] + '/../../gpu.json').read()}))"
    results = tmp_path / "gpu.json"
    program = (TELL % True) + look.replace("sys.argv[-1] + '/../../gpu.json'", repr(str(results)))
    parts, _ = outcome(tmp_path, 60.0, part=program)
    seen = json.loads(parts["part"]["figures"]["seen"])["parts"]["part"]
    assert (seen["status"], seen["figures"]) == ("under way", {"x": 3})


def test_the_page_lists_every_part_and_its_commands_parse():
    text = (ROOT / "docs" / "gpu.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    assert {name: float(minutes) for name, minutes in told} == PARTS
    commands = re.findall(r"python benchmarks/gpu.py(.*?)[`\n]", text)
    assert len(commands) == 3
    for arguments in commands:
        assert read_flags(arguments.split()).names


def test_command_line_is_refused_in_one_sentence():
    command = [sys.executable, "benchmarks/gpu.py", "--parts"]
    done = subprocess.run([*command, "exact,speed"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such part: speed; choose from machine, exact" in done.stderr

"""One process fails: what it has learnt is kept, and the same command goes on when the mistake is mended."""

import json

import pytest

from tests.conftest import ROOT, assert_same_bits, load
from tests.faults.faulty_group import TINY

RUN = [*TINY[:-4], "--save-dir"]  # no checkpoint but at the end of the epochs

WRONG = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.weighted_task import Weighted

class Wrong(Weighted):
    @property
    def monitor(self):
        return ("val/f1" if "MISTAKE" in os.environ else "val/loss"), "min"

    def summarise(self, sums):
        metrics = super().summarise(sums)
        return metrics if os.environ.get("MISTAKE") != "summarise" else {{"loss": sums["loss"]}}
"""


@pytest.mark.parametrize(("place", "num_steps"), [("forward", 2), ("evaluation", 12)])
def test_an_exception_costs_no_step(place, num_steps, run_here, tmp_path, monkeypatch):
    run_here(*RUN, tmp_path / "whole")
    monkeypatch.setenv("LOCKSTEP_FAULT", f"raise {place} 0")
    out, err = run_here(*RUN, tmp_path / "run", status=1)
    assert "ValueError: the sky fell" in err
    assert f"The state after optimizer step {num_steps} is saved; the same command goes on from there." in out
    monkeypatch.delenv("LOCKSTEP_FAULT")
    out, _ = run_here(*RUN, tmp_path / "run")
    assert f"Resuming after optimizer step {num_steps}" in out
    assert_same_bits(load(tmp_path / "whole" / "final.pth")["model"], load(tmp_path / "run" / "final.pth")["model"])
    results = [json.loads((tmp_path / name / "results.json").read_text())["metrics"] for name in ("whole", "run")]
    assert results[0] == results[1]


@pytest.mark.parametrize("mistake", ["monitor", "summarise"])
def test_a_mistake_in_metrics_costs_no_step(mistake, run_here, tmp_path, monkeypatch):
    (tmp_path / f"wrong_{mistake}.py").write_text(WRONG)
    argv = ["--task", f"{tmp_path}/wrong_{mistake}.py:Wrong", *TINY[2:-4], "--save-dir"]
    run_here(*argv, tmp_path / "whole")
    monkeypatch.setenv("MISTAKE", mistake)
    _, err = run_here(*argv, tmp_path / "run", status=2)
    assert f"Wrong.{mistake}: " in err
    num_steps = load(tmp_path / "run" / "last.pth")["step"]
    assert num_steps > 0
    monkeypatch.delenv("MISTAKE")
    out, _ = run_here(*argv, tmp_path / "run")
    assert f"Resuming after optimizer step {num_steps}" in out
    assert_same_bits(load(tmp_path / "whole" / "final.pth")["model"], load(tmp_path / "run" / "final.pth")["model"])

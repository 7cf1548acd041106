"""Runs the script of docs/script.md, and resumes it. tests/test_script.py tests two processes."""

import re
import subprocess
import sys

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "script.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_script_runs_and_resumes(tmp_path, environment):
    def run(more):
        shown = "\n    print(run.state, metrics, tuple(logits.shape))\n"
        (tmp_path / "train.py").write_text(SCRIPT.replace("epochs=10", f"num_threads=1, {more}") + shown)
        command = [sys.executable, "train.py"]
        env = {**environment, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    assert "val/accuracy" in run("epochs=1")
    resumed = run("epochs=2")
    assert "Resuming after optimizer step" in resumed and "(400, 2)" in resumed


def test_the_page_is_short_and_linked_from_the_readme():
    assert len(PAGE.splitlines()) <= 60
    readme = (ROOT / "README.md").read_text()
    assert "docs/script.md" in readme
    call = next(line.strip() for line in SCRIPT.splitlines() if "lockstep.fit" in line)
    assert call.partition(", save_dir")[0] in readme

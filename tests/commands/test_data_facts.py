"""What a trained model has to know of its training data stays with its weights."""

import json
import shlex

import pytest

from tests.conftest import load
from trainer import load as load_run

TASK = ["--task", "tests/helpers/lexicon_task.py:Lexicon", "--num-threads", 1, "--lr", 1.0]


@pytest.fixture
def trained(on_cpu, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcabcabcabc" * 8)
    on_cpu(*TASK, "--text", text, "--epochs", 6, "--save-dir", run)
    return text, run


def test_a_run_is_used_without_its_data(trained, on_cpu, tmp_path):
    text, run = trained
    assert load(run / "best.pth")["data_facts"] == {"letters": "abc"}
    assert json.loads((run / "config.json").read_text())["data_facts"] == {"letters": "abc"}
    text.unlink()
    new = tmp_path / "new.txt"
    new.write_text("bac")
    told = f"From the run in {run}: {shlex.join(TASK[:2])}, --text {text}"
    assert on_cpu("--predict", new, "--save-dir", run, "--num-threads", 1) == ("next\nc\nb\na\n", [told])
    assert load_run(run).weight.shape == (3, 3)


@pytest.mark.parametrize(("more", "advice"), [(["--epochs", 7], ", or start over with --fresh"), (["--eval-only"], "")])
def test_weights_do_not_meet_other_data_of_the_same_size(more, advice, trained, on_cpu):
    text, run = trained
    text.write_text("abdabdabdabd" * 8)
    _, err = on_cpu(*TASK, "--text", text, "--save-dir", run, *more, status=2)
    assert len(err) == 1 and "have other letters than those that the checkpoint" in err[0], err
    assert err[0].endswith(f": abd, not abc; give it the same data{advice}")


def test_flags_that_name_other_data_are_told(trained, on_cpu, tmp_path):
    text, run = trained
    other = tmp_path / "other.txt"
    other.write_text("abdabdabdabd" * 8)
    for more, advice in (["--eval-only"], ""), (["--epochs", 7], ", or choose another --save-dir"):
        _, err = on_cpu(*TASK, "--text", other, "--save-dir", run, *more, status=2)
        assert err[0].endswith(f": abd, not abc; undo the change of --text (was {text}){advice}"), err

"""Settings from files: which layer has priority, what is refused, and that a file repeats a run bit-identically."""

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch

from tasks import TASKS
from tests.conftest import ROOT, TINY, WEIGHTED, assert_messages, assert_same_bits, contents, launcher, load
from tests.docs.test_docs import OWN_TASK, code_blocks, commands_in, reference
from tests.helpers.weighted_task import Weighted, WeightedFlags
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.config import flag, options
from trainer.flags import RETIRED, TRAINER_GROUPS, ConfigFlags
from trainer.profiling.batch_size import BatchSizeFlags
from trainer.profiling.cli import names_several_devices, not_measured
from trainer.profiling.processes import FOR_SEVERAL_DEVICES
from trainer.profiling.scaling import ScalingFlags
from trainer.profiling.step import StepFlags
from trainer.registry import find_task

TINY_AS_TOML = "\n".join(f"{name[2:]} = {json.dumps(value)}" for name, value in zip(TINY[::2], TINY[1::2], strict=True))


class Stating(Weighted):
    defaults: ClassVar = {
        "lr": 0.5, "epochs": 5, "warmup_epochs": 1.0, "optimizer": "sgd", "momentum": 0.9, "drop_last": True
    }  # fmt: skip


@dataclass
class OddFlags(WeightedFlags):
    """Task: every kind of flag"""

    text: str = flag('"quoted" \\ back\nand on \x7f\x01 ünïcödé 🙂', "any text")
    empty: str = flag("", "no text")
    path: Path = flag(Path("~/some where"), "a file")
    paths: tuple[Path, ...] | None = flag(None, "files")
    sizes: tuple[int, ...] = flag((), "sizes")
    shares: tuple[float, ...] = flag((1e-08, 1e16), "shares, 100 % in all")
    augment: bool = flag(True, "leave it out")


class Odd(Weighted):
    Config = OddFlags


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a task's file adds its folder
    monkeypatch.setitem(TASKS, "stating", Stating)
    monkeypatch.setitem(TASKS, "odd", Odd)


@pytest.fixture
def write(tmp_path):
    """Writes a config file; returns its path as text."""

    def write(text, name="some.toml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def read(*argv, several_devices=False) -> Flags:
    flags, problems = parse([str(arg) for arg in argv], several_devices)
    assert problems == []
    return flags


def without_files(flags: Flags) -> Flags:
    return replace(flags, files=None)


# --- which layer has priority ------------------------------------------------------------------------------------


def test_the_command_line_overrides_files_and_files_override_the_task(write):
    one = write("task = 'stating'\nlr = 0.25\nbatch-size = 4\nwidth = 3\nmax_grad_norm = 2\n", "one.toml")
    two = write('"--batch-size" = 8\nwidth = 5\n', "two.toml")
    for files in (["--config", one, two], ["--config", one, "--config", two], ["--config", one, f"--config={two}"]):
        flags = read("--width", 7, *files)
        assert (flags.run.epochs, flags.learning.lr, flags.batch.batch_size, flags.task.width) == (5, 0.25, 8, 7)
        assert flags.learning.max_grad_norm == 2.0 and isinstance(flags.learning.max_grad_norm, float)
    assert read("--config", two, one, "--task", "stating").batch.batch_size == 4
    assert isinstance(read("--config", one, "--task", WEIGHTED).learning.lr, float)


@pytest.mark.parametrize("name", RETIRED)
def test_retired_flags_are_ignored_in_files_and_refused_on_the_command_line(name, write):
    key, value = name.removeprefix("--"), {"--job-id": '"12"', "--take-over-lock": "true"}.get(name, "1.3")
    record = write(json.dumps({"config": {name: json.loads(value), "--no-amp": True, "--amp": "auto"}}), "config.json")
    for file in (write(f"{key} = {value}\nno-amp = true", "old.toml"), record):
        assert read("--task", "stating", "--config", file).precision.amp == "off"
    _, problems = parse(["--task", "stating", f"{name}={value}"], several_devices=False)
    assert problems == [f"{name}={value}: {RETIRED[name]}"]


@pytest.mark.parametrize(
    ("lower", "higher", "expected"),
    [
        ("warmup-epochs = 2", "warmup-steps = 0", {"warmup_epochs": None, "warmup_steps": 0}),
        ("warmup-steps = 7", "", {"warmup_epochs": None, "warmup_steps": 7}),
        ("optimizer = 'sgd'\nnesterov = true", "optimizer = 'adam'", {"momentum": None, "nesterov": False}),
        ("nesterov = true", "optimizer = 'sgd'", {"optimizer": "sgd", "momentum": 0.9, "nesterov": True}),
        ("nesterov = true", "lr = 1", {"momentum": 0.9, "nesterov": True, "lr": 1.0}),
        pytest.param(
            "", "optimizer = 'muon'\nmomentum = 0.5", {"momentum": 0.5},
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
        ),
        ("grad-accum-steps = 2", "global-batch-size = 8", {"grad_accum_steps": 1, "global_batch_size": 8}),
        ("amp = 'bf16'", "no-amp = true", {"amp": "off"}),
        ("amp = 'bf16'", "no-amp = false", {"amp": "bf16"}),
        ("init-from = 'main.py'", "resume-from = 'main.py'", {"init_from": None, "resume_from": Path("main.py")}),
        ("resume-from = 'main.py'", "eval-only = true", {"resume_from": None, "eval_only": True}),
        ("init-from = 'main.py'", "eval-only = true", {"init_from": None, "eval_only": True}),
        ("resume-from = 'main.py'", "eval-only = false", {"resume_from": Path("main.py"), "eval_only": False}),
        ("init-from-partial = 'main.py'", "predict = 'x.csv'", {"init_from_partial": None}),
        ("drop-last = false", "", {"drop_last": False}),
    ],
)  # fmt: skip
def test_a_setting_displaces_what_it_excludes_in_lower_layers(lower, higher, expected, write):
    lower_file, higher_file = write(f"task = 'stating'\n{lower}", "lower.toml"), write(higher, "higher.toml")
    as_flags = [
        f"--{name.strip()}={json.loads(value.replace(chr(39), chr(34)))}".replace("True", "true").replace("F", "f")
        for name, value in (line.split("=") for line in higher.splitlines())
    ]
    for argv in (["--config", lower_file, higher_file], ["--config", lower_file, *as_flags]):
        flags = read(*argv)
        groups = (flags.learning, flags.batch, flags.precision, flags.checkpoint)
        found = {name: value for group in groups for name, value in vars(group).items() if name in expected}
        assert found == expected


def test_exclusive_flags_of_a_task_displace_lower_layers_and_are_refused_together(write, monkeypatch):
    @dataclass
    class MarkedFlags(WeightedFlags):
        """Task: marks"""

        model: Literal["small", "big"] = flag("small", "which")
        layers: int = flag(1, "of a big one", needs={"model": ("big",)})
        share: float | None = flag(None, "a part", excludes=("count",))
        count: int | None = flag(None, "so many")

    monkeypatch.setitem(TASKS, "marked", type("Marked", (Weighted,), {"Config": MarkedFlags}))
    file = write("task = 'marked'\nmodel = 'big'\nlayers = 3\nshare = 0.5")
    task = read("--config", file, "--count", 7).task
    assert (task.model, task.layers, task.share, task.count) == ("big", 3, None, 7)
    _, problems = parse(["--config", file, "--share=0.1", "--count=7", "--model=small"], several_devices=False)
    assert problems == [
        f"--layers 3: --model small does not use it; leave it out, or choose big (--layers is set in {file})",
        "--share 0.1 and --count 7: cannot be combined; give only one of them",
    ]


def test_the_profiler_accepts_config_files(write):
    argv = ["--task", WEIGHTED, "--config", write("steps = 7\nnproc = 2"), *FOR_SEVERAL_DEVICES]
    flags, problems = parse(argv, True, StepFlags)
    assert (flags.tool.steps, flags.multi.nproc, problems) == (7, 2, [])
    _, problems = parse(["--task", WEIGHTED, "--config", write("steps = 7")], False)
    assert len(problems) == 1 and "steps: no such flag" in problems[0]


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    (tmp_path / "marked.toml").write_text("lr = 0.5", encoding="utf-8-sig")
    assert read("--config", tmp_path / "marked.toml").learning.lr == 0.5


def test_a_conflict_with_the_launcher_names_the_config_file(write, cli, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    file = write("multi-gpu = 'ddp'\nnproc = 2")
    status, _, err = cli("--task", WEIGHTED, "--config", file, several_devices=True)
    assert status == 2
    assert_messages(err, f"omit --nproc (--nproc is set in {file})")


def test_help_shows_values_from_config_files(write, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--config", write("lr = 0.125\nno-test = true\nno-such-flag = 1"), "--help-all"], several_devices=False)
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "learning rate after warm-up (default: 0.125)" in shown
    assert "for comparing settings (default: true)" in shown


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("batch-size = '32'", ['batch-size = "32": must be a whole number']),
        ("batch-size = 2.0", ["batch-size = 2.0: must be a whole number"]),
        ("batch-size = true", ["batch-size = true: must be a whole number"]),
        ("batch_size = 0", ["batch-size = 0: must be at least 1"]),
        ("max-grad-norm = true", ["max-grad-norm = true: must be a number"]),
        ("lr = nan", ["lr = NaN: must be a finite number"]),
        (f"lr = 1{'0' * 400}", [": must be a finite number"]),
        ("device = 3", ["device = 3: must be text"]),
        ("save-dir = ''", ['save-dir = "": must not be empty']),
        ("device = 2020-01-01", ['device = "2020-01-01": must be text']),
        ("amp = false", ["amp = false: must be one of auto, bf16, fp16, off"]),
        ("amp = 'fp8'", ['amp = "fp8": must be one of auto, bf16, fp16, off']),
        ("drop-last = 1", ["drop-last = 1: must be true or false"]),
        ("betas = 0.9", ["betas = 0.9: must be a list"]),
        ("betas = []", ["betas = []: must have at least one value"]),
        ("betas = [0.9, '0.99']", ['betas = [0.9, "0.99"]: must be a number']),
        ("batchsize = 4", ["batchsize: no such flag; did you mean batch-size?"]),
        ("learning-rate = 0.1", ["learning-rate: no such flag; see --help"]),
        ("test = false", ["test: no such flag; did you mean no-test or num-test?"]),
        ("config = ['x']\nlocal-rank = 0", ["config: is only for the command line", "local-rank: no such flag; "]),
        ("print-config = true\nhelp = 1", ["print-config: is only", "help: is only for the command"]),
        ("lr = 1\n[learning]\nlr = 2", ["learning is a table; write each setting on its own line"]),
        ("[[learning]]\nlr = 2", ["learning is a table; "]),
        ("learning.lr = 2", ["learning is a table; "]),
        ("batch-size = 1\nbatch_size = 2", ["sets batch-size twice"]),
        ("lr = ", ["is not valid TOML: "]),
        ("lr = 1\nlr = 2", ["is not valid TOML: "]),
        ("lr = -1\nwidth = 'x'\nfresh = 0", ["lr = -1: must be above 0", "width = ", "fresh = 0: "]),
        ("task = 3", ["task = 3: must be text"]),
        ("nproc = 2\nbackend = 'gloo'", ['nproc = 2, backend = "gloo": is for several devices; use main_multi_gpu.py']),
        ("gpu-ids = 0", ["gpu-ids = 0: must be a list", "gpu-ids = 0: is for several devices; use main_multi_gpu.py"]),
        ("dist-timeout-s = 600\nsync-bn = false", []),
    ],
)
def test_errors_in_a_file_name_file_and_key(text, messages, write):
    _, problems = parse(["--task", WEIGHTED, "--config", file := write(text)], several_devices=False)
    assert len(problems) == len(messages), problems
    for problem, message in zip(problems, messages, strict=True):
        assert problem.startswith(f"--config {file}: ") and message in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.toml", None, "cannot be read: No such file or directory"),
        ("", None, "cannot be read: Is a directory"),
        ("latin.toml", b"task = '\xe4'", "is not text in UTF-8"),
        ("broken.json", b'{"config": ', "is not valid JSON: "),
        ("deep.json", b"[" * 100_000, "is not valid JSON: "),
        ("deep.toml", b"[" + b"a." * 1500 + b"a]", "is not valid TOML: "),
        ("deep list.toml", b"lr = " + b"[" * 1500 + b"]" * 1500, "is not valid TOML: "),
        ("huge.toml", b"lr = 0x" + b"f" * 5000, "is not valid TOML: "),
        ("list.json", b"[1]", 'has no "config"'),
        ("other.json", b'{"config": 3}', 'has no "config"'),
        ("bad.json", b'{"config": {"--lr": null}}', "lr = null: must be a number"),
    ],
)
def test_an_unreadable_config_file_is_refused_in_one_sentence_and_writes_nothing(
    name, content, message, refused, tmp_path
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    refused(
        [f"--config {tmp_path / name}: {message}"], *TINY, "--config", tmp_path / name, "--save-dir", tmp_path / "run"
    )
    assert contents(tmp_path) == before


def test_errors_of_files_and_command_line_are_shown_together(write, refused):
    one = write("lr = 0.001\nbatch-size = 0\nwarmup-epochs = 9", "one.toml")
    two = write("min-lr = 0.01\nwidht = 3", "two.toml")
    refused(
        [
            f"--config {one}: batch-size = 0: must be at least 1",
            f"--config {two}: widht: no such flag; did you mean width?",
            "--config no.toml: cannot be read",
            "--seed x: must be a whole number",
            f"--min-lr 0.01: must not be above --lr 0.001 (--lr is set in {one}, --min-lr is set in {two})",
            f"--warmup-epochs 9: must not exceed --epochs 2 (--warmup-epochs is set in {one})",
        ],
        "--task", WEIGHTED, "--config", one, two, "no.toml", "--seed", "x", "--epochs", 2,
    )  # fmt: skip


def test_a_task_that_is_not_found_does_not_make_its_flags_unknown(write, refused):
    file = write("task = 'nope'\nwidth = 3\nlr = 'x'")
    refused([f"ClassName (--task is set in {file})", f"--config {file}: lr = "], "--config", file)
    refused(["--task no: must be one of", f"--config {file}: lr = "], "--config", file, "--task", "no")


def test_a_run_on_several_devices_is_not_repeated_on_one(tmp_path, write):
    argv = ["--task", WEIGHTED, "--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]
    flags = read(*argv, several_devices=True)
    record = write(json.dumps({"config": flags.values()}), "config.json")
    _, problems = parse(["--config", record], several_devices=False)
    (problem,) = problems
    assert problem.startswith(f'--config {record}: multi-gpu = "ddp", nproc = 2: is for several devices; use main_')
    assert without_files(read("--config", record, several_devices=True)) == without_files(flags)
    assert names_several_devices(["--config", record])
    alone = write(json.dumps({"config": read("--task", WEIGHTED).values()}), "alone.json")
    assert not names_several_devices(["--config", alone])


# --- records of other users --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("--task", "{tmp}/evil.py:Evil", "--task {tmp}/evil.py:Evil, which names code; to run it, add the flag"),
        ("--logger", ["{tmp}/evil.py:Evil"], "--logger {tmp}/evil.py:Evil, which names code; to run it, add"),
        ("--output", "{tmp}/precious", "--output {tmp}/precious, which names a file; to use it, add the flag"),
        ("--export", "{tmp}/my model.pt2", "--export '{tmp}/my model.pt2', which names a file; to use it, add"),
        ("--predict", "{tmp}/precious", "--predict {tmp}/precious, which names a file"),
        ("--resume-from", "{tmp}/precious", "--resume-from {tmp}/precious, which names a file"),
        ("--init-from", "{tmp}/precious", "--init-from {tmp}/precious, which names a file"),
        ("--init-from-partial", "{tmp}/precious", "--init-from-partial {tmp}/precious, which names a file"),
        ("--prior-only", "{tmp}/precious.npz", "--prior-only {tmp}/precious.npz, which names a file"),
    ],
)
def test_a_run_record_sets_neither_code_nor_files_but_a_toml_file_may(name, value, use, write, refused, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'created')!r}, 'x')\n")
    (tmp_path / "precious").write_text("precious")
    text = json.dumps(value).replace("{tmp}", str(tmp_path))
    record = write(f'{{"config": {{"--task": "tabular", "--lr": 0.5, "{name}": {text}}}}}', "config.json")
    before = contents(tmp_path)
    message = f"--config {record}: must not set {use.format(tmp=tmp_path)}"
    refused([message], "--config", record, "--save-dir", tmp_path / "run")
    refused([message], "--config", record, "--save-dir", tmp_path / "run", "--print-config")
    assert contents(tmp_path) == before
    own = write(f'task = "tabular"\n{name[2:]} = {text}' if name != "--task" else f"task = {text}", "own.toml")
    _, problems = parse(["--config", own], several_devices=False)
    assert not any("must not set" in problem for problem in problems)
    (tmp_path / "created").unlink(missing_ok=True)


def test_a_record_sets_only_file_flags_that_are_read_or_the_cache(monkeypatch):
    monkeypatch.undo()
    groups = [*TRAINER_GROUPS, StepFlags, ScalingFlags, BatchSizeFlags]
    groups += [find_task(name).Config for name in TASKS]
    taken = {
        field
        for group in groups if group is not ConfigFlags
        for field, option in options(group).items()
        if option.from_record == "taken" and (option.type is Path or "py:" in option.help)
    }  # fmt: skip
    assert taken == {"cache_dir", "data_dir", "test_data", "alphabet", "language_model", "encoder_path"}


def test_flags_added_by_the_user_override_a_record(write, tmp_path):
    (tmp_path / "weights.pth").touch()
    record = write('{"config": {"--task": "x.py:X", "--init-from": "y.pth", "--lr": 0.5}}', "config.json")
    added = ["--task", WEIGHTED, "--init-from", tmp_path / "weights.pth"]
    flags = read("--config", record, *added)
    assert (flags.learning.lr, flags.checkpoint.init_from) == (0.5, tmp_path / "weights.pth")
    assert read("--config", record, *added[:2], "--eval-only").checkpoint.init_from is None


def test_the_profiler_takes_no_output_file_from_a_record(write, tmp_path):
    for command, name in ((StepFlags, "--json"), (StepFlags, "--trace"), (ScalingFlags, "--board")):
        record = write(json.dumps({"config": {"--task": "har", name: str(tmp_path / "x")}}), "config.json")
        flags, problems = parse(["--config", record], False, command)
        words = f"{name} {tmp_path / 'x'}"
        advice = "to use it, add the flag to the command"
        assert problems == [f"--config {record}: must not set {words}, which names a file; {advice}"]
        assert getattr(flags.tool, name[2:]) is None


# --- repeated runs -----------------------------------------------------------------------------------------------


def test_a_run_is_repeated_from_config_json_and_printed_settings(train, cli, write, tmp_path):
    """Everything is repeated except --save-dir and --fresh."""
    more = ["--dropout", 0.25, "--seed", 3, "--ema-decay", 0.5, "--warmup-steps", 2, "--no-test", "--drop-last"]
    train(tmp_path / "first", *more, "--batch-size", 5, "--fresh")
    record = tmp_path / "first" / "config.json"
    status, printed, err = cli(*TINY, *more, "--batch-size", 5, "--print-config")
    assert (status, err) == (0, [])
    first = load(tmp_path / "first" / "final.pth")
    for number, file in enumerate((record, write(printed))):
        assert cli("--config", file, "--save-dir", tmp_path / str(number))[0] == 0
        again = load(tmp_path / str(number) / "final.pth")
        assert_same_bits(first, again)
        assert again["config"] == {**first["config"], "--save-dir": str(tmp_path / str(number)), "--fresh": False}
    assert cli("--config", record, "--save-dir", tmp_path / "other", "--seed", 4)[0] == 0
    with pytest.raises(AssertionError):
        assert_same_bits(first, load(tmp_path / "other" / "final.pth"))


def test_the_record_of_a_resumed_run_repeats_it_if_resume_from_is_given_again(train, cli, refused, tmp_path):
    train(tmp_path / "source", "--epochs", 2)
    train(tmp_path / "run", "--epochs", 3, "--resume-from", tmp_path / "source" / "checkpoint_2.pth")
    record, source = tmp_path / "run" / "config.json", tmp_path / "source" / "checkpoint_2.pth"
    words = f"--resume-from {source}"
    message = f"--config {record}: must not set {words}, which names a file; to use it, add the flag to the command"
    refused([message], "--config", record, "--save-dir", tmp_path / "again")
    assert cli("--config", record, "--save-dir", tmp_path / "again", "--resume-from", source)[0] == 0
    assert_same_bits(load(tmp_path / "run" / "final.pth")["model"], load(tmp_path / "again" / "final.pth")["model"])
    status, out, _ = cli("--config", record, "--save-dir", tmp_path / "run", "--eval-only")
    assert status == 0
    assert out == cli("--config", record, "--save-dir", tmp_path / "again", "--eval-only")[1].replace("again", "run")


def test_a_group_that_restarts_itself_drops_fresh(write, cli, monkeypatch):
    asked = []
    monkeypatch.setattr("trainer.cli.launch", lambda *starts: asked.extend(starts) or 0)
    argv = ["--config", write("fresh = true\nmulti-gpu = 'ddp'\nnproc = 2"), "--task", WEIGHTED, "--device", "cpu"]
    assert cli(*argv, several_devices=True)[0] == 0
    start, world_size, start_again = asked
    assert world_size == 2
    assert [read(*each.args[0], several_devices=True).checkpoint.fresh for each in (start, start_again)] == [
        True,
        False,
    ]


@pytest.mark.slow
def test_two_processes_repeat_a_run(command, write, tmp_path):
    script, *ddp = launcher(2)
    argv = [*ddp, *TINY, "--device", "cpu"]
    command(script, *argv, "--save-dir", tmp_path / "first")
    printed = command(script, *argv, "--print-config").stdout
    for number, file in enumerate((tmp_path / "first" / "config.json", write(printed))):
        command(script, "--config", file, "--task", WEIGHTED, "--save-dir", tmp_path / str(number))
        assert_same_bits(load(tmp_path / "first" / "final.pth"), load(tmp_path / str(number) / "final.pth"))


@pytest.mark.slow
def test_each_of_several_runs_reads_the_config_file(train, cli, write, tmp_path):
    train(tmp_path / "alone", "--seed", 1)
    assert cli("--config", write(TINY_AS_TOML + "\nseeds = 2"), "--save-dir", tmp_path / "both")[0] == 0
    assert_same_bits(load(tmp_path / "alone" / "final.pth"), load(tmp_path / "both" / "seed-1" / "final.pth"))


# --- --print-config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "several_devices"),
    [
        ([], False),
        (["--hidden-dims", "8,16", "--no-augmentation", "--refit", "--predict", "x.csv", "--output", "y.csv"], False),
        (["--task", "seqrec", "--loss", "sampled", "--num-negatives", "7", "--save-dir", "a \"b\" \\ 'c'\tü🙂"], False),
        (["--task", OWN_TASK, "--seed", str(2**63 - 1), "--lr", "1e-300", "--folds", "3"], False),
        (["--multi-gpu", "ddp", "--nproc", "2", "--device", "cpu", "--find-unused-parameters"], True),
        (["--task", "odd", "--no-augment", "--paths", "a,b", "c", "--sizes", "3"], False),
        (["--task", "odd"], False),
        (["--task", "stating"], False),
        (["--task", "stating", "--optimizer", "adam", "--warmup-steps", "3", "--drop-last=false"], False),
    ],
)
def test_printed_settings_reproduce_the_flags(argv, several_devices, cli, write, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, printed, err = cli(*argv, "--print-config", several_devices=several_devices)
    assert (status, err) == (0, [])
    expected = read(*argv, several_devices=several_devices)
    again = read("--config", write(printed), several_devices=several_devices)
    assert without_files(again) == without_files(expected)
    assert all(len(line) <= 120 for line in printed.splitlines() if line.startswith("#"))
    assert [path.name for path in tmp_path.iterdir()] == ["some.toml"]


def test_settings_are_printed_only_for_a_valid_command_line(refused):
    assert refused(["--lr 0: must be above 0"], "--lr", 0, "--print-config") == ""
    printed_by_profiler = "--print-config: profiler.py measures a training run from its start; leave it out"
    assert not_measured(read("--print-config")) == [printed_by_profiler]


# --- the documents -----------------------------------------------------------------------------------------------


def test_the_commands_of_the_reference_run(cli, tmp_path, monkeypatch):
    (block,) = code_blocks(reference("Config files"))
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        ((_, arguments),) = commands_in(line)
        status, out, err = cli(*arguments, *TINY)
        assert (status, err) == (0, []), shlex.join(arguments)
        if "> mine.toml" in line:
            Path("mine.toml").write_text(out)
    runs = [load(tmp_path / "checkpoints" / name / "final.pth") for name in ("mine", "again")]
    assert_same_bits(*runs)

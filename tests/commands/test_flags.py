"""Each mistake on a command line is reported in one clear message, and nothing is written."""

import json
import os
import pwd
import textwrap
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, WEIGHTED, contents
from tests.helpers.weighted_task import Weighted
from trainer.commands.parse import parse
from trainer.common.errors import UserError
from trainer.config import flag_values, group_from_values
from trainer.loading.cache import cached_arrays

WRONG_COMMAND_LINES = [
    ("--batch-size 0", ["--batch-size 0: must be at least 1"]),
    ("--num-train 0", ["--num-train 0: must be at least 1"]),
    ("--epochs 2 --warmup-epochs 3", ["--warmup-epochs 3: must not exceed --epochs 2"]),
    ("--epochs 2 --warmup-steps 7", ["--warmup-steps 7: exceeds the 6 steps of the run"]),
    ("--warmup-epochs 1 --warmup-steps 1", ["--warmup-epochs 1.0 and --warmup-steps 1: cannot be combined"]),
    ("--min-lr 1", ["--min-lr 1.0: must not be above --lr 0.01"]),
    ("--min-lr 0.001 --schedule constant", ["--min-lr 0.001: --schedule constant never reaches it"]),
    (
        "--momentum 0 --nesterov",
        [
            "--momentum 0.0: --optimizer adamw does not use it; leave it out, or choose sgd or muon",
            "--nesterov: --optimizer adamw does not use it; leave it out, or choose sgd",
        ],
    ),
    (
        "--optimizer sgd --betas 0.9 --eps 1e-6 --nesterov",
        [
            "--betas 0.9: --optimizer sgd does not use it",
            "--betas 0.9: must be two values",
            "--eps 1e-06: --optimizer sgd does not use it; leave it out, or choose adamw or adam or muon",
            "--nesterov: needs --momentum above 0",
        ],
    ),
    ("--no-amp --amp bf16", ["--no-amp and --amp bf16: cannot be combined"]),
    ("--no-amp --amp auto", ["--no-amp and --amp auto: cannot be combined"]),  # though auto is the default
    ("--global-batch-size 8 --grad-accum-steps 1", ["--global-batch-size 8 and --grad-accum-steps 1: cannot"]),
    ("--dtype float64 --amp bf16", ["--amp bf16: needs --dtype float32"]),
    ("--global-batch-size 8 --grad-accum-steps 2", ["--global-batch-size 8 and --grad-accum-steps 2: cannot"]),
    ("--eval-only --fresh", ["--eval-only and --fresh: cannot be combined"]),
    ("--predict x.csv --eval-only", ["--predict and --eval-only: cannot be combined; give only one of them"]),
    (
        "--predict x.csv --fresh --init-from main.py",
        ["--predict and --fresh: cannot be combined", "--predict and --init-from: cannot be combined"],
    ),
    ("--predict x.csv --init-from-partial main.py", ["--predict and --init-from-partial: cannot be combined"]),
    ("--output x.csv", ["--output x.csv: works only with --predict; leave it out"]),
    ("--predict", ["--predict: needs a value"]),
    ("--seeds 0 --folds 1", ["--seeds 0: must be at least 1", "--folds 1: must be at least 2, or 0 for none"]),
    (
        "--seeds 2 --eval-only --resume-from main.py",
        ["--seeds 2 and --eval-only: cannot be combined", "--seeds 2 and --resume-from: cannot be combined"],
    ),
    ("--seeds 2 --folds 3 --predict x.csv", ["--seeds 2 --folds 3 and --predict: cannot be combined"]),
    ("--folds 3", ["--folds 3: this task's data cannot be split into folds"]),
    ("--seeds 2 --epochs 2 --seed 9223372036854775807", ["--seed 9223372036854775808: must be at least 0 and below"]),
    ("--init-from no/file.pth", ["--init-from no/file.pth: does not exist"]),
    ("--init-from-partial no/file.pth", ["--init-from-partial no/file.pth: does not exist"]),
    (
        "--init-from-partial main.py --init-from main.py --eval-only",
        ["--init-from and --init-from-partial: cannot be", "--eval-only and --init-from-partial: cannot be"],
    ),
    ("--init-from-partial main.py --resume-from main.py", ["--resume-from and --init-from-partial: cannot be"]),
    ("--resume-from tests", ["--resume-from tests: is not a file"]),
    ("--resume-from main.py --init-from main.py", ["--resume-from and --init-from: cannot be combined"]),
    ("--resume-from main.py --fresh", ["--fresh and --resume-from: cannot be combined"]),
    ("--max-steps 9", ["--epochs 1 and --max-steps 9: cannot be combined"]),
    ("--eval-every 2 --eval-every-steps 9", ["--eval-every 2 and --eval-every-steps 9: cannot be combined"]),
    ("--device cuda:99", ["--device cuda:99: "]),
    ("--device tpu", ["--device tpu: must be auto, cpu, cuda or cuda:N"]),
    ("--task nope --lr 0 --of-the-task 3", ["--task nope: must be one of har", "--lr 0: must be above 0"]),
    ("--batchsize 4 stray", ["--batchsize: no such flag; did you mean --batch-size?", "stray: unexpected argument"]),
    (
        "--multi-gpu ddp --nproc=2",
        ["--multi-gpu: is for several devices; use main_multi_gpu.py", "--nproc=2: is for several devices; use main"],
    ),
    (
        "--batch-size 0 --lr x --width -3 --amp fp8 --seed",
        [
            "--batch-size 0: must be at least 1",
            "--lr x: must be a number",
            "--width -3: must be at least 1",
            "--amp fp8: must be one of auto, bf16, fp16, off",
            "--seed: needs a value",
        ],
    ),
]


@pytest.mark.parametrize(("args", "parts"), WRONG_COMMAND_LINES, ids=[args for args, _ in WRONG_COMMAND_LINES])
def test_errors_of_a_command_line_are_shown_together(args, parts, refused, tmp_path):
    refused(parts, *TINY, "--save-dir", tmp_path / "run", *args.split())
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ("", ["--multi-gpu: needs a value: dp, ddp or fsdp; to train on one device, run main.py"]),
        ("--lockstep-every 5 --nproc 2", ["to train on one device, leave --nproc, --lockstep-every out"]),
        ("--multi-gpu dp --gpu-ids 0,9", ["--gpu-ids 0,9: there is no GPU"]),
        ("--multi-gpu dp --nproc 2", ["--nproc 2: --multi-gpu dp does not use it"]),
        ("--multi-gpu ddp --nproc 0 --batch-size 0", ["--nproc 0: must be at least 1", "--batch-size 0: must be"]),
        ("--multi-gpu dp --predict x.csv", ["--predict: runs on one device; use main.py"]),
        ("--multi-gpu dp --sync-bn", ["--sync-bn: needs --multi-gpu ddp on GPUs"]),
        ("--multi-gpu fsdp --sync-bn", ["--sync-bn: needs --multi-gpu ddp on GPUs"]),
        ("--multi-gpu ddp --backend nccl", ["--backend nccl: needs GPUs"]),
        ("--multi-gpu fsdp --find-unused-parameters", ["--find-unused-parameters: --multi-gpu fsdp does not use it"]),
        (
            "--multi-gpu ddp --reshard never --shard-size 2",
            ["--reshard never: --multi-gpu ddp does not use it", "--shard-size 2: --multi-gpu ddp does not use it"],
        ),
        ("--multi-gpu ddp --local-rank 0", ["--local-rank 0: RANK and WORLD_SIZE are not set"]),
    ],
)
def test_wrong_flags_for_several_devices_are_refused_and_write_nothing(args, parts, refused, tmp_path):
    refused(parts, *TINY, "--save-dir", tmp_path / "run", *args.split(), several_devices=True)
    assert not contents(tmp_path)


def test_gpu_features_are_refused_on_the_cpu(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = ["--multi-gpu", "ddp", "--device", "cpu", "--backend", "nccl", "--sync-bn"]
    parts = ["--backend nccl: needs GPUs", "--sync-bn: needs --multi-gpu ddp on GPUs"]
    refused(parts, *TINY, "--save-dir", tmp_path / "run", *flags, several_devices=True)


def test_a_missing_home_is_an_error_only_if_something_is_cached(train, monkeypatch, tmp_path):
    """A container may run with a user id that its system does not know."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    train(tmp_path / "run", "--epochs", 1)
    task = Weighted(Weighted.Config(), 0, Path("~/.cache/lockstep"))
    with pytest.raises(
        UserError, match=r"--cache-dir ~/.cache/lockstep: the current user has no home folder; name another folder"
    ):
        cached_arrays(task.cache_dir, "key", dict)


@pytest.mark.parametrize("place", ["n" * 300, "loop"])
@pytest.mark.parametrize("flag", ["--task", "--logger", "--config", "--save-dir", "--output", "--export"])
def test_an_unreadable_location_is_reported(flag, place, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    name = f"{place}:Mine" if flag in ("--task", "--logger") else place
    task = [] if flag == "--task" else ["--task", WEIGHTED]
    refused([f"{flag} {name[:100]}"], *task, flag, name)


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        (None, "Mine", "there is no file"),
        ("def broken(:", "Mine", "cannot import"),
        ("import no_such_module_at_all", "Mine", "No module named 'no_such_module_at_all'"),
        ("x = 1", "Mine", "defines no Mine"),
        ("raise SystemExit(3)", "Mine", "cannot import"),
        ("raise SystemExit", "Outer.Mine", "must be path/to/file.py:ClassName"),
        ("class Mine: pass", "Mine", "Mine must be a subclass of trainer.Task"),
    ],
)
def test_a_wrong_task_file_is_refused(content, name, part, refused, tmp_path):
    file = tmp_path / f"{tmp_path.name}.py"
    if content is not None:
        file.write_text(content)
    refused([part], "--task", f"{file}:{name}", "--save-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--hidden-dims", "8,16", "--mode", "flatten", "--no-augmentation", "--refit", "--data-dir", "."],
        ["--val-subjects", "3", "5", "--dropout", "1e-3"],
        ["--task", "seqrec", "--no-time", "--loss", "sampled", "--num-negatives", "7", "--norm", "pre"],
    ],
)  # fmt: skip
def test_recorded_values_reproduce_the_flags(argv):
    flags, problems = parse(argv, several_devices=False)
    assert problems == []
    values = flags.values()
    if "--data-dir" in argv:
        flags.task.data_dir = Path.cwd()  # an absolute path, valid in any folder
    for recorded in (values, json.loads(json.dumps(values))):
        for group in (flags.task, flags.learning, flags.precision):
            assert group_from_values(type(group), recorded) == group
    assert flag_values(group_from_values(type(flags.task), {})) == flag_values(type(flags.task)())
    with pytest.raises(ValueError, match=r"--dropout -1.0: must be at least 0"):
        group_from_values(type(flags.task), {"--dropout": -1.0})


def test_length_and_interval_flags_displace_each_other():
    """The task, or else the trainer, supplies a length and an interval that are not given."""

    def recorded(*argv):
        values = parse(argv, several_devices=False)[0].values()
        return [values[name] for name in ("--epochs", "--max-steps", "--eval-every", "--eval-every-steps")]

    assert recorded() == [12, None, 1, None]
    assert recorded("--task", WEIGHTED) == [20, None, 1, None]
    assert recorded("--max-steps", "9", "--eval-every-steps", "4") == [None, 9, None, 4]


def test_muon_needs_a_torch_that_has_it(refused, monkeypatch, tmp_path):
    monkeypatch.delattr("torch.optim.Muon", raising=False)
    refused(["--optimizer muon: torch ", "--lr 0: "], *TINY, "--save-dir", tmp_path, "--optimizer", "muon", "--lr", 0)


def test_a_task_with_invalid_or_reserved_flags_is_refused(refused, tmp_path):
    (tmp_path / "odd.py").write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from trainer import FlagGroup, Task, flag

        class Bare(Task):
            pass

        class Odd(Task):
            Config = dict

        class Taking(Task):
            @dataclass
            class Config(FlagGroup):
                epochs: int = flag(3, "of its own")

        class Plain(Task):
            @dataclass
            class Config(FlagGroup):
                size: int = 3

        class Listing(Task):
            @dataclass
            class Config(FlagGroup):
                sizes: list[int] = flag((3,), "a list")

        class Twice(Task):
            @dataclass
            class Config(FlagGroup):
                flip: bool = flag(True, "on by default")
                no_flip: bool = flag(False, "off by default")

        class Alone(Task):
            @dataclass
            class Config:
                size: int = flag(3, "size")

        class Empty(Task):
            @dataclass
            class Config(FlagGroup):
                def problems(self):
                    return "one sentence"

        class Whole(Empty):
            splits = build_objective = summarise = lambda self: None
        """)
    )
    refused(["Bare must define build_objective, splits"], "--task", f"{tmp_path}/odd.py:Bare")
    for name in ("Odd", "Alone"):
        wrong = f"{name}.Config must be a dataclass and inherit from lockstep.FlagGroup"
        refused([wrong], "--task", f"{tmp_path}/odd.py:{name}")
    refused(["two fields give the flag --no-flip; rename one"], "--task", f"{tmp_path}/odd.py:Twice", "--help")
    refused(
        ["the trainer already has flags named --epochs; rename the task's flags"],
        "--task",
        f"{tmp_path}/odd.py:Taking",
    )
    refused(["odd.py:Plain: Config.size: must be defined with flag()"], "--task", f"{tmp_path}/odd.py:Plain")
    refused(["Config.sizes: a flag cannot have the type list[int]"], "--task", f"{tmp_path}/odd.py:Listing")
    refused(["Empty must define build_objective, splits"], "--task", f"{tmp_path}/odd.py:Empty")
    refused(["Config.problems: must return a list of sentences"], "--task", f"{tmp_path}/odd.py:Whole")

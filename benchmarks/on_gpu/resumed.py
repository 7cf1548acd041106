"""Checks that a run with --deterministic that resumes in the middle ends identically to an unbroken run.

Every model trains with dropout, in the default precision of the GPU. The difference without --deterministic is
reported, but not checked.
"""

from functools import partial

from benchmarks.on_gpu.models import MODELS, chosen
from benchmarks.on_gpu.part import Report, Setting, checkpoint_of_step, difference, last, run, unlike

STEPS = 6
FLAGS = ["--max-steps", STEPS, "--save-every-steps", STEPS // 2, "--keep-checkpoints", 0, "--no-test",
         "--ema-decay", 0.9, "--batch-size", 8, "--eval-batch-size", 64, "--eval-every-steps", STEPS]  # fmt: skip


def measure(setting: Setting, report: Report) -> None:
    for name in chosen(setting, on_cpu="plmu"):
        for more in (["--deterministic"], []):
            report.attempt(" ".join([name, *more]), partial(compare, setting, report, name, more))


def compare(setting: Setting, report: Report, name: str, more: list[str]) -> None:
    title = " ".join([name, *more])
    flags = [*MODELS[name], *FLAGS, *more]
    whole = run(setting, f"{title} unbroken", *flags)
    middle = checkpoint_of_step(whole, STEPS // 2)
    resumed = last(run(setting, f"{title} resumed", *flags, "--resume-from", middle))
    expected = last(whole)
    if more:
        different = unlike(resumed, expected)
        report.check(f"{title}, parts that differ", not different, different)
    report.figure(f"{title}, difference of weights", difference(resumed["model"], expected["model"]))

"""Trains by `lockstep --help`, measures by `lockstep profile --help`; the same as `python -m lockstep`."""

import gc
import sys


def main() -> int:
    """Runs the command line of this process; returns the exit status."""
    gc.disable()  # imports are never freed, so collecting would only scan them repeatedly
    from tasks import TASKS

    sys.argv[0] = "lockstep"  # in `--help`, however this was started
    if sys.argv[1:2] == ["profile"]:
        from trainer.profiling.cli import main as measure

        sys.argv[0] += " profile"
        return measure(sys.argv[2:], tasks=TASKS)
    from trainer.cli import run_process
    from trainer.commands.parse import names_several_devices
    from trainer.failure.signals import exit_quickly

    exit_quickly()
    return run_process(sys.argv[1:], names_several_devices(sys.argv[1:]), tasks=TASKS)


if __name__ == "__main__":
    sys.exit(main())

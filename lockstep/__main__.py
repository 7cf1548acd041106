"""Train by `lockstep --help`, measure by `lockstep profile --help`; `python -m lockstep` is the same command."""

import gc
import sys


def main() -> int:
    """Runs the command line of this process; returns the exit status."""
    gc.disable()  # nothing of what is imported is freed: the collector would look at all of it again and again
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

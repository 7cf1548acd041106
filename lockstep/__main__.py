"""The command `lockstep`, or `python -m lockstep`, which trains; `lockstep profile` measures time and memory."""

import gc
import sys


def main() -> int:
    """Runs this process's command line and returns the exit status."""
    gc.disable()  # imported objects are never freed, so scanning them repeatedly would only take time
    from tasks import TASKS

    sys.argv[0] = "lockstep"  # the name that `--help` shows
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

"""Trains on several devices; `python main_multi_gpu.py --help` shows the flags."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imported objects are never freed, so scanning them repeatedly would only take time
    from tasks import TASKS  # not at the top: child processes import this file, and a user may have a package tasks
    from trainer.cli import run_process
    from trainer.failure.signals import exit_quickly

    exit_quickly()
    sys.exit(run_process(sys.argv[1:], several_devices=True, tasks=TASKS))

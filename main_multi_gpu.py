"""Train on several devices: python main_multi_gpu.py --help"""

import sys

from trainer.cli import run_process
from trainer.failure.signals import exit_quickly

if __name__ == "__main__":
    from tasks import TASKS  # not in processes that import this file: a user may have a package of that name

    exit_quickly()
    sys.exit(run_process(sys.argv[1:], several_devices=True, tasks=TASKS))

"""Train on several devices: python main_multi_gpu.py --help"""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # nothing of what is imported is freed: the collector would look at all of it again and again
    from tasks import TASKS  # not in processes that import this file: a user may have a package of that name
    from trainer.cli import run_process
    from trainer.failure.signals import exit_quickly

    exit_quickly()
    sys.exit(run_process(sys.argv[1:], several_devices=True, tasks=TASKS))

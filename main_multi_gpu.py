"""Train on several devices: python main_multi_gpu.py --help"""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], several_devices=True))

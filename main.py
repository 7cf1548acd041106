"""Train on one device: python main.py --help"""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], several_devices=False))

"""Process in which torch has simulated GPUs. Arguments: descriptor of a pipe to pytest, path of the library."""

import gc
import importlib
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from _pytest.config import get_config

from tests.helpers.simulated_gpu.machine import GPUS
from tests.helpers.simulated_gpu.server import serve

GPUS.load(Path(sys.argv[2]))
get_config().parse(["--noconftest"])  # makes failed asserts in tests show their values
for name in ("tests.conftest", "trainer.commands.train", "torch.utils.tensorboard", "torch._inductor.config"):
    importlib.import_module(name)
gc.freeze()  # spares forked processes the garbage collection of imported objects
serve(Connection(int(sys.argv[1])))

import platform
import subprocess
import sys

import pytest

from trainer.parallel.devices import cores_per_rank

_COUNTS_FAULTS = """
import ctypes, resource, torch
from trainer.parallel.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(2**20) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # glibc's own threshold moves, so that nothing is sure
faults()
returned = faults()
keep_freed_memory()
faults()
print(returned, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_reused_without_page_faults() -> None:
    found = subprocess.run([sys.executable, "-c", _COUNTS_FAULTS], capture_output=True, text=True, check=True)
    returned, kept = map(int, found.stdout.split())
    assert kept < returned / 10


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ([range(8)] * 4, 2),  # torchrun
        ([range(8)] * 3, 2),
        ([range(2)] * 8, 1),
        ([range(4 * rank, 4 * rank + 4) for rank in range(4)], 4),  # srun binds each rank to cores of its own
        ([range(4), range(4), range(4, 12), range(4, 12)], 2),  # bound to one of two sockets of different size
    ],
)
def test_ranks_share_only_the_cores_that_both_may_use(usable, expected):
    assert cores_per_rank(usable) == expected

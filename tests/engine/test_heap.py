"""Freed memory stays with the process: a step of training takes no pages anew."""

import resource
import subprocess
import sys

STEPS = """
import ctypes, resource, sys
if sys.argv[1] == "keep":
    from fedsparse.heap import keep_freed_memory
    assert keep_freed_memory()
libc, size = ctypes.CDLL(None), 2**19
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = (
    ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
)

def step():
    blocks = [libc.malloc(size) for _ in range(20)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(way: str) -> float:
    return float(subprocess.run([sys.executable, "-c", STEPS, way], capture_output=True, text=True, check=True).stdout)


def test_steps_take_no_pages_anew() -> None:
    pages = 20 * 2**19 / resource.getpagesize()
    assert faults("leave") > 0.5 * pages  # what there is to gain
    assert faults("keep") < 0.01 * pages

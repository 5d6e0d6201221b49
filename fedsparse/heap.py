"""Keep freed memory: training takes and frees the same megabytes in every step."""

import ctypes
from functools import lru_cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGE, KEPT = 32 << 20, 1 << 30  # bytes


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Let this process keep up to a gigabyte of what it frees; return whether its C library can.

    By itself glibc gives the kernel back what lies free at the end of the heap, once it is more than twice the largest
    block freed so far. A layer's activations are many such blocks: every step then took its pages anew, and the kernel
    spent a tenth of a client's time on clearing them. Blocks from `LARGE` on go back at once, as ever.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT))

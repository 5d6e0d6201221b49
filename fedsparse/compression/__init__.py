"""Compression of model updates: operators, their composition, error memory and the wire frame.

Usable by itself, without Flower, torch or Ray::

    from fedsparse.compression import Compressor, decode, encode

    compressor = Compressor.from_spec("topk(density=0.01)|sign")
    sent = compressor.compress_with_memory(update, residual, seed=0)   # residual <- p - C(p)
    frame = encode(sent, compressor)
    received = decode(frame, compressor, d=update.size)
    received.add_to(model, weight=0.1)
"""

from fedsparse.compression.base import QUANTIZERS, SPARSIFIERS, Claim, Quantizer, Sparsifier
from fedsparse.compression.compressor import Compressed, Compressor
from fedsparse.compression.frame import decode, encode
from fedsparse.compression.memory import MemoryStore, Pending
from fedsparse.errors import FencedError, MemoryStoreError, PayloadError

__all__ = [
    "QUANTIZERS",
    "SPARSIFIERS",
    "Claim",
    "Compressed",
    "Compressor",
    "FencedError",
    "MemoryStore",
    "MemoryStoreError",
    "PayloadError",
    "Pending",
    "Quantizer",
    "Sparsifier",
    "decode",
    "encode",
]

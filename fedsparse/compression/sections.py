"""The sections of a frame: positions and codes, each written in whichever way is smallest.

Positions: pcodec (adapts to clustered sets), Rice coding of the gaps (within 1 % of the entropy of a uniformly random
set at any size, where pcodec's own header is too dear below some thousand positions), or a bitmap. Codes: raw, packed
bits, or pcodec.
"""

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, ModeSpec, standalone

from fedsparse.compression import bits
from fedsparse.compression.base import Indices, Quantizer
from fedsparse.errors import PayloadError

RAW, PACKED, PCODEC, RICE, BITMAP, SEEDED, DENSE = range(7)
SMALL = 1 << 16  # below it, trying pcodec's higher level costs under a millisecond


def encode_indices(indices: Indices, d: int) -> tuple[int, bytes]:
    """Return (method, bytes) of strictly increasing positions below `d`."""
    gaps = np.diff(indices, prepend=-1) - 1
    candidates = [(RICE, _rice_encode(gaps))]
    limit = len(candidates[0][1])
    if (d + 7) // 8 < limit:
        mask = np.zeros(d, dtype=np.bool_)
        mask[indices] = True
        candidates.append((BITMAP, np.packbits(mask).tobytes()))
    if indices.size:
        candidates.append((PCODEC, _pco(gaps.astype(_gap_dtype(d)))))
    return min(candidates, key=lambda item: len(item[1]))


def decode_indices(method: int, data: memoryview, d: int, k: int) -> Indices:
    """Undo `encode_indices`, trusting nothing: k positions, strictly increasing, below d."""
    if method == BITMAP:
        if len(data) != (d + 7) // 8:
            raise PayloadError(f"a bitmap of d = {d} takes {(d + 7) // 8} bytes, got {len(data)}.")
        mask = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).view(np.bool_)
        if mask[d:].any():
            raise PayloadError("the bitmap marks positions beyond d.")
        marked = np.flatnonzero(mask[:d])
        if marked.size != k:
            raise PayloadError(f"the bitmap marks {marked.size} positions, the header says {k}.")
        return marked
    gaps: NDArray[np.unsignedinteger]
    if method == RICE:
        gaps = _rice_decode(data, d, k)
    elif method == PCODEC:
        gaps = _pco_decode(data, k, _gap_dtype(d))  # type: ignore[assignment]
    else:
        raise PayloadError(f"unknown way {method} of writing positions.")
    # Checked before the sum, so that it cannot wrap around: with d below 2^31, k gaps below d stay below 2^62.
    if k and (int(gaps.max()) >= d or (d >= 2**31 and float(gaps.sum(dtype=np.float64)) > 2.0 * d)):
        raise PayloadError(f"positions run beyond d = {d}.")
    steps = gaps.astype(np.int64)
    steps += 1
    if k:
        steps[0] -= 1
    indices: Indices = np.cumsum(steps, out=steps)
    if k and int(indices[-1]) >= d:
        raise PayloadError(f"positions run beyond d = {d}.")
    return indices


def _gap_dtype(d: int) -> np.dtype[np.generic]:
    return np.dtype(np.uint32 if d <= 2**32 else np.uint64)


def encode_codes(codes: NDArray[np.generic], quantizer: Quantizer, plain: bool) -> tuple[int, bytes]:
    """Return (method, bytes) of a quantizer's codes; `plain` asks for the raw bytes (dense float updates)."""
    alphabet = quantizer.alphabet
    if alphabet is None:
        raw = codes.astype(codes.dtype.newbyteorder("<")).tobytes()
        candidates = [(RAW, raw)]
        if codes.size and not plain:
            candidates.append((PCODEC, _pco(codes)))
    else:
        width = (alphabet - 1).bit_length()
        candidates = [(PACKED, bits.pack(codes, width))]  # type: ignore[arg-type]
        if codes.size and width > 1:
            candidates.append((PCODEC, _pco(codes)))
    return min(candidates, key=lambda item: len(item[1]))


def decode_codes(method: int, data: memoryview, quantizer: Quantizer, count: int) -> NDArray[np.generic]:
    """Undo `encode_codes`: `count` codes, each inside the quantizer's alphabet, floats finite."""
    dtype, alphabet = quantizer.code_dtype, quantizer.alphabet
    if method == PCODEC:
        codes: NDArray[np.generic] = _pco_decode(data, count, dtype)
    elif method == RAW and alphabet is None:
        if len(data) != count * dtype.itemsize:
            raise PayloadError(f"{count} values of {dtype} take {count * dtype.itemsize} bytes, got {len(data)}.")
        codes = np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)
    elif method == PACKED and alphabet is not None:
        width = (alphabet - 1).bit_length()
        if len(data) != bits.packed_size(count, width):
            raise PayloadError(f"{count} codes take {bits.packed_size(count, width)} bytes, got {len(data)}.")
        codes = bits.unpack(data, width, count).astype(dtype)
    else:
        raise PayloadError(f"{quantizer.name} codes cannot be written in way {method}.")
    if alphabet is None:
        if not np.isfinite(codes).all():
            raise PayloadError("the frame holds values that are not finite.")
    elif codes.size and int(codes.max()) >= alphabet:
        raise PayloadError(f"a {quantizer.name} code is {int(codes.max())}; allowed: 0 to {alphabet - 1}.")
    return codes


def _rice_encode(gaps: NDArray[np.int64]) -> bytes:
    """One byte for the parameter b, then the quotients gap >> b in unary, then the low b bits of each gap."""
    if not gaps.size:
        return b""
    mean = float(gaps.mean())
    guess = int(np.log2(mean)) if mean > 1 else 0
    # The size is convex in b and smallest beside log2 of the mean gap.
    b = min(range(max(0, guess - 1), guess + 3), key=lambda w: int((gaps >> w).sum()) + w * gaps.size)
    quotients = gaps >> b
    ends = np.cumsum(quotients + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1, dtype=np.bool_)
    unary[ends] = True
    low = bits.pack(gaps & ((1 << b) - 1), b) if b else b""
    return bytes([b]) + low + np.packbits(unary).tobytes()


def _rice_decode(data: memoryview, d: int, k: int) -> NDArray[np.uint64]:
    if k == 0:
        if len(data):
            raise PayloadError("positions follow though the header says there are none.")
        return np.empty(0, dtype=np.uint64)
    b = data[0] if len(data) else 64
    start = 1 + (bits.packed_size(k, b) if b <= 62 else 0)
    # A valid code has at most k + d / 2^b unary bits, so nothing larger is ever expanded.
    if b > 62 or start > len(data) or len(data) - start > (k + (d >> b) + 7) // 8:
        raise PayloadError("the Rice-coded positions do not fit their header.")
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(data[start:], dtype=np.uint8)).view(np.bool_))
    if ends.size != k:
        raise PayloadError(f"the frame codes {ends.size} positions, the header says {k}.")
    gaps = ends.astype(np.uint64)
    gaps[1:] -= gaps[:-1].copy() + np.uint64(1)
    # Unsigned: whatever a hostile quotient overflows to is caught as a gap beyond d.
    gaps <<= np.uint64(b)
    if b:
        gaps |= bits.unpack(data[1:start], b, k)
    return gaps


def _pco(values: NDArray[np.generic]) -> bytes:
    config = ChunkConfig(
        compression_level=8 if values.size <= SMALL else 7,
        mode_spec=ModeSpec.classic(),
        enable_8_bit=values.dtype.itemsize == 1,
    )
    return bytes(standalone.simple_compress(np.ascontiguousarray(values), config))


def _pco_decode(data: memoryview, count: int, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Decode exactly `count` numbers into memory allocated here, whatever the data says about itself."""
    numbers = np.empty(count, dtype=dtype)
    if count == 0:
        if len(data):
            raise PayloadError("data follows though the header says there is none.")
        return numbers
    try:
        progress = standalone.simple_decompress_into(bytes(data), numbers)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust side derives from BaseException
        raise PayloadError(f"a pcodec section is damaged: {error}.") from None
    if progress.n_processed != count or not progress.finished:
        raise PayloadError(f"a pcodec section does not hold the {count} numbers that the header promises.")
    return numbers

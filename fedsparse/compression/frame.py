"""The wire frame: one compressed update as bytes.

Layout (little endian; a varint is LEB128)::

    magic "FS"  version u8  flags u8
    spec        varint length, UTF-8      without what a receiver does not need, see `Compressor.wire`
    d, k        varint, varint            k is omitted where every coordinate is sent
    update_id   u64
    seed        u64, only where the positions follow from it
    positions   method u8, varint length, bytes
    codes       method u8, varint length, bytes
    scales      float32 each; how many follows from the spec
    checksum    CRC-32 of all before

The receiver gives d and the compressor from its own side; a frame that says otherwise is refused.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression import sections
from fedsparse.compression.base import Indices, Vector
from fedsparse.compression.compressor import Bounds, Compressed, Compressor
from fedsparse.compression.operators.floats import Float32
from fedsparse.errors import ConfigError, PayloadError
from fedsparse.seeding import generator

MAGIC = b"FS"
VERSION = 1


def encode(update: Compressed, compressor: Compressor, update_id: int = 0) -> bytes:
    """Return the frame of `update`, which `compressor` made."""
    if not 0 <= update_id < 2**64:
        raise ValueError(f"an update id is a whole number of 64 bits, got {update_id}.")
    spec = compressor.wire.encode()
    seeded = compressor.sparsifier.seeded
    head = [MAGIC, bytes([VERSION, 0]), _varint(len(spec)), spec, _varint(update.d)]
    if update.indices is not None:
        head.append(_varint(update.nnz))
    head.append(struct.pack("<Q", update_id))
    if seeded:
        head.append(struct.pack("<Q", update.seed))
        method, positions = sections.SEEDED, b""
    elif update.indices is None:
        method, positions = sections.DENSE, b""
    else:
        method, positions = sections.encode_indices(update.indices, update.d)
    # A dense float update is plain FedAvg and must cost what FedAvg costs.
    plain = update.indices is None and isinstance(compressor.quantizer, Float32)
    code_method, codes = sections.encode_codes(update.codes, compressor.quantizer, plain)
    body = b"".join(
        [
            *head,
            bytes([method]),
            _varint(len(positions)),
            positions,
            bytes([code_method]),
            _varint(len(codes)),
            codes,
            update.scales.astype("<f4").tobytes(),
        ]
    )
    return body + struct.pack("<I", zlib.crc32(body))


def decode(
    frame: bytes | memoryview,
    compressor: Compressor,
    d: int,
    *,
    bounds: Bounds | None = None,
    update_id: int | None = None,
) -> Compressed:
    """Read a frame that must be an update of length `d` made by `compressor`.

    Raises
    ------
    PayloadError
        For every malformed, damaged, foreign or unexpected frame; never anything else.
    """
    reader = _Reader(memoryview(frame))
    reader.check_head()
    spec = bytes(reader.take(reader.varint()))
    if spec != compressor.wire.encode():
        raise PayloadError(f"the frame was made by {spec.decode(errors='replace')!r}, expected {compressor.wire!r}.")
    return _read_rest(reader, compressor, d, bounds, update_id)


def _read_rest(
    reader: "_Reader", compressor: Compressor, d: int, bounds: Bounds | None, update_id: int | None
) -> Compressed:
    if (sent_d := reader.varint()) != d:
        raise PayloadError(f"the frame is an update of length {sent_d}, the model has {d}.")
    dense = compressor.sparsifier.name == "none"
    k = d if dense else reader.varint()
    pieces = compressor.pieces(d, bounds)
    if k > sum(compressor.sparsifier.max_kept(stop - start) for start, stop in pieces):
        raise PayloadError(f"the frame sends {k} of {d} coordinates, more than {compressor.spec} ever does.")
    (sent_id,) = struct.unpack("<Q", reader.take(8))
    if update_id is not None and sent_id != update_id:
        raise PayloadError(f"the frame carries update {sent_id}, expected update {update_id}.")
    seed = struct.unpack("<Q", reader.take(8))[0] if compressor.sparsifier.seeded else 0
    method, positions = reader.take(1)[0], reader.take(reader.varint())
    if dense or compressor.sparsifier.seeded:
        if method != (sections.DENSE if dense else sections.SEEDED) or len(positions):
            raise PayloadError(f"{compressor.spec} sends no positions, but the frame has some.")
        indices = None if dense else _derive(compressor, pieces, seed)
        if indices is not None and indices.size != k:
            raise PayloadError(f"the seed gives {indices.size} positions, the header says {k}.")
    else:
        indices = sections.decode_indices(method, positions, d, k)
    counts = _counts(pieces, indices)
    code_method, data = reader.take(1)[0], reader.take(reader.varint())
    quantizer = compressor.quantizer
    num_codes = [quantizer.num_codes(count) for count in counts]
    codes = sections.decode_codes(code_method, data, quantizer, sum(num_codes))
    scales = np.frombuffer(reader.take(4 * quantizer.num_scales * len(pieces)), dtype="<f4").astype(np.float32)
    if not np.isfinite(scales).all():
        raise PayloadError("the frame holds scales that are not finite.")
    reader.check_end()
    values = _dequantize(compressor, codes, scales, counts, num_codes)
    if values is not codes and not np.isfinite(values).all():
        raise PayloadError("the frame decodes to values that are not finite.")
    return Compressed(d=d, indices=indices, codes=codes, scales=scales, values=values, seed=seed)


def decode_own(frame: bytes, d: int, bounds: Bounds | None = None) -> Compressed:
    """Read a frame of one's own making, whose spec is taken from the frame itself.

    Not for frames that came over a network: those are read with the receiver's own spec.
    """
    reader = _Reader(memoryview(frame))
    reader.check_head()
    try:
        compressor = Compressor.from_wire(bytes(reader.take(reader.varint())).decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise PayloadError(f"the stored frame names no known compressor: {error}") from None
    return _read_rest(reader, compressor, d, bounds, None)


def _derive(compressor: Compressor, pieces: list[tuple[int, int]], seed: int) -> Indices:
    """Repeat the choice of a seeded sparsifier, which looks at nothing but each piece's length."""
    chosen = []
    for number, (start, stop) in enumerate(pieces):
        blank = np.broadcast_to(np.float32(0.0), stop - start)  # a vector of that length that takes no memory
        kept = compressor.sparsifier.select(blank, generator(seed, "select", number))
        chosen.append(np.arange(start, stop, dtype=np.int64) if kept is None else kept + start)
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def _counts(pieces: list[tuple[int, int]], indices: Indices | None) -> list[int]:
    if indices is None:
        return [stop - start for start, stop in pieces]
    if len(pieces) == 1:
        return [indices.size]
    edges = np.searchsorted(indices, [start for start, _ in pieces] + [pieces[-1][1]] if pieces else [0])
    return [int(n) for n in np.diff(edges)]


def _dequantize(
    compressor: Compressor,
    codes: NDArray[np.generic],
    scales: Vector,
    counts: list[int],
    num_codes: list[int],
) -> Vector:
    quantizer, per_piece = compressor.quantizer, compressor.quantizer.num_scales
    values, at = [], 0
    with np.errstate(over="ignore", invalid="ignore"):
        for number, (count, taken) in enumerate(zip(counts, num_codes, strict=True)):
            scale = scales[number * per_piece : (number + 1) * per_piece]
            values.append(quantizer.dequantize(codes[at : at + taken], scale, count))
            at += taken
    if len(values) == 1:
        return values[0]
    return np.concatenate(values) if values else np.empty(0, dtype=np.float32)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Reader:
    def __init__(self, frame: memoryview) -> None:
        self.frame, self.position = frame, 0
        self.end = len(frame) - 4

    def check_head(self) -> None:
        if self.end < 4 or self.frame[:2] != MAGIC:
            raise PayloadError("this is no fedsparse frame.")
        if self.frame[2] != VERSION or self.frame[3] != 0:
            raise PayloadError(
                f"the frame has format version {self.frame[2]} (flags {self.frame[3]}), this side reads version "
                f"{VERSION}: update fedsparse on the older side."
            )
        (sent,) = struct.unpack("<I", self.frame[self.end :])
        if zlib.crc32(self.frame[: self.end]) != sent:
            raise PayloadError("the checksum does not match: the frame is damaged.")
        self.position = 4

    def take(self, count: int) -> memoryview:
        if count > self.end - self.position:
            raise PayloadError("the frame ends early.")
        self.position += count
        return self.frame[self.position - count : self.position]

    def varint(self) -> int:
        number = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise PayloadError("a number in the frame is too long.")

    def check_end(self) -> None:
        if self.position != self.end:
            raise PayloadError(f"{self.end - self.position} unexpected bytes at the end of the frame.")

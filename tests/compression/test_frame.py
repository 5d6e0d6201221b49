"""The wire frame: golden bytes, size, and hostile input."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsparse.compression import Compressor, PayloadError, bits, decode, encode, sections
from fedsparse.compression.frame import decode_own
from fedsparse.compression.operators.randk import uniform_subset

BOUNDS = np.array([0, 5, 8])
X = np.array([0.0, 1.5, -2.0, 0.25, 0.0, -8.0, 4.0, 0.125], np.float32)
GOLDEN = {
    "topk(k=3)": "4653010004746f706b08030700000000000000040126000c000000c0000000c1000080402648b50c",
    "hard_threshold(lam=1.0)|sign": "4653010013686172645f7468726573686f6c647c7369676e"
    "0804070000000000000004016601010900007840ce2e89fc",
    "none|qsgd(levels=2)": "46530100136e6f6e657c71736764286c6576656c733d3229"
    "0807000000000000000600010392244c23a91441aea4c5cc",
    "randk(k=2)|float16": "465301001272616e646b286b3d32297c666c6f61743136"
    "080207000000000000000100000000000000050000040000007400000037931755dc",
}


def entropy_bits(d: int, k: int) -> float:
    """log2 of the number of k-subsets of d."""
    from math import lgamma, log

    return (lgamma(d + 1) - lgamma(k + 1) - lgamma(d - k + 1)) / log(2)


@pytest.mark.parametrize("spec", GOLDEN)
def test_golden_bytes(spec):
    """The format is a promise: devices in the field speak it."""
    compressor = Compressor.from_spec(spec)
    frame = encode(compressor.compress(X, 1), compressor, update_id=7)
    assert frame.hex() == GOLDEN[spec]


def test_a_frame_with_all_options_in_its_spec_is_still_read_from_a_memory():
    """As builds before the short text wrote them; over the network they are refused."""
    old = bytes.fromhex("4653010009746f706b286b3d332908030700000000000000040126000c000000c0000000c10000804068ad1071")
    compressor = Compressor.from_spec("topk(k=3)")
    assert decode_own(old, 8).to_dense().tolist() == compressor.compress(X, 1).to_dense().tolist()
    with pytest.raises(PayloadError, match="made by"):
        decode(old, compressor, 8)


@pytest.mark.parametrize(
    ("spec", "wire"),
    [
        ("topk(density=0.01)|sign", "topk|sign"),
        ("hard_threshold(lam=0.1, at_most=5)", "hard_threshold"),
        ('hard_threshold(lam="1/(2*sqrt(k))", density=0.01)|qsgd(levels=4)', "hard_threshold|qsgd(levels=4)"),
        ("piecewise(topk(k=2)|sign)", "piecewise(topk|sign)"),
        ("randk(k=2)", "randk(k=2)"),  # its positions follow from k
    ],
)
def test_frames_name_only_what_a_receiver_needs(spec, wire):
    compressor = Compressor.from_spec(spec)
    assert compressor.wire == wire
    frame = encode(compressor.compress(X, 3, BOUNDS), compressor)
    assert wire.encode() in frame
    assert decode_own(frame, 8, BOUNDS).to_dense().tolist() == compressor.compress(X, 3, BOUNDS).to_dense().tolist()


@pytest.mark.parametrize(("d", "k"), [(10**6, 10**4), (10**6, 10**3), (10**7, 10**5), (10**6, 1), (10**6, 600_000)])
def test_positions_near_the_information_bound(d, k):
    compressor = Compressor.from_spec(f"topk(k={k})|sign")
    x = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    sent = compressor.compress(x, 0)
    frame = encode(sent, compressor)
    _, positions = sections.encode_indices(sent.indices, d)
    # Below some hundred positions whole bytes are what limits, so two bytes are allowed on top.
    assert 8 * len(positions) <= 1.02 * entropy_bits(d, k) + 16
    assert len(frame) - len(positions) - (k + 7) // 8 <= 96


def test_dense_float_updates_cost_what_fedavg_costs():
    compressor = Compressor.from_spec("none")
    x = np.zeros(1000, np.float32)
    assert 4000 <= len(encode(compressor.compress(x, 0), compressor)) <= 4096


def test_more_than_32_bit_positions():
    """Nothing of size d is allocated for a sparse update of a huge model."""
    d = 2**33
    compressor = Compressor.from_spec("hard_threshold(lam=1.0)")
    tiny = compressor.compress(np.array([5.0, -2.0], np.float32), 0)
    huge = type(tiny)(d=d, indices=np.array([3, d - 1]), codes=tiny.codes, scales=tiny.scales, values=tiny.values)
    back = decode(encode(huge, compressor), compressor, d)
    assert back.indices.tolist() == [3, d - 1]
    assert back.d == d


@given(st.lists(st.integers(0, 2**20 - 1), max_size=70), st.integers(1, 62))
def test_bit_packing_round_trips(numbers, width):
    values = np.array(numbers, dtype=np.int64) & ((1 << width) - 1)
    packed = bits.pack(values, width)
    assert len(packed) == bits.packed_size(len(numbers), width)
    assert bits.unpack(packed, width, len(numbers)).tolist() == values.tolist()


@given(st.integers(1, 5000), st.data())
def test_positions_round_trip_in_every_way(d, data):
    chosen = data.draw(st.sets(st.integers(0, d - 1)))
    indices = np.array(sorted(chosen), dtype=np.int64)
    method, raw = sections.encode_indices(indices, d)
    assert sections.decode_indices(method, memoryview(raw), d, indices.size).tolist() == indices.tolist()


def test_uniform_subset_is_uniform_and_stable():
    counts = np.zeros(10)
    for seed in range(4000):
        counts[uniform_subset(10, 3, np.random.Generator(np.random.PCG64(seed)))] += 1
    assert abs(counts - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)
    # Both sides of a connection must draw these very positions, whatever their NumPy version.
    assert uniform_subset(1000, 4, np.random.Generator(np.random.PCG64(1))).tolist() == [86, 127, 778, 885]


SPECS = ["topk(k=3)|qsgd(levels=4)", "randk(k=3)|float16", "hard_threshold(lam=0.5)|sign", "none|qsgd", "none"]


def resealed(body: bytes) -> bytes:
    """Give a tampered body a valid checksum: an attacker would."""
    return body + zlib.crc32(body).to_bytes(4, "little")


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=150)
@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 60), tail=st.binary(max_size=5))
def test_tampered_frames_are_payload_errors_or_valid(spec, position, value, cut, tail):
    """Whatever the bytes, decoding ends with PayloadError or a well-formed update of the right length."""
    compressor = Compressor.from_spec(spec)
    body = bytearray(encode(compressor.compress(np.tile(X, 8), 1), compressor)[:-4])
    body[position % len(body)] = value
    tampered = bytes(body[: len(body) - cut]) + tail
    try:
        update = decode(resealed(tampered), compressor, 64)
    except PayloadError:
        return
    assert update.d == 64
    assert np.isfinite(update.values).all()
    assert update.indices is None or (np.all(np.diff(update.indices) > 0) and update.indices[-1:].max(initial=0) < 64)


@given(st.binary(max_size=300))
def test_garbage_is_a_payload_error(data):
    with pytest.raises(PayloadError):
        decode(data, Compressor.from_spec("topk(k=3)"), 64)
    with pytest.raises(PayloadError):
        decode(resealed(b"FS\x01\x00" + data), Compressor.from_spec("topk(k=3)"), 64)


def test_what_does_not_fit_the_receiver_is_named():
    topk = Compressor.from_spec("topk(k=3)")
    frame = encode(topk.compress(X, 0), topk, update_id=5)
    for args, words in [
        ({"compressor": topk, "d": 9}, "length 8, the model has 9"),
        ({"compressor": Compressor.from_spec("topk(k=3)|sign"), "d": 8}, r"made by 'topk', expected 'topk\|sign'"),
        ({"compressor": Compressor.from_spec("topk(k=2)"), "d": 8}, r"sends 3 of 8 coordinates, more than topk\(k=2\)"),
        ({"compressor": topk, "d": 8, "update_id": 6}, "carries update 5, expected update 6"),
    ]:
        with pytest.raises(PayloadError, match=words):
            decode(frame, **args)
    with pytest.raises(PayloadError, match="damaged"):
        decode(frame[:-1] + bytes([frame[-1] ^ 1]), topk, 8)
    with pytest.raises(PayloadError, match="version 2"):
        decode(frame[:2] + b"\x02" + frame[3:], topk, 8)
    more = Compressor.from_spec("topk(k=7)")
    body = encode(more.compress(X + 10, 0), more).replace(b"topk(k=7)", b"topk(k=3)")[:-4]
    with pytest.raises(PayloadError, match="sends 7 of 8"):
        decode(resealed(body), topk, 8)


def test_usable_without_flower_torch_or_ray():
    """The compression core by itself, in a process that cannot import the rest."""
    program = (
        "import sys\n"
        "for name in ('flwr', 'torch', 'ray', 'sklearn', 'pydantic'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "from fedsparse.compression import Compressor, decode, encode\n"
        "c = Compressor.from_spec('topk(k=2)|sign')\n"
        "x = np.arange(9, dtype=np.float32)\n"
        "print(decode(encode(c.compress(x, 0), c), c, 9).indices.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[7, 8]"

"""Packed messages come out as they went in, and share nothing that can be written."""

import copy
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsparse.engine.transport import SharedArray, copy_arrays, lease_arrays, pack, packed_bytes, unpack
from fedsparse.protocol import array_view, to_array

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.float16]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
)
SCALARS = st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.lists(st.integers(0, 9), max_size=3))
CONFIGS = st.dictionaries(st.text(max_size=5), st.one_of(SCALARS, st.text(), st.binary(), st.booleans()), max_size=4)


def through_pickle(packed: object) -> object:
    """As another process would get it: buffers out of band."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytearray(buffer.raw()) for buffer in buffers])


@given(st.lists(ARRAYS, max_size=3), CONFIGS, st.dictionaries(st.text(max_size=5), SCALARS, max_size=3), st.booleans())
def test_contents_survive(arrays: list[np.ndarray], config: dict, metrics: dict, fortran: bool) -> None:
    arrays = [np.asfortranarray(array) if fortran and array.ndim else array for array in arrays]
    assert [to_array(array) for array in arrays] == [Array(array) for array in arrays]
    content = RecordDict(
        {
            "arrays": ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)}),
            "frame": ArrayRecord({"x": Array("uint8", (9,), "own.kind", b"\x00" * 5000)}),
            "config": ConfigRecord(config),
            "metrics": MetricRecord(metrics),
        }
    )
    before = copy.deepcopy(content)
    for travelled in (pack(content), through_pickle(pack(content)), through_pickle(pack(unpack(pack(content))))):
        received = unpack(travelled)  # type: ignore[arg-type]
        assert list(received) == list(content)
        for name in content:
            assert received[name] == content[name]
        for key, array in received["arrays"].items():
            fresh = array.numpy()
            assert fresh.flags.writeable
            assert fresh.dtype == arrays[int(key)].dtype
            np.testing.assert_array_equal(fresh, arrays[int(key)])
            fresh[...] = 1
            assert not array_view(array).flags.writeable
        received["config"]["more"] = 1
        for value in received["metrics"].values():
            if isinstance(value, list):
                value.append(7)
        del received["arrays"]
        for name in before:
            assert content[name] == before[name]


def test_shared_arrays_are_arrays_to_everyone() -> None:
    numbers = np.arange(10_000, dtype=np.float32)
    packed = lease_arrays(through_pickle(pack(RecordDict({"a": ArrayRecord([numbers])})))[0][2])  # type: ignore[index]
    one, two = (unpack([("a", "array", packed)])["a"]["0"] for _ in range(2))
    assert isinstance(one, SharedArray)
    assert one == two == Array(numbers)
    assert Array(numbers) == one
    assert one.buffer.readonly
    assert one.data is two.data  # one copy for all, made when somebody asks
    assert ArrayRecord({"again": one})["again"] == one
    assert type(pickle.loads(pickle.dumps(one))) is Array
    assert copy.deepcopy(one) == one
    one.data = Array(numbers * 2).data
    assert two == Array(numbers)
    np.testing.assert_array_equal(one.numpy(), numbers * 2)
    frame = SharedArray("uint8", (9,), "own.kind", packed[0][4])
    with pytest.raises(TypeError, match=r"own\.kind"):
        frame.numpy()


def test_copies_own_their_memory() -> None:
    content = RecordDict({"a": ArrayRecord([np.ones(10_000)])})
    packed = pack(content)
    assert packed_bytes(packed) == len(content["a"]["0"].data)
    copied = unpack([("a", "array", copy_arrays(packed[0][2]))])
    assert copied["a"]["0"].data is copied["a"]["0"].buffer.obj
    assert copied["a"] == content["a"]

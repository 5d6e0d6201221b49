"""Flower's RecordDict as bytes: what engines keep of a Context, and clients of a reply."""

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto


def to_bytes(records: RecordDict) -> bytes:
    """Return Flower's own protobuf message of it."""
    return bytes(recorddict_to_proto(records).SerializeToString())


def from_bytes(written: bytes) -> RecordDict:
    """Undo `to_bytes`."""
    return recorddict_from_proto(RecordDictProto.FromString(written))

"""Put arrays that many messages carry into Ray's object store once, however many clients read them."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Message

from .transport import buffer_of, pack_arrays

WORTH_SHARING = 16 * 1024  # bytes; less travels faster inside the batches
KEPT = 4

Fingerprint = tuple[tuple[str, str, tuple[int, ...], str, int], ...]


class SharedArrays:
    """The ArrayRecords that are in the object store, known by the identity of their data.

    Data of an `Array` is immutable, so the same data objects mean the same numbers, even where a strategy puts them
    into a new ArrayRecord for each message. The data is kept alive here, so that identities are not reused.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Fingerprint, tuple[int, list[Any]]] = OrderedDict()
        self._refs: dict[int, Any] = {}
        self._next = 0

    def admit(self, messages: Iterable[Message]) -> dict[int, int]:
        """Share what pays among some messages; return the key for each shared record, by the record's ``id()``."""
        records: dict[int, tuple[ArrayRecord, int]] = {}
        for message in messages:
            for record in message.content.values():
                if isinstance(record, ArrayRecord):
                    first, times = records.get(id(record), (record, 0))
                    records[id(record)] = first, times + 1
        groups: dict[Fingerprint, list[tuple[ArrayRecord, int]]] = {}
        for record, times in records.values():
            groups.setdefault(_fingerprint(record), []).append((record, times))
        keys: dict[int, int] = {}
        for fingerprint, members in groups.items():
            several = sum(times for _, times in members) > 1
            if fingerprint in self._known or (several and _size(members[0][0]) >= WORTH_SHARING):
                key = self._key(fingerprint, members[0][0])
                keys.update((id(record), key) for record, _ in members)
        return keys

    def _key(self, fingerprint: Fingerprint, record: ArrayRecord) -> int:
        if fingerprint not in self._known:
            from ._ray import ray

            self._refs[self._next] = ray.put(pack_arrays(record))
            self._known[fingerprint] = self._next, [buffer_of(array) for array in record.values()]
            self._next += 1
        self._known.move_to_end(fingerprint)
        return self._known[fingerprint][0]

    def ref(self, key: int) -> Any:
        """Return the object reference for a key."""
        return self._refs[key]

    def keys(self) -> list[int]:
        """Return the keys that are still in use or may be soon."""
        return list(self._refs)

    def trim(self, in_use: set[int]) -> None:
        """Free all but the newest records and those in use."""
        for fingerprint, (key, _) in list(self._known.items())[:-KEPT]:
            if key not in in_use:
                del self._known[fingerprint], self._refs[key]


def _fingerprint(record: ArrayRecord) -> Fingerprint:
    return tuple(
        (name, array.dtype, tuple(array.shape), array.stype, id(buffer_of(array))) for name, array in record.items()
    )


def _size(record: ArrayRecord) -> int:
    return sum(len(buffer_of(array)) for array in record.values())

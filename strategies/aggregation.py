"""From received frames to what the inner strategy aggregates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt
from numpy.typing import NDArray

from fedsparse.compression import Compressed
from fedsparse.compression.layout import Layout
from fedsparse.protocol import Receipt

# Their aggregate_train starts from the weighted mean of the clients' models, so it may be given that mean as one reply.
_AVERAGING = (FedAvg, FedAvgM, FedOpt, FedAdagrad, FedAdam, FedYogi)


def averages(inner: Strategy) -> bool:
    """Whether the inner strategy needs no more than the weighted mean of the updates."""
    owner = next(cls for cls in type(inner).__mro__ if "aggregate_train" in vars(cls))
    return owner in _AVERAGING


@dataclass(frozen=True)
class Update:
    """One decoded reply."""

    client: str
    compressed: Compressed
    exact: Mapping[str, NDArray[np.generic]]
    receipt: Receipt
    metrics: MetricRecord
    weight: float
    payload_bytes: int = 0


class Mean:
    """The weighted mean of sparse updates in one dense accumulator: O(d + sum of nnz), no dense copy per client."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.weight = layout, 0.0
        self._sum = np.zeros(layout.d, dtype=np.float32)
        self._exact: dict[str, NDArray[np.float64]] = {
            entry.name: np.zeros(entry.shape, dtype=np.float64) for entry in layout.exact
        }

    def add(self, update: Update) -> None:
        """Add one update times its weight."""
        self.weight += update.weight
        update.compressed.add_to(self._sum, update.weight)
        for name, total in self._exact.items():
            total += update.weight * update.exact[name].astype(np.float64)

    def applied_to(self, base: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return ``base + sum w_i C(p_i) / sum w_i``; integers are averaged and rounded."""
        delta = self._sum / np.float32(self.weight)
        exact = {entry.name: _cast(self._exact[entry.name] / self.weight, entry.dtype) for entry in self.layout.exact}
        return self.layout.apply(base, delta, exact)


def _cast(array: NDArray[Any], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    return (np.rint(array) if dtype.kind in "iub" else array).astype(dtype)


def to_record(arrays: Mapping[str, NDArray[np.generic]]) -> ArrayRecord:
    """Write arrays as Flower does."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def like(record: ArrayRecord, base: Mapping[str, NDArray[np.generic]]) -> ArrayRecord:
    """Return `record` in the dtypes of `base`: some strategies return float64 whatever they were given."""
    if all(record[name].dtype == str(base[name].dtype) for name in record):
        return record
    return to_record({name: _cast(array.numpy(), base[name].dtype) for name, array in record.items()})


def reply_content(
    arrays: ArrayRecord, metrics: Mapping[str, Any], weight_key: str, weight: float, array_key: str
) -> RecordDict:
    """Return what a plain client would have replied."""
    return RecordDict({array_key: arrays, "metrics": MetricRecord({**metrics, weight_key: weight})})

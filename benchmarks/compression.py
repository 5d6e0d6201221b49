"""Frame sizes against the information bound; speed of error feedback and of aggregation. One thread, one run.

Run: ``python -m benchmarks.compression``
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tracemalloc
from math import lgamma, log

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from benchmarks._report import interleaved, save
from fedsparse.compression import Compressor, decode, encode, sections
from fedsparse.compression.layout import Layout
from fedsparse.protocol import Receipt
from strategies.aggregation import Mean, Update


def entropy_bits(d: int, k: int) -> float:
    return (lgamma(d + 1) - lgamma(k + 1) - lgamma(d - k + 1)) / log(2)


def frame_sizes() -> list[dict]:
    rows = []
    for d in (10**6, 10**7):
        x = np.random.default_rng(d).standard_normal(d).astype(np.float32)
        for density in (0.01, 0.001):
            compressor = Compressor.from_spec(f"topk(density={density})")
            sent = compressor.compress(x, 0)
            frame = encode(sent, compressor, 2**40)
            method, positions = sections.encode_indices(sent.indices, d)
            _, codes = sections.encode_codes(sent.codes, compressor.quantizer, plain=False)
            rows.append(
                {
                    "what": "frame",
                    "d": d,
                    "density": density,
                    "k": sent.nnz,
                    "bits_per_position": round(8 * len(positions) / sent.nnz, 3),
                    "entropy_per_position": round(entropy_bits(d, sent.nnz) / sent.nnz, 3),
                    "positions_over_entropy": round(8 * len(positions) / entropy_bits(d, sent.nnz), 4),
                    "value_bytes_per_coordinate": round(len(codes) / sent.nnz, 3),
                    "other_bytes": len(frame) - len(positions) - len(codes),
                    "frame_bytes": len(frame),
                    "written_as": "rice" if method == sections.RICE else "pcodec",
                }
            )
    return rows


def error_feedback(d: int = 10**7) -> dict:
    x = (0.01 * np.random.default_rng(0).standard_normal(d)).astype(np.float32)
    lam = float(np.quantile(np.abs(x[:100_000]), 0.99))
    compressor = Compressor.from_spec(f"hard_threshold(lam={lam})")
    residual, kept, target = np.zeros(d, np.float32), [], np.empty_like(x)

    def feedback() -> None:
        kept[:] = [compressor.compress_with_memory(x, residual, 0)]

    def reset() -> None:  # untimed for the ratio: the same work in every turn
        residual[:] = 0

    times = interleaved(
        {
            "reset": reset,
            "memcpy": lambda: x.copy(),
            "memcpy_in_place": lambda: np.copyto(target, x),
            "feedback": feedback,
            "encode": lambda: encode(kept[0], compressor),
        },
        repeats=21,
    )
    return {
        "what": "error feedback + hard threshold + select",
        "d": d,
        "density": round(kept[0].density, 4),
        **{f"{name}_ms": round(1e3 * t, 2) for name, t in times.items() if name != "reset"},
        "feedback_over_memcpy": round(times["feedback"] / times["memcpy"], 2),
        "with_encode_over_memcpy": round((times["feedback"] + times["encode"]) / times["memcpy"], 2),
        "feedback_over_memcpy_in_place": round(times["feedback"] / times["memcpy_in_place"], 2),
    }


def aggregation(d: int = 10**6, clients: int = 100) -> list[dict]:
    base = {"w": np.zeros(d, np.float32)}
    layout = Layout.of(base)
    rows = []
    for spec in ("topk(density=0.01)", "topk(density=0.01)|sign", "hard_threshold(lam=3.29)|qsgd(levels=16)", "none"):
        compressor = Compressor.from_spec(spec)
        frames, dense = [], []
        for client in range(clients):
            sent = compressor.compress(np.random.default_rng(client).standard_normal(d).astype(np.float32), client)
            frames.append(encode(sent, compressor, client))
            arrays = ArrayRecord({"w": Array(sent.to_dense())})
            dense.append(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10 + client})}))

        def ours(frames: list = frames, compressor: Compressor = compressor) -> dict:
            mean = Mean(layout)
            for client, frame in enumerate(frames):
                update = decode(frame, compressor, d, update_id=client)
                mean.add(Update(str(client), update, {}, Receipt(client), MetricRecord(), 10.0 + client))
            return mean.applied_to(base)

        def flowers(dense: list = dense) -> np.ndarray:
            return aggregate_arrayrecords(dense, "num-examples")["w"].numpy()

        np.testing.assert_allclose(ours()["w"], flowers(), atol=1e-5)
        times = interleaved({"fedsparse": ours, "flwr": flowers}, repeats=5)
        tracemalloc.start()
        ours()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(
            {
                "what": f"decode + aggregate {clients} updates",
                "d": d,
                "spec": spec,
                "fedsparse_ms": round(1e3 * times["fedsparse"], 1),
                "flwr_dense_ms": round(1e3 * times["flwr"], 1),
                "times_faster": round(times["flwr"] / times["fedsparse"], 1),
                "peak_bytes_over_4d": round(peak / (4 * d), 2),
            }
        )
    return rows


if __name__ == "__main__":
    save("compression", [*frame_sizes(), error_feedback(), *aggregation()])

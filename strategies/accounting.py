"""What a round's accepted updates were, in numbers."""

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedsparse.compression import Compressor
from fedsparse.compression.layout import Layout
from fedsparse.compression.operators.hard_threshold import HardThreshold
from strategies.aggregation import Update
from strategies.report import RoundReport

log = logging.getLogger(__name__)


def describe(report: RoundReport, updates: Sequence[Update], compressors: Sequence[Compressor], layout: Layout) -> None:
    """Write into a round's report what its accepted updates were; `compressors` made them, in the same order."""
    counts = [update.compressed.nnz for update in updates]
    norms = [update.receipt.residual_norm for update in updates]
    pieces = len(layout.compressed)
    report.nnz = sum(counts)
    report.density = float(np.mean(counts)) / layout.d if layout.d else None
    report.uplink_frame_bits_formula = sum(
        compressor.formula_bits(layout.d, n, pieces) for compressor, n in zip(compressors, counts, strict=True)
    )
    report.dense_bytes = len(updates) * layout.dense_bytes
    report.lam = mean_threshold(compressors, layout.d)
    report.residual_norm, report.residual_norm_max = float(np.mean(norms)), max(norms)
    report.residual_norms = dict(zip((update.client for update in updates), norms, strict=True))
    report.update_norm = float(np.mean([update.receipt.update_norm for update in updates]))
    report.memory_resets = sum(update.receipt.memory_reset for update in updates)
    report.restored = sum(update.receipt.restored for update in updates)
    losses = [(u.weight, u.metrics.get("train-loss")) for u in updates]
    known = [(w, float(x)) for w, x in losses if isinstance(x, int | float) and np.isfinite(x)]
    weight = sum(w for w, _ in known)
    report.train_loss = sum(w * x for w, x in known) / weight if weight else None


def with_common_metrics(updates: Sequence[Update]) -> list[Update]:
    """Return the updates whose metrics are those of most clients: others cannot be averaged with them."""

    def kind(update: Update) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((k, len(v) if isinstance(v, list) else -1) for k, v in update.metrics.items()))

    kinds = [kind(update) for update in updates]
    ((common, _),) = Counter(kinds).most_common(1)
    if strange := [update.client for update, its in zip(updates, kinds, strict=True) if its != common]:
        log.warning("client %s sent other metrics than most: they are left out", ", ".join(strange))
    return [update for update, its in zip(updates, kinds, strict=True) if its == common]


def mean_threshold(compressors: Sequence[Compressor], d: int) -> float | None:
    """Return the mean lam where all of them are hard thresholds, else None."""
    lams: dict[Compressor, float] = {}
    for compressor in set(compressors):
        sparsifier = compressor.sparsifier
        if not isinstance(sparsifier, HardThreshold) or (compressor.piecewise and isinstance(sparsifier.lam, str)):
            return None  # with piecewise, the paper's rule gives every tensor its own
        lams[compressor] = sparsifier.threshold(d)
    if len(lams) == 1:
        return next(iter(lams.values()))
    return float(np.mean([lams[compressor] for compressor in compressors]))


def divergence_warning(compressor: Compressor, kept: int) -> str | None:
    """Say what is wrong with a quantizer that is no contraction on as many values as are really kept."""
    quantizer = compressor.quantizer
    # Of the other quantizers the bound is far from what really happens; of this one it is close.
    if compressor.piecewise or getattr(quantizer, "norm", "") != "l2":
        return None
    beta = quantizer.claim(kept).relative
    if beta < 1.0:
        return None
    return (
        f"{quantizer.name} of {kept} kept values has a relative error of {beta:.2f} >= 1: it is no contraction, the "
        "error memory can grow without bound and training diverge (Basu et al. 2019, Lemma 1). Use "
        f'{quantizer.name}(..., scaled=true), {quantizer.name}(..., norm="max"), more levels, or piecewise(...).'
    )

"""Bytes to a target: a loss that the baseline reached, plus some percent."""

from collections.abc import Sequence

from fedsparse.compare.results import Comparison, Run
from fedsparse.reproduce.claims import Verdict
from fedsparse.reproduce.gates import both, fewer
from fedsparse.reproduce.measures import bytes_to, each, final_loss, total_bytes


def fewer_bytes(
    comparison: Comparison,
    baseline: str,
    tolerance: float,
    name: str,
    others: Sequence[tuple[str, float]],
    *,
    formula: bool = False,
) -> Verdict:
    """Judge "`name` needs so many times fewer bytes than others to a loss at most `tolerance` above the baseline's".

    Each seed has its own target: the baseline's final loss with that seed.

    Parameters
    ----------
    others : sequence of (str, float)
        Variant, and how many times fewer.
    formula : bool
        Count by the papers' formula in place of the frames that were sent.
    """
    final = dict(zip(comparison.seeds, each(comparison, baseline, final_loss), strict=True))

    def spent(run: Run) -> float | None:
        target = final[run.seed]
        return None if target is None else bytes_to(run, (1 + tolerance) * target, formula=formula)

    def limit(run: Run) -> float:
        return total_bytes(run, formula=formula)

    ours = each(comparison, name, spent)
    what = "bytes by formula" if formula else "bytes of frames"
    return both(
        *(
            fewer(what, (name, other), (ours, each(comparison, other, spent)), factor, each(comparison, other, limit))
            for other, factor in others
        )
    )

"""Sahu et al. 2021: one constant threshold against Top-k, at equal total bits."""

from functools import partial

from fedsparse.compare.results import Comparison, Run
from fedsparse.reproduce.claims import Claim, Outcome, Paper, Part, Verdict
from fedsparse.reproduce.gates import both, lower
from fedsparse.reproduce.measures import each, loss_at, total_bytes, total_error
from fedsparse.reproduce.plots import error_and_loss, loss_by_bytes, total_error_by_round

Names = tuple[str, str]
LEAST_OVERLAP = 0.7


def equal_bytes(comparison: Comparison, names: Names, *, formula: bool = True) -> Verdict:
    """Judge "hard threshold reaches a lower loss than Top-k at equal total bytes".

    Each pair is compared at the smaller of its two totals: of the papers' formula, which counts the coordinates that
    were sent, or of the real frames, which have headers as well.
    """
    totals = [each(comparison, name, partial(total_bytes, formula=formula)) for name in names]
    both_ran = [
        (seed, a, b) for seed, a, b in zip(comparison.seeds, *totals, strict=True) if a is not None and b is not None
    ]
    ratios, spent = [a / b for _, a, b in both_ran], {seed: min(a, b) for seed, a, b in both_ran}
    if ratios and not all(LEAST_OVERLAP <= ratio <= 1 / LEAST_OVERLAP for ratio in ratios):
        text = f"{names[0]} sent {min(ratios):.2f} to {max(ratios):.2f} of what {names[1]} sent"
        return Verdict(Outcome.NOT_COMPARABLE, text, "the totals are too far apart for a comparison at equal bytes.")

    def measure(run: Run) -> float | None:
        return loss_at(run, spent[run.seed], formula=formula) if run.seed in spent else None

    losses = (each(comparison, names[0], measure), each(comparison, names[1], measure))
    verdict = lower(comparison, "loss", names, losses)
    bytes_ = f"bytes {min(ratios):.3f} to {max(ratios):.3f} of {names[1]}'s" if ratios else "no complete pair"
    figures = verdict.figures | {"bytes_ratio": [min(ratios), max(ratios)] if ratios else None}
    return Verdict(verdict.outcome, f"{verdict.ours} ({bytes_})", verdict.reason, verdict.losing, figures)


def less_error(comparison: Comparison, names: Names) -> Verdict:
    """Judge "the total error of hard threshold is lower"."""
    return lower(
        comparison,
        "total error",
        names,
        (each(comparison, names[0], total_error), each(comparison, names[1], total_error)),
    )


def error_explains(comparison: Comparison, pairs: tuple[Names, ...]) -> Verdict:
    """Judge "the one with the lower total error has the lower loss": both comparisons must point the same way.

    Not comparable where the seeds cannot tell one of the two differences from chance.
    """
    agree, texts, undecided = [], [], []
    for names in pairs:
        loss, error = equal_bytes(comparison, names), less_error(comparison, names)
        signs = [_sign(verdict) for verdict in (loss, error)]
        texts.append(f"{names[0]} against {names[1]}: total error {_word(signs[1])}, loss {_word(signs[0])}")
        if None in signs:
            undecided.append(names)
        else:
            agree.append(signs[0] == signs[1])
    ours = ". ".join(texts)
    if agree and not all(agree):
        return Verdict(Outcome.FAILS, ours, "total error and loss point in different directions.")
    if undecided:
        return Verdict(Outcome.NOT_COMPARABLE, ours, "the seeds cannot tell one of the differences from chance.")
    return Verdict(Outcome.HOLDS, ours, "total error and loss point in the same direction.")


def _sign(verdict: Verdict) -> int | None:
    difference = verdict.figures.get("difference")
    if not isinstance(difference, dict) or difference["half"] is None or abs(difference["mean"]) <= difference["half"]:
        return None
    return 1 if difference["mean"] > 0 else -1


def _word(sign: int | None) -> str:
    return {None: "not told apart", 1: "higher", -1: "lower"}[sign]


def _claims(pairs: tuple[Names, ...], paper: str) -> tuple[Claim, ...]:
    names = [name for pair in pairs for name in pair]
    return (
        Claim(
            "equal-bits",
            "At equal total bits, hard threshold reaches a lower loss than Top-k",
            paper,
            lambda comparison: both(*(equal_bytes(comparison, pair) for pair in pairs)),
        ),
        Claim(
            "equal-frames",
            "The same, at equal bytes of the frames that are really sent",
            "Not in the paper, which counts coordinates: a frame of one or two of them is mostly header.",
            lambda comparison: both(*(equal_bytes(comparison, pair, formula=False) for pair in pairs)),
            ((loss_by_bytes(*names), "Loss over all training examples. Farther left is cheaper, lower is better."),),
        ),
        Claim(
            "total-error",
            "Its total error is lower",
            "Theorem 3: under a budget for the whole training, one constant threshold minimises the total error, the "
            "sum of the memories' squared norms; Figure 1 shows it orders of magnitude below Top-k's.",
            lambda comparison: both(*(less_error(comparison, pair) for pair in pairs)),
            ((total_error_by_round(*names), "Sum over the rounds of the mean squared norm of the memories."),),
        ),
        Claim(
            "explains",
            "Total error is what explains it",
            "Section 4: the total error governs the convergence, so the lower one belongs to the lower loss.",
            lambda comparison: error_explains(comparison, pairs),
            (
                (
                    error_and_loss(*names),
                    "Each point is a run. If total error explains the loss, points rise to the right.",
                ),
            ),
        ),
    )


_DATA = (
    "LIBSVM's {name} cannot be had here: {stand_in} of the same size.",
    "λ is chosen so that about as many coordinates are sent in all as by Top-k. Bits are counted twice: by the papers' "
    "formula, and on the frames that are really sent, with positions, header and checksum.",
    "λ is in units of e + γg, as in the paper's logistic regression.",
)
_LOGISTIC = (
    "Section 5.2 and Appendix: logistic regression, 20 workers, batch 1, γ = 1/(L + l2), l2 = L/10⁴. Hard threshold "
    "converges faster than Top-k at the same total bits, and reaches a lower loss. {more}"
)

SAHU2021 = Paper(
    key="sahu2021",
    title="Rethinking gradient sparsification as total error minimization",
    reference="Sahu, Dutta, Abdelmoniem, Banerjee, Canini, Kalnis, NeurIPS 2021, arXiv:2108.00951",
    about="Top-k is the best choice for one round's budget; for the budget of the whole training it is one constant "
    "threshold, because it minimises the total error.",
    parts=(
        Part(
            "gisette",
            "Logistic regression, gisette-like",
            "sahu2021-gisette",
            (
                _DATA[0].format(name="gisette", stand_in="MNIST's 4 against 9, pixels, products of pixels and probes,"),
                *_DATA[1:],
            ),
            _claims((("hard-threshold", "top-10"),), _LOGISTIC.format(more="gisette: Top-10 against λ = 5e-3.")),
        ),
        Part(
            "madelon",
            "Logistic regression, madelon-like",
            "sahu2021-madelon",
            (_DATA[0].format(name="madelon", stand_in="Guyon's recipe, standardised,"), *_DATA[1:]),
            _claims(
                (("hard-threshold-1", "top-1"), ("hard-threshold-5", "top-5")),
                _LOGISTIC.format(more="madelon: Top-1 and Top-5."),
            ),
        ),
        Part(
            "madelon-small-steps",
            "The same with a tenth of the step size",
            "sahu2021-madelon-small-steps",
            (
                "Not in the paper: with γ = 1/(L + l2) and batches of one example, plain SGD itself climbs above the "
                "loss that it starts from on these data, because rows are much longer than the mean curvature L says. "
                "Here γ is a tenth of that, and SGD works.",
                *_DATA[1:],
            ),
            _claims(
                (("hard-threshold-1", "top-1"), ("hard-threshold-5", "top-5")),
                _LOGISTIC.format(more="(This step size is ours.)"),
            ),
        ),
        Part(
            "network",
            "A small network",
            "sahu2021-network",
            (
                "The paper trains ResNet-18 on CIFAR-10, LSTM on Wikitext and NCF on MovieLens; here a fully connected "
                "network with 32 hidden neurons on MNIST's kind of images.",
                _DATA[1],
                "λ is in units of the model update, after the learning rate; the authors' network code thresholds "
                "gradients before it.",
            ),
            _claims(
                (("hard-threshold", "top-k"),),
                "Section 5.1: over all networks hard threshold is at or above Top-k's accuracy at the same bits, most "
                "clearly at high compression.",
            ),
            instead=("mnist",),
        ),
    ),
    out_of_reach=(
        ("ResNet-18 on CIFAR-10, LSTM on Wikitext, NCF on MovieLens", "Neither the data nor the GPUs are at hand."),
        ("Training time on a cluster", "One machine simulates all workers; bytes are counted, links are not timed."),
    ),
)

"""Basu et al. 2019: sparsification, quantization and local steps together, with memory."""

from functools import partial

from clients.schedules import make_schedule
from fedsparse.compare.results import Comparison, Variant
from fedsparse.compare.statistics import interval
from fedsparse.reproduce.claims import Claim, Outcome, Paper, Part, Verdict
from fedsparse.reproduce.gates import LEAST_SEEDS, both, lower, matches, show, stays_above
from fedsparse.reproduce.measures import each, exponent, final_loss, settled_memory
from fedsparse.reproduce.plots import loss_by_bytes, loss_by_round, memory_by_step_size
from fedsparse.reproduce.targets import fewer_bytes

MARGIN = 0.05
ONE_ORDER, THREE_ORDERS = 10**0.5, 10**2.5  # "about": nearer to one (three) orders than to none (two)
BASELINE = "vanilla-SGD"
CONSTANT = ("QTop-k-constant-0.5", "QTop-k-constant-1", "QTop-k-constant-2")
SLOPE = 0.3
SAME = ("QTop-k", "SignTop-k")
LOCAL = 4  # steps between rounds, where bytes are judged


def same_loss(comparison: Comparison, names: tuple[str, ...]) -> Verdict:
    """Judge "these end within 5 % of the baseline's loss"."""
    return both(
        *(matches(comparison, "final loss", (name, BASELINE), _finals(comparison, name), MARGIN) for name in names)
    )


def memory_helps(comparison: Comparison) -> Verdict:
    """Judge "without memory they end higher", pair by pair."""
    pairs = [(f"{name}-H{h}", f"{name}-H{h}-without-memory") for name in SAME for h in (1,)]
    return both(*(lower(comparison, "final loss", pair, _losses(comparison, pair)) for pair in pairs))


def little_cost(comparison: Comparison) -> Verdict:
    """Judge "H = 8 ends within 5 % of H = 1"."""
    names = [(f"{name}-H8", f"{name}-H1") for name in ("Top-k", *SAME)]
    return both(*(matches(comparison, "final loss", pair, _losses(comparison, pair), MARGIN) for pair in names))


def unscaled_wins(comparison: Comparison) -> Verdict:
    """Judge "at H = 8 the unscaled operator ends lower than the scaled one"."""
    pair = ("QTop-k-H8", "QTop-k-scaled-H8")
    return lower(comparison, "final loss", pair, _losses(comparison, pair))


def coarse_is_sensitive(comparison: Comparison) -> Verdict:
    """Judge "without memory, QTop-k and SignTop-k stay more than 5 % above the baseline"."""
    names = [f"{name}-H1-without-memory" for name in SAME]
    return both(
        *(stays_above(comparison, "final loss", (name, BASELINE), _finals(comparison, name), MARGIN) for name in names)
    )


def square_of_the_step(comparison: Comparison) -> Verdict:
    """Judge "with a constant step size eta the memory's squared norm is O(eta^2)".

    Runs with three step sizes give the exponent p of ``||m||^2 ~ eta^p``, seed by seed; an upper bound by eta^2 holds
    for p of 2 or more.
    """
    found = []
    for seed in range(len(comparison.seeds)):
        points = []
        for name in CONSTANT:
            run = _variant(comparison, name).runs[seed]
            if run is not None and run.completed:
                points.append((_variant(comparison, name).scenario.train.lr, settled_memory(run)))
        slope = exponent([eta for eta, _ in points], [square for _, square in points])
        if slope is not None and len(points) == len(CONSTANT):
            found.append(slope)
    if len(found) < max(LEAST_SEEDS, len(comparison.seeds)):
        return Verdict(Outcome.NOT_COMPARABLE, "-", "not every seed has runs with all three step sizes.")
    slopes = interval(found)
    assert slopes is not None
    low = slopes.mean - (slopes.half or 0.0)
    ours = f"‖m‖² grows like η^p with p = {show(slopes)}, step sizes {', '.join(name[16:] for name in CONSTANT)} times"
    reason = f"the lower end of the interval is {low:.2f}; 2 − {SLOPE:g} or more counts as an upper bound O(η²)."
    return Verdict(Outcome.HOLDS if low >= 2 - SLOPE else Outcome.FAILS, ours, reason, (), {"slopes": found})


def vanishes(comparison: Comparison) -> Verdict:
    """Judge "with decaying step sizes the memory shrinks": late against early, as the step size falls."""
    names = [f"{name}-H1" for name in ("Top-k", *SAME)]
    return both(
        *(
            lower(
                comparison,
                "mean of ‖m‖², last tenth against second tenth",
                (f"{name} late", f"{name} early"),
                (
                    each(comparison, name, settled_memory),
                    each(comparison, name, partial(settled_memory, part=(0.1, 0.2))),
                ),
            )
            for name in names
        )
    )


def fewer_bits(comparison: Comparison, formula: bool) -> Verdict:
    """Judge "about ten times fewer bits than Top-k SGD, a thousand times fewer than SGD" to 5 % above SGD's loss."""
    others = (("Top-k-H1", ONE_ORDER), (BASELINE, THREE_ORDERS), ("EF-sign", 1.0), ("EF-QSGD", 1.0))
    return both(
        *(fewer_bytes(comparison, BASELINE, MARGIN, f"{name}-H{LOCAL}", others, formula=formula) for name in SAME)
    )


def _variant(comparison: Comparison, name: str) -> Variant:
    return next(variant for variant in comparison.variants if variant.name == name)


def _finals(comparison: Comparison, name: str) -> tuple[list[float | None], list[float | None]]:
    return _losses(comparison, (name, BASELINE))


def _losses(comparison: Comparison, pair: tuple[str, str]) -> tuple[list[float | None], list[float | None]]:
    return each(comparison, pair[0], final_loss), each(comparison, pair[1], final_loss)


def _step_size(variant: Variant, server_round: int) -> float:
    train = variant.scenario.train
    schedule = make_schedule(train.lr_schedule)
    return train.lr * schedule.multiplier(server_round, variant.scenario.rounds, 0, train.local_steps or 1)


_BITS = (
    "Section 5: to the same loss, about 10 to 15 times fewer bits than Top-k SGD, and about 1000 times fewer than "
    "vanilla SGD; fewer than EF-sign and EF-QSGD."
)
_ALL_H1 = (BASELINE, "Top-k-H1", "QTop-k-H1", "SignTop-k-H1", "QTop-k-scaled-H1")

BASU2019 = Paper(
    key="basu2019",
    title="Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local computations",
    reference="Basu, Data, Karakus, Diggavi, NeurIPS 2019, arXiv:1906.02367",
    about="Quantizing the largest coordinates and sending them only every H steps, with memory, converges at the rate of "
    "vanilla SGD for a fraction of the bits.",
    parts=(
        Part(
            "softmax",
            "Softmax regression, 15 workers",
            "basu2019-softmax",
            (
                "Fashion-MNIST takes the place of MNIST where it is at hand (d = 7850 in both); batch 8, l2 = 1/n, k = 40, "
                "η_t = c/(λ(a + t)) with a = dH/k, as we recall the paper's numbers.",
                "The first step size is the same for all operators and every H.",
                "QSGD has 15 levels (4 bits). 600 steps in place of ten thousands: losses are compared with our own "
                "vanilla SGD. EF-QSGD is scaled: unscaled, its β of 5.9 is beyond Lemma 1.",
                "Bytes are judged at H = 4. At H = 8, 600 steps are 75 rounds, too few for k = 40 of 7850: its loss has its "
                "own claim.",
                "“About one order” is judged as a factor of 3.2 (10^0.5) or more, “three” as 316 (10^2.5) or more.",
            ),
            (
                Claim(
                    "same-loss",
                    "QTop-k and SignTop-k with memory reach the loss of vanilla SGD",
                    "Section 5: both reach vanilla SGD's loss. Theorem 2: the rate is SGD's.",
                    partial(same_loss, names=("QTop-k-H1", "SignTop-k-H1")),
                    ((loss_by_round(*_ALL_H1), "H = 1: one round is one step."),),
                ),
                Claim(
                    "memory",
                    "Memory is what makes it so",
                    "Sections 1 and 3: the operators are biased contractions; error compensation gives them SGD's rate.",
                    memory_helps,
                    (
                        (
                            loss_by_round(BASELINE, *(f"{n}-H1{e}" for n in SAME for e in ("", "-without-memory"))),
                            "The same operators with and without memory.",
                        ),
                    ),
                ),
                Claim(
                    "without-memory-stays-above",
                    "Without memory, both stay above",
                    "As above; no figure is given in the paper.",
                    coarse_is_sensitive,
                ),
                Claim(
                    "local-steps",
                    "H = 8 local steps cost little",
                    "Section 5: H from 1 to 8 hardly changes the loss reached; SignTop-k and coarse QSGD are more sensitive.",
                    little_cost,
                    (
                        (
                            loss_by_bytes(*(f"{n}-H{h}" for n in ("Top-k", *SAME) for h in (1, 4, 8))),
                            "H = 1, 4, 8 by bytes of real frames.",
                        ),
                    ),
                ),
                Claim(
                    "unscaled",
                    "At H = 8 the unscaled operator beats the scaled one",
                    "Section 5: scaling by 1/(1 + β) slows down at H = 8, though only the scaled one has a bound for every β.",
                    unscaled_wins,
                    ((loss_by_round("QTop-k-H8", "QTop-k-scaled-H8", BASELINE), "H = 8: a round is eight steps."),),
                ),
                Claim(
                    "memory-square",
                    "With a constant step size η the memory is O(η²)",
                    "Lemma 5: with fixed step size, E‖m‖² is at most 4η²(1 − γ²)/γ² H²G².",
                    square_of_the_step,
                ),
                Claim(
                    "memory-vanishes",
                    "With decaying step sizes the memory vanishes with them",
                    "Lemma 4: E‖m_t‖² is at most 4Cη_t²/γ² H²G².",
                    vanishes,
                    (
                        (
                            memory_by_step_size(_step_size, "Top-k-H1", "QTop-k-H1", "SignTop-k-H1"),
                            "Slope 2 is η². The memory fills first (right), then falls.",
                        ),
                    ),
                ),
                Claim(
                    "bytes-by-frames",
                    "About ten times fewer bytes than Top-k SGD, a thousand fewer than SGD, by frames really sent",
                    _BITS,
                    partial(fewer_bits, formula=False),
                    (
                        (
                            loss_by_bytes(BASELINE, "EF-sign", "EF-QSGD", "Top-k-H1", "QTop-k-H4", "SignTop-k-H4"),
                            "Loss by bytes of real frames.",
                        ),
                    ),
                ),
                Claim(
                    "bytes-by-formula",
                    "The same, counted by the papers' formula",
                    _BITS,
                    partial(fewer_bits, formula=True),
                ),
            ),
            instead=("mnist",),
        ),
    ),
    out_of_reach=(
        ("ResNet-50 on ImageNet", "Neither the data nor the GPUs are at hand."),
        ("Algorithm 2, asynchronous", "Comes with the virtual clock; the paper's published code has no such version."),
    ),
)

"""Stich et al. 2018: SGD with memory, one coordinate a step."""

from functools import partial

from fedsparse.compare.results import Comparison
from fedsparse.reproduce.claims import Claim, Paper, Part, Verdict
from fedsparse.reproduce.gates import both, lower, matches, stays_above
from fedsparse.reproduce.measures import each, final_loss, loss_after
from fedsparse.reproduce.plots import loss_by_bytes, loss_by_round
from fedsparse.reproduce.targets import fewer_bytes

MARGIN = 0.01
TWO_ORDERS, THREE_ORDERS = 10**1.5, 10**2.5  # "about": nearer to two (three) orders than to one (two)


def with_memory(comparison: Comparison, names: tuple[str, ...]) -> Verdict:
    """Judge "with memory, these end within 1 % of SGD's loss"."""
    return both(
        *(matches(comparison, "final loss", (name, "SGD"), _finals(comparison, name), MARGIN) for name in names)
    )


def without_memory(comparison: Comparison, names: tuple[str, ...]) -> Verdict:
    """Judge "without memory, these end more than 1 % above SGD's loss"."""
    return both(
        *(stays_above(comparison, "final loss", (name, "SGD"), _finals(comparison, name), MARGIN) for name in names)
    )


def _finals(comparison: Comparison, name: str) -> tuple[list[float | None], list[float | None]]:
    return each(comparison, name, final_loss), each(comparison, "SGD", final_loss)


def shifted(comparison: Comparison, names: tuple[str, str]) -> Verdict:
    """Judge "with the shift the loss is lower early on", at the last round of the shorter run."""
    rounds = min(v.scenario.rounds for v in comparison.variants if v.name in names)
    first, second = (each(comparison, name, partial(loss_after, rounds=rounds)) for name in names)
    return lower(comparison, f"loss after {rounds} steps", names, (first, second))


def fewer_bits(
    comparison: Comparison, sparse: str, qsgd: tuple[str, ...], factors: tuple[float, float], formula: bool
) -> Verdict:
    """Judge "fewer bytes than QSGD and SGD to 1 % above SGD's loss", by the given factors."""
    others = [*((name, factors[0]) for name in qsgd), ("SGD", factors[1])]
    return fewer_bytes(comparison, "SGD", MARGIN, sparse, others, formula=formula)


_MEMORY = "Figure 2 (epsilon): after 10 epochs SGD .28294, top-1 with memory .28269. Theorem 2.4: the rate is SGD's."
_NO_MEMORY = "Figure 2 (epsilon): top-1 without memory ends at 2.50, against .28294 of SGD."
_SHIFT = "Section 4.2 (epsilon): without the shift τ = d/k, rand-1 has 1.140 after the first epoch, with it .306."
_BITS = (
    "Figure 3 (epsilon), megabytes to 1 % above the baseline: top-1 3.4, rand-1 11, QSGD with 4 bits 436, SGD 5188: two "
    "orders of magnitude fewer than QSGD, three fewer than SGD."
)


def _claims(k: int, shift: tuple[str, str] | None, random: tuple[str, ...], qsgd: tuple[str, ...]) -> tuple[Claim, ...]:
    top, rand = f"top-{k}", f"rand-{k}"
    bare = (f"{top}-without-memory", f"{rand}-without-memory")
    claims = [
        Claim(
            "memory",
            f"{top} and {rand} with memory match SGD's final loss",
            _MEMORY,
            partial(with_memory, names=(top, *random)),
            ((loss_by_round("SGD", top, *random, *bare), "Loss of the weighted average of the iterates."),),
        ),
        Claim("no-memory", "Without memory they do not", _NO_MEMORY, partial(without_memory, names=bare)),
    ]
    if shift is not None:
        claims.append(
            Claim(
                "shift",
                f"Without the shift τ, {rand} is bad early on",
                _SHIFT,
                partial(shifted, names=shift),
                ((loss_by_round("SGD", *random, shift[1]), "Step sizes 2/(λ(t + τ)) with different τ."),),
            )
        )
    for formula in (False, True):
        how = "the papers' formula" if formula else "the frames that are really sent"
        plot = (loss_by_bytes("SGD", top, *random, *qsgd), "Bytes of real frames.")
        claims.append(
            Claim(
                "bytes-by-formula" if formula else "bytes-by-frames",
                f"Orders of magnitude fewer bytes to 1 % above SGD, counted by {how}",
                _BITS,
                partial(fewer_bits, sparse=top, qsgd=qsgd, factors=(TWO_ORDERS, THREE_ORDERS), formula=formula),
                () if formula else (plot,),
            )
        )
    return tuple(claims)


_COMMON = (
    "One worker, one example a step, λ = 1/n, η = 2/(λ(t + τ)), the average of the iterates weighted by (τ + t)², as in "
    "the paper. One step is one round here, with a message for each.",
    "“About two orders” is judged as a factor of 32 (10^1.5) or more, “three” as 316 (10^2.5) or more.",
)

STICH2018 = Paper(
    key="stich2018",
    title="Sparsified SGD with memory",
    reference="Stich, Cordonnier, Jaggi, NeurIPS 2018, arXiv:1809.07599",
    about="SGD may send a single coordinate a step and converge at the rate of SGD, if it remembers what it did not send.",
    parts=(
        Part(
            "epsilon",
            "Logistic regression, epsilon-like",
            "stich2018-epsilon",
            (
                "epsilon (400,000 x 2,000) cannot be had here: random numbers with 10,000 dense rows of length 1, and "
                "1.2 epochs of them instead of 10 of epsilon. Losses are therefore compared with our own SGD, not with "
                "the paper's numbers.",
                "A coordinate's turn comes once in d/k steps; the paper has 2,000 such turns, we have 6. rand-1 "
                "is therefore run with τ = 10 d/k, the paper's value for sparse data, as well as with τ = d/k.",
                *_COMMON,
            ),
            _claims(1, ("rand-1", "rand-1-without-shift"), ("rand-1", "rand-1-tau-d"), ("QSGD-4bit", "QSGD-8bit")),
        ),
        Part(
            "rcv1",
            "Logistic regression, RCV1-like",
            "stich2018-rcv1",
            (
                "RCV1 (677,399 x 47,236) cannot be had here: TF-IDF of the words of 5,900 mails, spam or not, with "
                "20,003 words. k = 30, of the paper's {10, 20, 30}, because there are fewer steps to go round.",
                *_COMMON,
            ),
            _claims(30, None, ("rand-30",), ("QSGD-4bit",)),
        ),
    ),
    out_of_reach=(
        ("Speed-up of parallel, lock-free updates on 24 cores (Figure 4)", "It is about threads on one machine."),
    ),
)

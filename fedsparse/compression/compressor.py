"""A compressor: a sparsifier followed by a quantizer, on a whole vector or tensor by tensor."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression import operators as _operators  # noqa: F401  (registers every operator)
from fedsparse.compression.base import (
    QUANTIZERS,
    SPARSIFIERS,
    Claim,
    Indices,
    Quantizer,
    Sparsifier,
    Vector,
    as_vector,
    check_finite,
)
from fedsparse.compression.operators.floats import Float32
from fedsparse.compression.operators.identity import Identity
from fedsparse.errors import ConfigError, unknown_name
from fedsparse.seeding import generator
from fedsparse.spec import Stage, build, format_pipeline, options_of, parse_pipeline

_U64 = 2**64 - 1
Bounds = NDArray[np.int64]  # piece p is [bounds[p], bounds[p + 1]); bounds[0] = 0, bounds[-1] = d


@dataclass(frozen=True)
class Compressed:
    """One compressed update C(p), as sender and receiver both know it.

    Parameters
    ----------
    d : int
        Length of the update.
    indices : array of int64, shape (k,), or None
        Positions sent, strictly increasing; None means all d.
    codes, scales : arrays
        What the quantizer wrote, piece after piece.
    values : array of float32, shape (k,)
        What the receiver will read at these positions.
    seed : int
        64 bits from which a seeded sparsifier's positions follow.
    """

    d: int
    indices: Indices | None
    codes: NDArray[np.generic]
    scales: Vector
    values: Vector
    seed: int = 0

    @property
    def nnz(self) -> int:
        """Number of coordinates sent, k."""
        return self.values.size

    @property
    def density(self) -> float:
        """The sent fraction k/d."""
        return self.nnz / self.d if self.d else 0.0

    def add_to(self, accumulator: NDArray[np.floating[Any]], weight: float = 1.0) -> None:
        """Add ``weight * C(p)`` to a dense vector of length d in place, touching k elements only."""
        scaled = self.values if weight == 1.0 else self.values * accumulator.dtype.type(weight)
        if self.indices is None:
            accumulator += scaled
        else:
            # One pass over memory; `accumulator[indices] += scaled` takes two, and they are what this costs.
            np.add.at(accumulator, self.indices, scaled)

    def to_dense(self) -> Vector:
        """Return C(p) as a dense vector of length d."""
        if self.indices is None:
            return self.values.copy()
        dense = np.zeros(self.d, dtype=np.float32)
        dense[self.indices] = self.values
        return dense


@dataclass(frozen=True)
class Compressor:
    """A sparsifier and a quantizer; with `piecewise` both work on each tensor by itself.

    Examples
    --------
    >>> compressor = Compressor.from_spec("topk(density=0.01)|sign")
    >>> str(compressor)
    'topk(density=0.01)|sign'
    """

    sparsifier: Sparsifier = field(default_factory=Identity)
    quantizer: Quantizer = field(default_factory=Float32)
    piecewise: bool = False

    @classmethod
    def from_spec(cls, spec: str) -> "Compressor":
        """Build a compressor from text such as ``hard_threshold(lam=0.01)|qsgd(levels=16)``.

        Raises
        ------
        ConfigError
            Unknown operator or option, or a value out of range; the message names the nearest valid choice.
        """
        return _read(spec) if isinstance(spec, str) else _read.__wrapped__(spec)

    def __str__(self) -> str:
        return self._text(_stage(self.sparsifier))

    def _text(self, sparsifier: Stage) -> str:
        text = format_pipeline((sparsifier,))
        if not isinstance(self.quantizer, Float32):
            text += "|" + format_pipeline((_stage(self.quantizer),))
        return f"piecewise({text})" if self.piecewise else text

    @cached_property
    def spec(self) -> str:
        """The canonical spec; reading it back gives an equal compressor."""
        return str(self)

    @cached_property
    def wire(self) -> str:
        """The spec as frames carry it, without options that a receiver does not need; not for `from_spec`."""
        stage = _stage(self.sparsifier)
        options = {key: value for key, value in stage.options.items() if key not in self.sparsifier.unsent}
        return self._text(Stage(stage.name, options=options))

    @classmethod
    def from_wire(cls, text: str) -> "Compressor":
        """Build a compressor that reads what any of that `wire` text has written."""
        stages = parse_pipeline(text)
        wrapped = stages[0].name == "piecewise" and bool(stages[0].args)
        first, *rest = stages[0].args[0] if wrapped else stages
        unsent = SPARSIFIERS[first.name].unsent if first.name in SPARSIFIERS else {}
        options = dict(first.options)
        if not options.keys() & unsent.keys():
            options |= {key: value for key, value in unsent.items() if value is not None}
        inner = format_pipeline((Stage(first.name, first.args, options), *rest))
        return cls.from_spec(f"piecewise({inner})" if wrapped else inner)

    @property
    def lossless(self) -> bool:
        """Whether nothing is ever left over, so that no error memory is needed."""
        return isinstance(self.sparsifier, Identity) and isinstance(self.quantizer, Float32)

    def compress(self, x: NDArray[np.generic], seed: int, bounds: Bounds | None = None) -> Compressed:
        """Return C(x) without error memory; `x` stays untouched.

        Parameters
        ----------
        x : array, shape (d,)
            The update; finite real numbers.
        seed : int
            Seeds the operators' own randomness; equal inputs and seeds give equal bits.
        bounds : array of int64, optional
            Piece boundaries, for `piecewise`.
        """
        seed, vector = seed & _U64, as_vector(x)
        pieces = self.pieces(vector.size, bounds)
        chosen = [self.sparsifier.select(vector[a:b], _select_rng(seed, p)) for p, (a, b) in enumerate(pieces)]
        return self._quantize(vector, chosen, pieces, seed)

    def compress_with_memory(
        self, update: NDArray[np.generic], residual: Vector, seed: int, bounds: Bounds | None = None
    ) -> Compressed:
        """Return C(p) for ``p = update + residual`` and leave ``p - C(p)`` in `residual`.

        Error feedback as in Stich et al. 2018, Algorithm 1 and Sahu et al. 2021, Algorithm 1. `update` stays untouched.
        """
        seed, vector = seed & _U64, as_vector(update)
        if residual.dtype != np.float32 or residual.shape != vector.shape:
            raise ValueError(
                f"the residual must be float32 of shape {vector.shape}, got {residual.dtype} of shape {residual.shape}."
            )
        pieces = self.pieces(vector.size, bounds)
        chosen = [
            self.sparsifier.select_compensated(vector[a:b], residual[a:b], _select_rng(seed, p))
            for p, (a, b) in enumerate(pieces)
        ]
        result = self._quantize(residual, chosen, pieces, seed)
        if result.indices is None:
            residual -= result.values
        else:
            residual[result.indices] -= result.values
        return result

    def pieces(self, d: int, bounds: Bounds | None) -> list[tuple[int, int]]:
        """Return the ranges that the operators work on: the tensors if `piecewise`, else the whole."""
        if not self.piecewise:
            return [(0, d)]
        edges = check_bounds(bounds, d)
        return [(int(a), int(b)) for a, b in pairwise(edges)]

    def _quantize(
        self, p: Vector, chosen: list[Indices | None], pieces: list[tuple[int, int]], seed: int
    ) -> Compressed:
        codes, scales, values, positions = [], [], [], []
        zero = None if self.sparsifier.seeded else self.quantizer.zero_code
        for number, ((start, stop), kept) in enumerate(zip(pieces, chosen, strict=True)):
            piece = p[start:stop].copy() if kept is None else p[start:stop][kept]
            check_finite(piece)
            code, scale = self.quantizer.quantize(piece, generator(seed, "quantize", number))
            if kept is not None:
                if zero is not None and (sent := code != zero).sum() < code.size:
                    # What rounds to zero carries nothing: its mass stays in the memory, its position is not sent.
                    code, kept = code[sent], kept[sent]
                positions.append(kept + start if start else kept)
            codes.append(code)
            scales.append(scale)
            decoded = self.quantizer.dequantize(code, scale, piece.size if kept is None else kept.size)
            _check_decoded(decoded, piece, self.quantizer.name)
            values.append(decoded)
        return Compressed(
            d=pieces[-1][1] if pieces else 0,
            indices=_join(positions, np.int64) if positions or not pieces else None,
            codes=_join(codes, self.quantizer.code_dtype),
            scales=_join(scales, np.float32),
            values=_join(values, np.float32),
            seed=seed,
        )

    def claim(self, d: int, bounds: Bounds | None = None) -> Claim:
        """Return the bound that follows from the two parts (Basu et al. 2019, Lemma 1 and Corollary 1).

        What is kept and what is dropped are orthogonal: ``|x - Q(C(x))|^2 = |x - C(x)|^2 + |C(x) - Q(C(x))|^2``.
        """
        claims = [self._claim_piece(b - a) for a, b in self.pieces(d, bounds) if b > a]
        return Claim(
            absolute=sum(c.absolute for c in claims),
            relative=max((c.relative for c in claims), default=0.0),
            unbiased=all(c.unbiased for c in claims),
            random=any(c.random for c in claims),
        )

    def _claim_piece(self, d: int) -> Claim:
        chosen, rounded = self.sparsifier.claim(d), self.quantizer.claim(self.sparsifier.max_kept(d))
        if chosen.absolute or rounded.relative >= 1.0:
            relative = max(chosen.relative, rounded.relative)
        else:
            relative = 1.0 - (1.0 - chosen.relative) * (1.0 - rounded.relative)
        return Claim(
            absolute=chosen.absolute,
            relative=relative,
            unbiased=chosen.unbiased and rounded.unbiased,
            random=chosen.random or rounded.random,
        )

    def formula_bits(self, d: int, k: int, num_pieces: int = 1) -> float:
        """Return the bits that the papers' formulas would count: ``ceil(log2 d)`` a position, plus the values.

        Reported beside the measured bytes so that results can be compared with published ones; never used for them.
        """
        position_bits = 0 if isinstance(self.sparsifier, Identity) else k * int(np.ceil(np.log2(max(d, 2))))
        scales = 32.0 * self.quantizer.num_scales * (num_pieces - 1) if self.piecewise else 0.0
        return position_bits + self.quantizer.formula_bits(k) + scales


def check_bounds(bounds: Bounds | None, d: int) -> Bounds:
    """Refuse piece boundaries that do not cover 0 .. d in order."""
    if bounds is None:
        raise ConfigError("piecewise needs the tensor boundaries of the update; pass bounds=[0, ..., d].")
    edges = np.asarray(bounds, dtype=np.int64)
    if edges.ndim != 1 or edges.size < 1 or edges[0] != 0 or edges[-1] != d or np.any(np.diff(edges) < 0):
        raise ConfigError(f"piece boundaries must rise from 0 to d = {d}, got {edges.tolist()[:10]}.")
    return edges


def _check_decoded(decoded: Vector, piece: Vector, quantizer: str) -> None:
    """Refuse what a receiver would have to reject: a quantizer may read back more than the largest float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(decoded, decoded)) or np.isfinite(decoded).all():
            return
    raise ValueError(
        f"the update has magnitudes up to {np.abs(piece).max():.3g}, which {quantizer} rounds beyond the largest "
        "float32: training has diverged; lower the learning rate or clip gradients."
    )


def _select_rng(seed: int, piece: int) -> np.random.Generator:
    return generator(seed, "select", piece)


def _join(parts: list[Any], dtype: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _stage(operator: Sparsifier | Quantizer) -> Stage:
    return Stage(operator.name, (), options_of(operator))


@lru_cache(maxsize=256)  # a client reads the same few specs round after round
def _read(spec: str) -> Compressor:
    stages = parse_pipeline(spec)
    if len(stages) == 1 and stages[0].name == "piecewise":
        (outer,) = stages
        if outer.options or len(outer.args) != 1:
            example = "piecewise(topk(density=0.01)|sign)"
            raise ConfigError(f"piecewise takes one compressor, as in {example}, got {spec!r}.")
        return Compressor(*_operators_of(outer.args[0], spec), piecewise=True)
    return Compressor(*_operators_of(stages, spec))


def _operators_of(stages: tuple[Stage, ...], spec: str) -> tuple[Sparsifier, Quantizer]:
    """Read ``sparsifier``, ``sparsifier|quantizer`` or ``quantizer`` alone (which keeps every coordinate)."""
    for stage in stages:
        if stage.name == "piecewise":
            raise ConfigError(f"piecewise must be outermost, as in piecewise(topk(density=0.01)|sign), got {spec!r}.")
        if stage.name not in SPARSIFIERS and stage.name not in QUANTIZERS:
            raise unknown_name("operator", stage.name, [*SPARSIFIERS, *QUANTIZERS, "piecewise"])
    names = [stage.name for stage in stages]
    if len(stages) == 1 and names[0] in QUANTIZERS:
        return Identity(), build(stages[0], QUANTIZERS, "quantizer")
    if len(stages) > 2 or names[0] not in SPARSIFIERS or (len(stages) == 2 and names[1] not in QUANTIZERS):
        raise ConfigError(
            f"a compressor is one sparsifier ({', '.join(sorted(SPARSIFIERS))}), then at most one quantizer "
            f"({', '.join(sorted(QUANTIZERS))}), as in topk(density=0.01)|sign; got {spec!r}."
        )
    quantizer = build(stages[1], QUANTIZERS, "quantizer") if len(stages) == 2 else Float32()
    return build(stages[0], SPARSIFIERS, "sparsifier"), quantizer

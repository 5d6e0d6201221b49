"""The papers' algorithms, written down in plain numpy, against the whole stack: the same iterates, the same memories.

A reference knows nothing of fedsparse but the seeds of its random numbers. It computes in float64 and the stack in
float32, so that they agree to float32 rounding, as long as no two magnitudes are as close as that; the data are
continuous and no two are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from clients import CompressionMod
from fedsparse.compression import Compressor, MemoryStore
from fedsparse.data import load_dataset, partition
from fedsparse.engine import InlineGrid
from fedsparse.run import RunFolder
from fedsparse.run.grids import Grids
from fedsparse.run.loop import Training
from fedsparse.run.task import Task
from fedsparse.scenario import apply_overrides, from_toml
from fedsparse.seeding import entropy, generator
from strategies import CompressedStrategy

Vector = NDArray[np.float64]
Grad = Callable[[Vector, int, int, int], Vector]  # (x, worker, round, local step) -> stochastic gradient
Comp = Callable[[Vector, int, int], Vector]  # (p, worker, round) -> C(p)
Eta = Callable[[int], float]  # step -> learning rate
Trajectory = tuple[list[Vector], list[Vector]]  # iterates after each round, memories after the last

SEED, ROUNDS, D, MU = 5, 40, 30, 0.05


# -- the references --------------------------------------------------------------------------------------------------


def mem_sgd(x: Vector, grad: Grad, eta: Eta, comp: Comp, *, memory: float = 1.0) -> Trajectory:
    """Stich et al. 2018, Algorithm 1."""
    m, path = np.zeros_like(x), []
    for t in range(ROUNDS):
        step = eta(t) * grad(x, 0, t, 0)
        g = comp(m + step, 0, t)
        x = x - g
        m = memory * (m + step - g)
        path.append(x)
    return path, [m]


def qsparse_local_sgd(
    x: Vector, grad: Grad, eta: Eta, comp: Comp, *, workers: int, H: int, beta: float = 0.0, memory: float = 1.0
) -> Trajectory:
    """Basu et al. 2019, Algorithm 1, with I_T every H-th step; `beta` is the momentum in between."""
    m, path = [np.zeros_like(x) for _ in range(workers)], []
    for n in range(ROUNDS):
        master = x
        for r in range(workers):
            local, velocity = x, 0.0
            for h in range(H):
                velocity = beta * velocity + grad(local, r, n, h)
                local = local - eta(n * H + h) * velocity
            g = comp(m[r] + x - local, r, n)
            m[r] = memory * (m[r] + x - local - g)
            master = master - g / workers
        x = master
        path.append(x)
    return path, m


def ef_hard_threshold(
    x: Vector, grad: Grad, gamma: Eta, lam: float, *, workers: int, memory: float = 1.0
) -> Trajectory:
    """Sahu et al. 2021, Algorithm 1 with the hard-threshold sparsifier."""
    e, path = np.zeros((workers, x.size)), []
    for t in range(ROUNDS):
        p = e + gamma(t) * np.array([grad(x, i, t, 0) for i in range(workers)])
        sent = np.where(np.abs(p) >= lam, p, 0.0)
        e = memory * (p - sent)
        x = x - sent.mean(axis=0)
        path.append(x)
    return path, list(e)


def dgc(x: Vector, grad: Grad, eta: Eta, k: int, *, workers: int, momentum: float, masked: bool = True) -> Trajectory:
    """Lin et al. 2018, momentum correction and momentum factor masking (Sections 3.2 and 3.3); u and v hold eta too."""
    u, v, path = np.zeros((workers, x.size)), np.zeros((workers, x.size)), []
    for t in range(ROUNDS):
        sent = np.zeros_like(v)
        for i in range(workers):
            u[i] = momentum * u[i] + eta(t) * grad(x, i, t, 0)
            v[i] = v[i] + u[i]
            mask = top(v[i], k)
            sent[i, mask] = v[i, mask]
            v[i, mask] = 0.0
            if masked:
                u[i, mask] = 0.0
        x = x - sent.mean(axis=0)
        path.append(x)
    return path, list(v)


def top(p: Vector, k: int) -> NDArray[np.int64]:
    return np.sort(np.argsort(-np.abs(p))[:k])


def frame_seed(worker: int, n: int) -> int:
    return entropy(SEED, "compress", n + 1, str(worker)) % 2**64


def drawn(spec: str) -> Callable[[Vector, int, int], NDArray[np.int64]]:
    """Positions that a seeded operator draws without looking at p: the same draws as the stack's."""
    blank, operator = np.zeros(D, np.float32), Compressor.from_spec(spec).sparsifier
    return lambda p, worker, n: operator.select(blank, generator(frame_seed(worker, n), "select", 0))


def kept(choose: Callable[..., NDArray[np.int64]], quantize: Callable[[Vector, int, int], Vector]) -> Comp:
    """Q after a choice of positions."""

    def comp(p: Vector, worker: int, n: int) -> Vector:
        out, positions = np.zeros_like(p), choose(p, worker, n)
        out[positions] = quantize(p[positions], worker, n)
        return out

    return comp


def plain(v: Vector, worker: int, n: int) -> Vector:
    return v


def sign(v: Vector, worker: int, n: int) -> Vector:
    return np.abs(v).sum() / v.size * np.sign(v)


def qsgd(levels: int, scaled: bool = False) -> Callable[[Vector, int, int], Vector]:
    """Basu et al. 2019, Section 2.1, and divided by 1 + beta, Lemma 2."""

    def quantize(v: Vector, worker: int, n: int) -> Vector:
        uniform = generator(frame_seed(worker, n), "quantize", 0).random(v.size)
        norm = np.sqrt((v**2).sum())
        lower = np.floor(levels * np.abs(v) / norm)
        up = uniform >= 1 - (levels * np.abs(v) / norm - lower)
        beta = min(v.size / levels**2, np.sqrt(v.size) / levels) if scaled else 0.0
        return norm * np.sign(v) * (lower + up) / levels / (1 + beta)

    return quantize


# -- the problems, and how the stack runs them -----------------------------------------------------------------------


class Setting(NamedTuple):
    """What reference and stack have in common."""

    spec: str
    workers: int = 1
    H: int = 1
    beta: float = 0.0
    a: float | None = None  # eta_t = 1 / (MU (a + t)), or constant
    correction: float = 0.0

    def eta(self, t: int) -> float:
        return 0.1 if self.a is None else 1.0 / (MU * (self.a + t))


class Quadratic:
    """f_r(x) = |A_r x - b_r|^2 / 2n + MU |x|^2 / 2 in batches, on a ClientApp that knows nothing of compression."""

    def __init__(self, workers: int) -> None:
        rng = np.random.default_rng(1)
        self.A, self.b = rng.standard_normal((4, 20, D)) / np.sqrt(D) * 2, rng.standard_normal((4, 20))
        self.start = rng.standard_normal(D).astype(np.float32)

    def grad(self, x: Vector, worker: int, n: int, h: int) -> Vector:
        rows = np.random.default_rng([worker, n, h]).choice(20, 5, replace=False)
        A, b = self.A[worker, rows].astype(x.dtype), self.b[worker, rows].astype(x.dtype)
        return A.T @ (A @ x - b) / np.asarray(5, x.dtype) + np.asarray(MU, x.dtype) * x

    def app(self, setting: Setting, memory: Path) -> ClientApp:
        app = ClientApp(mods=[CompressionMod(memory)])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            old = {name: array.numpy() for name, array in message.content["arrays"].items()}
            worker, n = int(context.node_config["partition-id"]), message.content["config"]["server-round"] - 1
            x, velocity = np.concatenate([array.ravel() for array in old.values()]), np.zeros(D, np.float32)
            for h in range(setting.H):
                velocity = np.float32(setting.beta) * velocity + self.grad(x, worker, n, h)
                x = x - np.float32(setting.eta(n * setting.H + h)) * velocity
            assert x.dtype == np.float32
            metrics = MetricRecord({"num-examples": 10 * (worker + 1)})  # must not matter with uniform weights
            return Message(RecordDict({"arrays": self.record(x), "metrics": metrics}), reply_to=message)

        return app

    @staticmethod
    def record(x: NDArray[np.float32]) -> ArrayRecord:
        return ArrayRecord({"matrix": Array(x[:20].reshape(4, 5)), "vector": Array(x[20:])})

    def run(self, setting: Setting, folder: Path) -> Trajectory:
        strategy = CompressedStrategy(
            FedAvg(fraction_evaluate=0.0),
            setting.spec,
            seed=SEED,
            weighting="uniform",
            momentum_correction=setting.correction,
        )
        path: list[Vector] = []

        def look(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            path.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]).astype(np.float64))
            return MetricRecord()

        with InlineGrid(self.app(setting, folder), num_clients=setting.workers) as grid:
            strategy.start(grid, self.record(self.start), num_rounds=ROUNDS, evaluate_fn=look)
        return path[1:], memories(folder, strategy.run, setting.workers)


DATA = """
import numpy as np
from fedsparse.data import Dataset

def load():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((120, 9)).astype(np.float32)
    y = (x @ rng.standard_normal((9, 3)) + rng.standard_normal((120, 3))).argmax(1)
    groups = np.repeat([0, 1, 2, 3], [20, 25, 35, 40])
    return Dataset("three-classes", x, y, x, y, 3, groups=groups)
"""

SCENARIO = f"""
name = "trajectory"
seed = {SEED}
rounds = {ROUNDS}
[data]
dataset = "trajectory_data:load"
num_clients = 1
partition = "natural"
[model]
name = "softmax"
[train]
lr = 1.0
batch_size = 5
weight_decay = {MU}
[strategy]
weighting = "uniform"
[engine]
name = "inline"
"""


class Logistic:
    """Softmax regression with three classes through a scenario, our own client and the round loop."""

    def __init__(self, workers: int) -> None:
        data = load_dataset("trajectory_data:load")
        self.x, self.y = data.x_train.astype(np.float64), np.eye(3)[data.y_train]
        self.parts = partition("natural", data.y_train, workers, SEED, data.groups)
        self.start = np.zeros(D, np.float32)

    def grad(self, x: Vector, worker: int, n: int, h: int) -> Vector:
        mine = self.parts[worker]
        order = generator(SEED, "batches", n + 1, worker).permutation(mine.size)  # the client's own shuffling
        rows = mine[order[5 * h : 5 * h + 5]]
        weight, bias = x[:27].reshape(3, 9), x[27:]
        scores = np.exp(self.x[rows] @ weight.T + bias)
        error = (scores / scores.sum(axis=1, keepdims=True) - self.y[rows]) / 5
        return np.concatenate([(error.T @ self.x[rows]).ravel(), error.sum(axis=0)]) + MU * x

    def run(self, setting: Setting, folder: Path) -> Trajectory:
        changes = [f"data.num_clients={setting.workers}", f"train.local_steps={setting.H}"]
        changes += [f"train.momentum={setting.beta}", f"compression.uplink={setting.spec}"]
        changes.append(f"compression.momentum_correction={setting.correction}")
        if setting.a is None:
            changes.append(f"train.lr={setting.eta(0)}")
        else:
            changes.append(f"train.lr_schedule=strongly_convex(c=1, mu={MU}, a={setting.a})")
        scenario = apply_overrides(from_toml(SCENARIO), changes)
        task, out, path = Task(scenario), RunFolder.create(folder / "run", scenario), []
        with Grids().open(scenario, out.memory) as grid:
            training = Training(scenario, task, out, "run")
            training.rounds(grid, lambda line: path.append(flat(training.arrays)))
        return path, memories(out.memory, "run", setting.workers)


def flat(arrays: dict[str, NDArray[Any]]) -> Vector:
    return np.concatenate([array.ravel() for array in arrays.values()]).astype(np.float64)


def memories(folder: Path, run: str, workers: int) -> list[Vector]:
    """Our updates are x_new - x_old, the papers' x_old - x_new."""
    store = MemoryStore(folder, run)
    return [-store.read(str(worker), D)[0].astype(np.float64) for worker in range(workers)]


@pytest.fixture(params=[Quadratic, Logistic])
def kind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> type[Quadratic] | type[Logistic]:
    (tmp_path / "trajectory_data.py").write_text(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    return request.param


def deviations(got: Trajectory, wanted: Trajectory) -> tuple[float, float]:
    """Return the largest differences of iterates and of memories, relative to the largest coordinate of all.

    Memories are small beside the iterates, whose float32 rounding they carry.
    """
    assert len(got[0]) == len(wanted[0]) == ROUNDS
    assert len(got[1]) == len(wanted[1])
    scale = max(np.abs(part).max() for part in got)
    iterates, memory = (float(np.abs(np.subtract(a, b)).max() / scale) for a, b in zip(got, wanted, strict=True))
    return iterates, memory


def assert_equal(got: Trajectory, wanted: Trajectory) -> None:
    found = deviations(got, wanted)
    assert max(found) < 5e-6, found


# -- the tests -------------------------------------------------------------------------------------------------------

TOP, RAND = (lambda p, worker, n: top(p, 3)), drawn("randk(k=3)")
MEM_SGD = {
    "topk(k=3)": kept(TOP, plain),
    "topk(k=1)": kept(lambda p, worker, n: top(p, 1), plain),
    "randk(k=3)": kept(RAND, plain),
    "ultra(k=0.5)": kept(drawn("ultra(k=0.5)"), plain),
}
QSPARSE = {
    "topk(k=3)": kept(TOP, plain),
    "topk(k=3)|sign": kept(TOP, sign),
    "topk(k=3)|qsgd(levels=4)": kept(TOP, qsgd(4)),
    "topk(k=3)|qsgd(levels=1, scaled=true)": kept(TOP, qsgd(1, scaled=True)),
    "randk(k=3)|qsgd(levels=4)": kept(RAND, qsgd(4)),
}


@pytest.mark.parametrize("spec", MEM_SGD)
def test_mem_sgd(kind: Any, tmp_path: Path, spec: str) -> None:
    setting, problem = Setting(spec, a=30.0), kind(1)
    wanted = mem_sgd(problem.start.astype(np.float64), problem.grad, setting.eta, MEM_SGD[spec])
    assert_equal(problem.run(setting, tmp_path), wanted)


@pytest.mark.parametrize("spec", QSPARSE)
@pytest.mark.parametrize(("H", "beta"), [(1, 0.0), (4, 0.9)])
def test_qsparse_local_sgd(kind: Any, tmp_path: Path, spec: str, H: int, beta: float) -> None:
    setting = Setting(spec, workers=4, H=H, beta=beta, a=40.0 * H / (1 - beta))
    problem = kind(4)
    start = problem.start.astype(np.float64)
    wanted = qsparse_local_sgd(start, problem.grad, setting.eta, QSPARSE[spec], workers=4, H=H, beta=beta)
    assert_equal(problem.run(setting, tmp_path), wanted)


def test_error_feedback_with_a_hard_threshold(kind: Any, tmp_path: Path) -> None:
    setting, problem = Setting("hard_threshold(lam=0.1)", workers=4), kind(4)
    wanted = ef_hard_threshold(problem.start.astype(np.float64), problem.grad, setting.eta, 0.1, workers=4)
    assert_equal(problem.run(setting, tmp_path), wanted)


def test_momentum_correction(kind: Any, tmp_path: Path) -> None:
    setting, problem = Setting("topk(k=3)", workers=4, a=400.0, correction=0.9), kind(4)
    got, start = problem.run(setting, tmp_path), problem.start.astype(np.float64)
    assert_equal(got, dgc(start, problem.grad, setting.eta, 3, workers=4, momentum=0.9))
    for changes in ({"momentum": 0.0}, {"momentum": 0.9, "masked": False}):
        wrong = dgc(start, problem.grad, setting.eta, 3, workers=4, **changes)
        assert min(deviations(got, wrong)) > 1e-3, changes


def test_a_wrong_reference_is_found_out(kind: Any, tmp_path: Path) -> None:
    """A thousandth of the memory forgotten, a coordinate more, a step size late by one: all show."""
    setting = Setting("topk(k=3)|qsgd(levels=4)", workers=4, H=4, beta=0.9, a=400.0)
    problem = kind(4)
    got, x = problem.run(setting, tmp_path), problem.start.astype(np.float64)
    right = {"workers": 4, "H": 4, "beta": 0.9}

    def reference(comp: Comp = QSPARSE[setting.spec], eta: Eta = setting.eta, **changes: Any) -> Trajectory:
        return qsparse_local_sgd(x, problem.grad, eta, comp, **(right | changes))

    assert_equal(got, reference())
    wrong = {
        "no memory": reference(memory=0.0),
        "leaky memory": reference(memory=0.999),
        "k + 1": reference(kept(lambda p, worker, n: top(p, 4), qsgd(4))),
        "other levels": reference(kept(TOP, qsgd(5))),
        "scaled": reference(kept(TOP, qsgd(4, scaled=True))),
        "other draws": reference(lambda p, worker, n: QSPARSE[setting.spec](p, worker, n + 1)),
        "no momentum": reference(beta=0.0),
        "late by one step": reference(eta=lambda t: setting.eta(t + 1)),
    }
    found = {name: deviations(got, path) for name, path in wrong.items()}
    assert min(map(min, found.values())) > 1e-2, found

"""Momentum correction through the real mod and strategy; its trajectory is in tests/test_trajectories.py."""

import re
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from clients import CompressionMod
from fedsparse.compression import Compressor, MemoryStore, decode
from fedsparse.engine import InlineGrid
from fedsparse.protocol import FRAME_NAME, KEY
from fedsparse.seeding import generator
from strategies import CompressedStrategy

D, N, MOMENTUM = 50, 6, 0.9


def make_app(memory, deltas: dict, fails=lambda client, server_round: False) -> ClientApp:
    """An app whose updates are noise around a slope of its own; it writes them down."""
    app = ClientApp(mods=[CompressionMod(memory)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, server_round = int(context.node_config["partition-id"]), message.content["config"]["server-round"]
        if fails(client, server_round):
            raise RuntimeError("this client fails")
        rng, old = generator(3, "train", client, server_round), message.content["arrays"]["w"].numpy()
        new = old + (rng.standard_normal(D) + np.linspace(-1, 1, D)).astype(np.float32)
        deltas[client, server_round] = (new - old).astype(np.float64)
        content = {"arrays": ArrayRecord({"w": Array(new)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def run(strategy: CompressedStrategy, grid: InlineGrid, rounds: int) -> np.ndarray:
    with grid:
        start = ArrayRecord({"w": Array(np.zeros(D, np.float32))})
        return strategy.start(grid, start, num_rounds=rounds).arrays["w"].numpy()


class FaultyGrid(InlineGrid):
    """Loses, repeats and reorders replies, and writes down what each client sent."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        rng, frames = self.__dict__.setdefault("_rng", np.random.default_rng(0)), self.__dict__.setdefault("frames", [])
        out = []
        for answer in super().send_and_receive(messages, timeout=timeout):
            if not answer.has_error():
                frames.append((answer.metadata.src_node_id - 1000, answer.content["arrays"][FRAME_NAME].data))
            out += [answer] * int(rng.choice([0, 1, 2], p=[0.35, 0.5, 0.15]))
        rng.shuffle(out)
        return out


@pytest.mark.parametrize("spec", ["topk(k=4)", "hard_threshold(lam=2.0)|qsgd(levels=3)", "randk(k=9)|sign"])
def test_faults_lose_no_velocity(tmp_path, spec):
    """Accepted C(p) + residuals + pending not accepted == the sum of all u = m u + Delta, masked where sent."""
    accepted_mass, deltas = np.zeros(D), {}

    class Spy(CompressedStrategy):
        def _account(self, state, updates):
            for update in updates:
                update.compressed.add_to(accepted_mass)
            super()._account(state, updates)

    strategy = Spy(FedAvg(fraction_evaluate=0.0), spec, clients_per_round=4, momentum_correction=MOMENTUM)
    grid = FaultyGrid(make_app(tmp_path, deltas, lambda client, n: (client + n) % 5 == 0), num_clients=N)
    run(strategy, grid, rounds=20)

    compressor, store = Compressor.from_spec(spec), MemoryStore(tmp_path, strategy.run)
    velocity, total, left = np.zeros((N, D)), np.zeros(D), np.zeros(D)
    for (client, frame), delta in zip(grid.frames, deltas.values(), strict=True):
        velocity[client] = MOMENTUM * velocity[client] + delta
        total += velocity[client]
        velocity[client, decode(frame, compressor, D).indices] = 0.0
    restored = 0
    for name in store.clients():
        residual, pending = store.read(name, D)
        left += residual
        if pending.update_id != strategy.state_dict()["accepted"].get(name):
            left += decode(pending.frame, compressor, D).to_dense()
            restored += 1
        np.testing.assert_allclose(store.begin(name, D, 99).velocity, velocity[int(name)], atol=1e-4)
    assert restored, "some update was lost on its way"
    np.testing.assert_allclose(accepted_mass + left, total, atol=1e-3)


@pytest.mark.parametrize("spec", ["none", "none|sign", "topk(density=1.0)"])
def test_where_everything_is_sent_momentum_does_nothing(tmp_path, spec):
    results = []
    for momentum in (0.0, MOMENTUM):
        strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), spec, momentum_correction=momentum)
        results.append(run(strategy, InlineGrid(make_app(tmp_path, {}), num_clients=2), rounds=4))
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"momentum": 1.0}, r"must be in \[0, 1\), the server asks for 1.0"),
        ({"momentum": -0.5}, r"must be in \[0, 1\), the server asks for -0.5"),
        ({"momentum": float("nan")}, r"must be in \[0, 1\), the server asks for nan"),
        ({"momentum": 0.5, "memory": False}, "without error memory"),
        ({"momentum": 1}, "'momentum' must be float, got 1"),
    ],
)
def test_a_wrong_directive_is_explained(tmp_path, changes, words):
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), "topk(k=3)")
    with InlineGrid(make_app(tmp_path, {}), num_clients=1) as grid:
        start = ArrayRecord({"w": Array(np.zeros(D, np.float32))})
        (message,) = strategy.configure_train(1, start, ConfigRecord(), grid)
        for key, value in changes.items():
            message.content[KEY][key] = value
        (answer,) = grid.send_and_receive([message])
    assert re.search(words, answer.error.reason), answer.error.reason

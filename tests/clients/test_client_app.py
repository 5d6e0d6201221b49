"""Our own ClientApp through a real grid: learning, empty clients, and half-precision models."""

import json
import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, FedProx

from clients import CompressionMod
from clients.client_app import make_app, partition_id
from clients.training import evaluate
from fedsparse.data import load_dataset
from fedsparse.engine import FIRST_NODE_ID, InlineGrid
from fedsparse.errors import ConfigError
from fedsparse.models import build_model, load_arrays, model_arrays
from strategies import CompressedStrategy
from strategies.aggregation import to_record


def job(**train) -> str:
    settings = {"local_epochs": 1, "batch_size": 16, "lr": 0.2, **train}
    data = {"dataset": "digits", "num_clients": 6, "partition": "dirichlet(alpha=0.5)"}
    return json.dumps({"seed": 0, "data": data, "model": {"name": "mlp(hidden=32)"}, "train": settings})


def learn(tmp_path, strategy, rounds=5, text=None, num_clients=6):
    data = load_dataset("digits")
    model = build_model("mlp(hidden=32)", data.input_shape, 10, 0)
    arrays = to_record(model_arrays(model))
    with InlineGrid(make_app([CompressionMod(tmp_path)]), num_clients=num_clients) as grid:
        for server_round in range(1, rounds + 1):
            config = ConfigRecord({"job": text or job()})
            messages = strategy.configure_train(server_round, arrays, config, grid)
            arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    load_arrays(model, {name: array.numpy() for name, array in arrays.items()})
    return evaluate(model, data.x_test, data.y_test, data.scale, torch.device("cpu"))[1]


def test_it_learns_through_compression(tmp_path):
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), "hard_threshold(lam=0.01)|sign")
    assert learn(tmp_path, strategy, rounds=15) > 0.85
    assert strategy.last_round.train_loss < 1.0
    assert strategy.last_round.uplink_bytes < strategy.last_round.dense_bytes / 10


def test_fedprox_reaches_the_client(tmp_path):
    """A huge proximal term keeps clients at the global model."""
    near = CompressedStrategy(FedProx(fraction_evaluate=0.0, proximal_mu=4.0), "none")
    far = CompressedStrategy(FedProx(fraction_evaluate=0.0, proximal_mu=0.0), "none")
    learn(tmp_path, near, 1)
    learn(tmp_path, far, 1)
    assert near.last_round.update_norm < 0.7 * far.last_round.update_norm


def test_clients_without_data_weigh_nothing(tmp_path):
    text = (
        job()
        .replace("dirichlet(alpha=0.5)", "shards(shards_per_client=1)")
        .replace('"num_clients": 6', '"num_clients": 2000')
    )
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), "topk(density=0.1)", clients_per_round=60)
    learn(tmp_path, strategy, 2, text, num_clients=2000)
    assert len(strategy.last_round.accepted) == 60
    assert not strategy.last_round.failed


def ask(kind: str, text: str | None = None, arrays=None, client=2, **config) -> Message:
    """Send one message to the app and return its reply."""
    model = build_model("mlp(hidden=32)", (1, 8, 8), 10, 0)
    record = ConfigRecord({"server-round": 1, **config, **({"job": text} if text else {})})
    content = RecordDict({"arrays": to_record(arrays or model_arrays(model)), "config": record})
    with InlineGrid(make_app([]), num_clients=client + 1) as grid:
        message = grid.create_message(content, kind, FIRST_NODE_ID + client, "")
        return next(iter(grid.send_and_receive([message])))


def test_train_evaluate_and_query():
    trained = ask("train", job()).content
    assert set(trained["arrays"]) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    metrics = trained["metrics"]
    assert metrics["local-steps"] == -(-metrics["num-examples"] // 16)
    before = ask("evaluate", job()).content["metrics"]
    after = ask("evaluate", job(), {n: a.numpy() for n, a in trained["arrays"].items()}).content["metrics"]
    assert before["num-examples"] == after["num-examples"] == metrics["num-examples"]
    assert after["loss"] < before["loss"]
    assert 0.0 <= after["accuracy"] <= 1.0
    assert ask("query").content["node"]["partition-id"] == 2


def test_clients_do_not_change_the_threads_of_their_process():
    before = torch.get_num_threads()
    text = json.dumps({**json.loads(job()), "num_threads": before + 1})
    assert not ask("train", text).has_error()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("text", "client", "config", "words"),
    [
        (None, 0, {}, "has no 'job'"),
        ("{}", 0, {}, "same version"),
        ("not json", 0, {}, "same version"),
        ("[]", 0, {}, "same version"),
        (job(nesterov=True), 0, {}, "unknown train setting .* 'nesterov'"),
        (job(lr=-1.0), 0, {}, "lr must be in"),
        (job(local_steps=2), 0, {}, "exactly one of"),
        (job().replace('"num_clients": 6', '"num_clients": "6"'), 0, {}, "num_clients must be a whole number"),
        (job().replace("mlp", "mpl"), 0, {}, "Did you mean 'mlp'"),
        (job().replace('"digits"', '"digit"'), 0, {}, "Did you mean 'digits'"),
        (job(), 6, {}, "partition-id is 6, the data are divided among 6 clients"),
        (job(), 0, {"server-round": "one"}, "must have a number 'server-round'"),
        (job(), 0, {"proximal-mu": -1.0}, "proximal_mu must be in"),
    ],
)
def test_what_is_wrong_with_a_message_is_explained(text, client, config, words):
    reply = ask("train", text, client=client, **config)
    assert reply.has_error()
    assert re.search(words, reply.error.reason), reply.error.reason
    assert "ConfigError" in reply.error.reason


def test_a_node_without_partition_id_is_explained():
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ConfigError, match="--node-config"):
        partition_id(context)


def test_bfloat16_keeps_small_updates(tmp_path, monkeypatch):
    """The server's numbers are float32: steps far below bfloat16's resolution must add up, not vanish."""
    import clients.client_app as app

    build = app.build_model
    monkeypatch.setattr(app, "build_model", lambda *args, **kw: build(*args, **kw).to(torch.bfloat16))
    app._model.cache_clear()
    try:
        strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), "none")
        assert learn(tmp_path, strategy, 12) > 0.8
    finally:
        app._model.cache_clear()
    assert np.isfinite(strategy.last_round.update_norm)

"""Our own ClientApp through a real grid: learning, empty clients, and half-precision models."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedProx

from clients import CompressionMod
from clients.client_app import make_app
from clients.job import parse_job
from clients.training import evaluate
from fedsparse.data import load_dataset
from fedsparse.engine import InlineGrid
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


def test_a_job_of_another_version_is_explained():
    with pytest.raises(ConfigError, match="same version"):
        parse_job("{}")
    with pytest.raises(ConfigError, match="same version"):
        parse_job("not json")


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

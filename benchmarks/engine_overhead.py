"""What an engine costs by itself: clients that do nothing, under our Ray engine and under Flower's own.

Both run the same ClientApp and the same FedAvg, one after the other, with one CPU per client. The model goes to every
client in every round; the reply is tiny. Reported: median over the rounds after warm-up of the time of a round, divided
by the number of clients, and of its part in `send_and_receive`, where FedAvg has none; the whole time from the start of
the engine to the end of the first round. A round of Flower's engine with 10,000 clients takes minutes, so there the
first one has to do for it.

    python -m benchmarks.engine_overhead --cases 100x10_000x10x10    # clients x parameters x our rounds x Flower's
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks._report import save

WARM_UP = 2
CASES = ["100x10_000x10x10", "100x1_000_000x10x10", "1_000x10_000x10x4", "100x10_000_000x10x3", "10_000x10_000x6x1"]
MODULE = "benchmarks.engine_overhead"

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Do nothing."""
    reply = {"arrays": ArrayRecord([np.zeros(1, np.float32)]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(reply), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes when rounds begin and end, and keeps the model, which the tiny replies are not."""

    def __init__(self, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.begun: list[float] = []
        self.sent: list[float] = []
        self.received: list[float] = []
        self.ended: list[float] = []

    def times(self) -> dict[str, list[float]]:
        """Return when each round began, its messages were made, its replies were there, and it ended."""
        return {name: getattr(self, name) for name in ("begun", "sent", "received", "ended")}

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Start the clock, then do as FedAvg does."""
        self.begun.append(time.time())
        messages = list(super().configure_train(*args, **kwargs))
        self.sent.append(time.time())
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord | None]:
        """Do as FedAvg does, then stop the clock."""
        replies = list(replies)
        self.received.append(time.time())
        _, metrics = super().aggregate_train(server_round, replies)
        self.ended.append(time.time())
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != self.min_train_nodes:
            raise RuntimeError(f"{len(replies)} replies, {len(failed)} errors: {failed[:1]}")
        return None, metrics


def rounds(grid: Grid, clients: int, params: int, count: int) -> TimedFedAvg:
    """Run `count` rounds and return the strategy with its clock."""
    strategy = TimedFedAvg(clients)
    model = ArrayRecord({"w": Array(np.arange(params, dtype=np.float32))})
    strategy.start(grid, model, num_rounds=count)
    return strategy


@server_app.main()
def main_under_flower(grid: Grid, context: Context) -> None:
    """Run the rounds in Flower's own engine, and leave the times in the folder of the run."""
    case = json.loads(str(context.run_config["scenario"]))
    while len(list(grid.get_node_ids())) < case["clients"]:
        time.sleep(0.1)
    times = rounds(grid, **case).times()
    Path(str(context.run_config["out"]), "times.json").write_text(json.dumps(times))


def under_ray(clients: int, params: int, count: int) -> dict[str, float]:
    """Measure our engine."""
    from fedsparse.engine import RayGrid

    start = time.time()
    with RayGrid(f"{MODULE}:client_app", num_clients=clients) as grid:
        strategy = rounds(grid, clients, params, count)
    return summary(start, strategy.times(), clients)


def under_flower(clients: int, params: int, count: int) -> dict[str, float]:
    """Measure Flower's engine."""
    from fedsparse.engine import run_with_flower

    start = time.time()
    with tempfile.TemporaryDirectory() as out:
        run_with_flower(
            json.dumps({"clients": clients, "params": params, "count": count}),
            out=Path(out),
            num_clients=clients,
            client_cpus=1,
            server_app=f"{MODULE}:server_app",
            client_app=f"{MODULE}:client_app",
        )
        times = json.loads(Path(out, "times.json").read_text())
    return summary(start, times, clients)


def summary(start: float, times: dict[str, list[float]], clients: int) -> dict[str, float]:
    """Return milliseconds per client and round, and seconds to the end of the first round."""
    first = min(WARM_UP, len(times["begun"]) - 1)

    def between(earlier: str, later: str) -> list[float]:
        pairs = zip(times[earlier], times[later], strict=True)
        return [(end - begin) / clients * 1e3 for begin, end in pairs][first:]

    each = between("begun", "ended")
    return {
        "rounds_measured": len(each),
        "ms_per_client_round": round(statistics.median(each), 4),
        "ms_min": round(min(each), 4),
        "ms_max": round(max(each), 4),
        "ms_send_and_receive": round(statistics.median(between("sent", "received")), 4),
        "first_round_after_s": round(times["ended"][0] - start, 2),
    }


def main() -> None:
    """Measure all cases, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="clients x parameters x our rounds x Flower's rounds")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    rows = []
    for text in options.cases:
        clients, params, our_rounds, their_rounds = (int(number) for number in text.split("x"))
        ours = under_ray(clients, params, our_rounds)
        theirs = under_flower(clients, params, their_rounds)
        rows.append(
            {
                "clients": clients,
                "parameters": params,
                **{f"ray_{key}": value for key, value in ours.items()},
                **{f"flower_{key}": value for key, value in theirs.items()},
                "ratio": round(theirs["ms_per_client_round"] / ours["ms_per_client_round"], 1),
                "ratio_send_and_receive": round(theirs["ms_send_and_receive"] / ours["ms_send_and_receive"], 1),
            }
        )
        print(rows[-1], flush=True)
    print("clients  parameters  fedsparse ray    flower     ratio   (ms per client-round)")
    for row in rows:
        mine, other = row["ray_ms_per_client_round"], row["flower_ms_per_client_round"]
        print(f"{row['clients']:7d} {row['parameters']:11,d} {mine:14.3f} {other:9.3f} {row['ratio']:8.1f}x")
    save("engine_overhead", rows, f"flwr {version('flwr')}, ray {version('ray')}; no-op clients, tiny replies, FedAvg")


if __name__ == "__main__":
    main()

"""Client apps of the engine tests; workers import this module by its name."""

import os
import signal
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add the partition id to the model in place; scribble over everything that was received."""
    arrays, config = message.content["arrays"], message.content["config"]
    numbers = arrays["w"].numpy()
    numbers += context.node_config["partition-id"]
    reply = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(numbers), "untouched": arrays["w"]}),
            "metrics": MetricRecord({"num-examples": 1, "list": [1, 2]}),
            "seen": ConfigRecord({"list": config["list"], "lr": context.run_config["lr"], "pid": os.getpid()}),
        }
    )
    config["list"].append(99)
    config["left"] = "behind"
    arrays.pop("v")
    del message.content["config"]
    return Message(reply, reply_to=message)


@app.train("noop")
def noop(message: Message, context: Context) -> Message:
    """Answer with next to nothing."""
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@app.train("echo")
def echo(message: Message, context: Context) -> Message:
    """Send everything back."""
    return Message(message.content, reply_to=message)


@app.train("state")
def state(message: Message, context: Context) -> Message:
    """Count the calls in the state; raise at odd calls of client 1, after having changed the state."""
    count = context.state.metric_records.get("calls", MetricRecord({"n": 0}))
    context.state["calls"] = MetricRecord({"n": int(count["n"]) + 1})
    if context.node_config["partition-id"] == 1 and message.content["config"]["round"] % 2:
        raise ValueError("client 1 does not like odd rounds")
    if context.node_config["partition-id"] == 2:
        context.state.clear()
    content = RecordDict({"metrics": MetricRecord({"n": int(count["n"]), "num-examples": 1})})
    return Message(content, reply_to=message)


@app.train("unruly")
def unruly(message: Message, context: Context) -> Message:
    """Misbehave in the way that the number of the client says."""
    match context.node_config["partition-id"]:
        case 0:
            raise KeyError("lost")
        case 1:
            raise SystemExit(3)
        case 2:
            return None  # type: ignore[return-value]
        case 3:
            return Message(RecordDict(), dst_node_id=1, message_type="train")
        case _:
            return Message(RecordDict(), reply_to=message)


@app.train("die")
def die(message: Message, context: Context) -> Message:
    """Kill the own process: client 3 always, clients 5 and 6 the first time they are asked."""
    client = context.node_config["partition-id"]
    folder = Path(str(message.content["config"]["folder"]))
    tries = len(list(folder.glob(f"{client}-*")))
    (folder / f"{client}-{tries}").touch()
    if client == 3 or (client in (5, 6) and tries == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    numbers = message.content["arrays"]["w"].numpy() * client
    content = RecordDict({"arrays": ArrayRecord([numbers]), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


class OutOfMemoryError(RuntimeError):
    """As torch has one, without the seconds that importing torch takes."""


@app.train("crowd")
def crowd(message: Message, context: Context) -> Message:
    """Run out of memory where more than two clients run at the same time; client 9 always does."""
    client, folder = context.node_config["partition-id"], Path(str(message.content["config"]["folder"]))
    mine = folder / f"in-{client}"
    mine.touch()
    try:
        for _ in range(20):
            time.sleep(0.03)
            if client == 9 or len(list(folder.glob("in-*"))) > 2:
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
    finally:
        mine.unlink()
    return Message(RecordDict({"metrics": MetricRecord({"client": client})}), reply_to=message)


@app.train("sleep")
def sleep(message: Message, context: Context) -> Message:
    """Take as many seconds as the config says for this client, or 0."""
    client = context.node_config["partition-id"]
    time.sleep(float(message.content["config"].get(f"client-{client}", 0.0)))
    return Message(RecordDict({"metrics": MetricRecord({"client": client})}), reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say what the process of the client is like."""
    import sys

    torch = sys.modules.get("torch")
    node = ConfigRecord(
        {
            "partition-id": context.node_config["partition-id"],
            "num-partitions": context.node_config["num-partitions"],
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
            "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
            "torch-threads": torch.get_num_threads() if torch else 0,
            "data-type": type(message.content["arrays"]["w"].data).__name__ if message.content else "",
        }
    )
    return Message(RecordDict({"node": node}), reply_to=message)


def make_app() -> ClientApp:
    """Return the app, as a factory."""
    return app


def broken() -> ClientApp:
    """Fail."""
    raise RuntimeError("no data today")


not_an_app = np.zeros(1)

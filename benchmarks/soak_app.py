"""The soak's ClientApp: a step without torch, so that starting it for every message takes less time."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients import CompressionMod

app = ClientApp(mods=[CompressionMod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move every number of the model by a little."""
    generator = np.random.default_rng(int(context.node_config["partition-id"]))
    arrays = next(iter(message.content.array_records.values()))
    moved = {
        name: Array((array.numpy() + 0.01 * generator.standard_normal(array.shape)).astype(np.float32))
        for name, array in arrays.items()
    }
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

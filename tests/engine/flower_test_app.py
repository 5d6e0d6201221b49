"""A ServerApp for the tests of Flower's own engine."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Ask every client once, and write what they say into the folder of the run."""
    settings = json.loads(str(context.run_config["scenario"]))
    if settings.get("fail"):
        raise RuntimeError(settings["fail"])
    while len(list(grid.get_node_ids())) < settings["clients"]:
        pass
    record = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": ConfigRecord()})
    replies = grid.send_and_receive(Message(record, node, "query") for node in grid.get_node_ids())
    said = [dict(reply.content["node"]) for reply in replies]
    Path(str(context.run_config["out"]), "said.json").write_text(json.dumps({"scenario": settings, "clients": said}))
    print("all clients have answered")

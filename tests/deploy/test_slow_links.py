"""Devices behind slow links that break: bytes as the interface counts them, and uploads that go on."""

import threading
import time

import pytest
from links import Link, needs_links

from fedsparse.run import RunFolder, run_scenario
from fedsparse.scenario import apply_overrides, from_toml

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("links"), pytest.mark.timeout(600), needs_links]

TOML = """
name = "linked"
rounds = 2
[data]
dataset = "digits"
num_clients = 1
[model]
name = "mlp(hidden=1000)"
[train]
lr = 0.1
local_steps = 3
[compression]
uplink = "topk(density=0.01)"
[evaluation]
every = 100
"""
APPS = ("fedsparse.flower_app:server_app", "clients.client_app:app")
DENSE = 4 * (64 * 1000 + 1000 + 10 * 1000 + 10)


def test_the_interface_carries_the_frames_and_little_more(make_fleet, tmp_path):
    """Polls, signatures, TLS and receipts cost some kB a round, whatever the model."""
    with Link(1, "4mbit") as link:
        fleet = make_fleet(1, link.address)
        fleet.start_server()
        fleet.start_node(0, link.prefix)
        carried, payload = {}, {}
        for name, uplink in (("sparse", "topk(density=0.01)"), ("dense", "none")):
            chosen = apply_overrides(from_toml(TOML), [f"compression.uplink={uplink}"])
            before = link.uplink_bytes
            lines = fleet.run(chosen, tmp_path / name, apps=APPS)
            carried[name] = link.uplink_bytes - before
            payload[name] = sum(line["uplink_bytes"] for line in lines)
    overhead = {name: carried[name] - payload[name] for name in carried}
    print(f"uplink on the interface {carried}, frames {payload}, the rest {overhead}")
    assert payload["dense"] >= 2 * DENSE
    assert payload["sparse"] < 0.02 * payload["dense"]
    assert 0 < overhead["sparse"] < 100_000
    assert 0 < overhead["dense"] < 100_000 + 0.1 * payload["dense"]


def test_an_upload_goes_on_after_the_link_was_down(make_fleet, tmp_path):
    """The plug is pulled for 30 s in the middle of an upload; the run ends as the simulation does, bit for bit."""
    with Link(2, "1mbit") as link:
        fleet = make_fleet(1, link.address)
        fleet.start_server()
        fleet.start_node(0, link.prefix)
        chosen = apply_overrides(from_toml(TOML), ["compression.uplink=none"])
        cut = []

        def pull_the_plug() -> None:
            start = link.uplink_bytes
            while link.uplink_bytes - start < DENSE // 2:
                time.sleep(0.05)
            link.set("down")
            cut.append(link.uplink_bytes - start)
            time.sleep(30)
            link.set("up")

        thread = threading.Thread(target=pull_the_plug)
        thread.start()
        lines = fleet.run(chosen, tmp_path / "deployed", apps=APPS)
        thread.join()
    assert DENSE // 2 <= cut[0] < DENSE
    assert [line["accepted"] for line in lines] == [["0"], ["0"]]
    assert lines[0]["wall_s"] > 30
    run_scenario(chosen, tmp_path / "inline", engine="inline")
    deployed, simulated = (tmp_path / name / "model.safetensors" for name in ("deployed", "inline"))
    assert deployed.read_bytes() == simulated.read_bytes()
    assert RunFolder(tmp_path / "inline").rounds()[0]["uplink_bytes"] == lines[0]["uplink_bytes"]

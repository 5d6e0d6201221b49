"""What a device says of itself: each thing once, and what a person can do."""

import pytest
from test_keys_and_checks import made

from fedsparse.deploy import node as module
from fedsparse.deploy import supervise
from fedsparse.deploy.federation import Node
from fedsparse.deploy.node import FLOWER_ID, NodeRunner, owner

FAILED = """\
ERROR :     ClientApp raised an exception
Traceback (most recent call last):
  File "clients/mod.py", line 93, in __call__
    reply = call_next(message, context)
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^
fedsparse.errors.DataError: data.source = 'x': a label is 12, the model tells 10 classes apart.\x1b[2J
ERROR :     Exit Code: 800
"""


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        for each in (module, supervise):
            monkeypatch.setattr(each.time, "monotonic", lambda: self.now)


@pytest.fixture
def node(tmp_path):
    return Node.open(made(tmp_path / "fed").node_folder(0))


def test_a_failing_training_is_told_once_and_again_after_a_while(node, monkeypatch):
    clock, said = Clock(monkeypatch), []
    runner = NodeRunner(node, said.append)
    for _ in range(3):
        for line in FAILED.splitlines():
            runner._listen(line)
    assert len(said) == 1
    assert "training failed here: fedsparse.errors.DataError: data.source = 'x': a label is 12" in said[0]
    assert "\x1b" not in said[0]
    clock.now += supervise.AGAIN_AFTER_S
    for line in FAILED.splitlines():
        runner._listen(line)
    assert len(said) == 2


def test_a_node_that_is_refused_for_minutes_asks_for_the_other_device(node, monkeypatch):
    clock, said = Clock(monkeypatch), []
    runner = NodeRunner(node, said.append)
    child = supervise.Child("node", ["true"], {}, node.path / "log")
    child.tail.append(f"Exit Code: {module.STILL_CONNECTED}")
    for _ in range(20):
        runner._ended(child, 1)
        clock.now += 15
    assert ["still counts" in said[0], "a copy of this folder" in said[1], len(said)] == [True, True, 2]
    runner._listen("INFO : SuperNode ID: 123")
    clock.now += supervise.AGAIN_AFTER_S
    runner._ended(child, 1)
    assert "still counts" in said[-1], "it was let in meanwhile: this is something new"


def test_a_copy_does_not_sign_off_the_device_that_it_was_copied_from(node, tmp_path, monkeypatch):
    gone = []
    monkeypatch.setattr(module, "sign_off", lambda _node, number: gone.append(number) or True)
    for whose, expected in ((owner(node), [7]), ("0123456789ab /home/pi/node-0", [])):
        gone.clear()
        (node.path / FLOWER_ID).write_text(f"7 {whose}")
        NodeRunner(node, print)._sign_off()
        assert gone == expected
        assert (node.path / FLOWER_ID).exists() == (not expected)

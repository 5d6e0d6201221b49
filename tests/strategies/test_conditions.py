"""Rounds on a virtual clock: who is asked, who is late, how long it takes."""

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsparse.devices import Device, Fleet, make_availability
from fedsparse.errors import ConfigError, RunError
from fedsparse.run import RoundDone, RunFolder, run_scenario
from fedsparse.scenario import apply_overrides, from_toml
from strategies import Conditions
from strategies.conditions import Turn

# One byte up takes one second; nothing else takes any.
UNIT = Device("unit", 1.0, 8e-6, 1e9)


def conditions(n: int = 10, *, dropout: float = 0.0, availability: str = "always", **settings) -> Conditions:
    fleet = Fleet({UNIT: 1.0}, n, 0, 0.0, availability=make_availability(availability), dropout=dropout)
    return Conditions(fleet, **settings)


def turns(*up_bytes: int) -> list[Turn]:
    return [Turn(str(client), 0, count, 0.0) for client, count in enumerate(up_bytes)]


def test_the_server_waits_for_the_slowest():
    clock = conditions()
    verdict = clock.finish(1, turns(3, 9, 5))
    assert (verdict.seconds, clock.now, verdict.late) == (pytest.approx(9), pytest.approx(9), {})
    clock.finish(2, turns(1))
    assert clock.now == pytest.approx(10)


def test_a_deadline_ends_the_round_and_what_is_late_does_not_count():
    clock = conditions(deadline=6.0)
    verdict = clock.finish(1, turns(3, 9, 5))
    assert verdict.seconds == 6.0
    assert verdict.late == {"1": "late: 9 s, the round ended after 6 s"}
    assert clock.finish(2, turns(3, 2)).seconds == pytest.approx(3)  # nobody waits where all are there


def test_over_selection_takes_the_first():
    clock = conditions(over_select=0.5)
    assert clock.cohort_size(4) == 6
    verdict = clock.finish(1, turns(6, 1, 5, 2, 4, 3))
    assert verdict.seconds == pytest.approx(4)
    assert set(verdict.late) == {"0", "2"}
    assert clock.finish(2, turns(9, 2)).late == {}  # fewer than wanted: all count


def test_who_goes_away_holds_up_nobody_once_enough_are_there():
    clock = conditions(40, over_select=0.5, dropout=0.4)
    asked = [Turn(str(client), 0, 10 + client, 0.0) for client in range(40)]
    alone = [m for m in conditions(40, dropout=0.4).finish(1, asked).members if not m.dropped]
    clock.cohort_size(len(alone))
    assert clock.finish(1, asked).seconds == max(member.seconds for member in alone)


def test_late_updates_are_paid_for(tmp_path):
    overrides = ['compression.uplink=hard_threshold(budget="20kB")', "rounds=12", "devices.dropout=0"]
    run_scenario(apply_overrides(from_toml(SCENARIO), overrides), tmp_path / "out")
    lines = RunFolder(tmp_path / "out").rounds()
    spent = sum(line["uplink_bytes"] for line in lines)
    assert any("late" in reason for line in lines for reason in line["failed"].values())
    assert lines[-1]["budget_spent"] == pytest.approx(spent)
    assert spent <= 1.01 * 20e3


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 12), st.none() | st.integers(1, 60), st.booleans())
def test_every_update_counts_or_is_named(up_bytes, wanted, deadline, over):
    clock = conditions(20, dropout=0.3, deadline=deadline, over_select=0.5 if over else 0.0)
    clock.cohort_size(wanted)
    verdict = clock.finish(1, turns(*up_bytes))
    assert not set(verdict.late) & set(verdict.dropped)
    counted = [m for m in verdict.members if m.client not in verdict.late and m.client not in verdict.dropped]
    assert all(member.seconds <= verdict.seconds + 1e-9 for member in counted)
    assert deadline is None or verdict.seconds <= deadline
    assert not over or len(counted) <= wanted
    assert clock.now == verdict.seconds


def test_slow_devices_do_what_they_can():
    slow, fast = Device("slow", 1.0, 8e-6, 1e9), Device("fast", 100.0, 8e-6, 1e9)
    fleet = Fleet({slow: 1.0, fast: 1.0}, 2, 0, 1e9)
    clock = Conditions(fleet, deadline=30.0, partial_work=True)
    clock.finish(0, turns(10, 10))
    by_name = {fleet.device(c).name: clock.steps(c, 0) for c in "01"}
    assert by_name == {"slow": 20, "fast": 2000}
    assert Conditions(fleet, deadline=30.0).steps("0", 0) is None
    assert Conditions(fleet, deadline=1e-9, partial_work=True).steps("0", 0) == 1


def test_the_clock_goes_on_where_nobody_is_there():
    clock = conditions(availability="periodic(on=0.1, period=6000, spread=0)")
    clock.now = 3000.0
    assert len(clock.present([str(c) for c in range(10)], 1)) == 10
    assert clock.now == 6000.0
    with pytest.raises(RunError, match="virtual days"):
        conditions(availability="probability(p=1e-9)").present(["0"], 1)


def test_partial_work_needs_a_deadline():
    with pytest.raises(ConfigError, match=r"needs devices\.deadline"):
        conditions(partial_work=True)


SCENARIO = """
name = "field"
rounds = 4
[data]
dataset = "digits"
num_clients = 8
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 6
clients_per_round = 4
[compression]
uplink = "topk(density=0.05)"
[engine]
name = "inline"
[devices]
mix = {raspberry-pi-4 = 1, mine = 3}
compute_sigma = 0.5
network_sigma = 1.0
availability = "probability(p=0.9)"
dropout = 0.1
over_select = 0.5
[devices.profile.mine]
like = "phone-4g"
up_mbit = 0.01
"""


def test_the_same_clock_on_every_engine(tmp_path):
    """Virtual time follows from bytes, steps and seeds, never from the machine that simulates."""
    clocks = {}
    for engine in ("inline", "ray"):
        run_scenario(from_toml(SCENARIO), tmp_path / engine, engine=engine)
        clocks[engine] = [
            {key: line[key] for key in ("virtual_s", "virtual_round_s", "cohort", "accepted", "failed", "uplink_bytes")}
            for line in RunFolder(tmp_path / engine).rounds()
        ]
    assert clocks["inline"] == clocks["ray"]
    assert any(line["failed"] for line in clocks["inline"])
    times = [line["virtual_s"] for line in clocks["inline"]]
    assert times == sorted(times)
    assert times[0] > 0


def test_partial_work_reaches_the_clients(tmp_path):
    """2,368 operations forward, twice that backward, 32 examples: 2.3 s a step on a device of 1e-4 GFLOP/s."""
    slow = ["devices.mix=slow", 'devices.profile={slow={like="datacenter", gflops=1e-4}}', "devices.deadline=8"]
    plain = ["devices.dropout=0", "devices.availability=always", "devices.compute_sigma=0", "devices.over_select=0"]
    scenario = apply_overrides(from_toml(SCENARIO), [*slow, *plain])
    with pytest.raises(RunError, match=r"for 4 rounds in a row.*devices\.deadline = 8 s"):
        run_scenario(scenario, tmp_path / "late")
    lines = RunFolder(tmp_path / "late").rounds()
    assert [line["accepted"] for line in lines] == [[]] * 4
    assert all(set(line["causes"].values()) == {"late"} for line in lines)
    summary = run_scenario(apply_overrides(scenario, ["devices.partial_work=true"]), tmp_path / "partial")
    lines = RunFolder(tmp_path / "partial").rounds()
    assert summary.status == "completed"
    assert all(not line["failed"] for line in lines)
    assert [line["virtual_round_s"] for line in lines] == pytest.approx(4 * [3 * 2.273], rel=1e-2)


def test_rounds_in_which_nobody_comes_cost_time_and_lose_nothing(tmp_path):
    """One client that drops out every other round: the run goes on, and so it does when it is resumed."""
    one = ["data.num_clients=1", "train.clients_per_round=1", "devices.over_select=0", "devices.availability=always"]
    scenario = apply_overrides(from_toml(SCENARIO), [*one, "devices.dropout=0.6", "rounds=8"])
    run_scenario(scenario, tmp_path / "whole")
    lines = RunFolder(tmp_path / "whole").rounds()
    empty = [line for line in lines if not line["accepted"]]
    assert 2 <= len(empty) <= 6
    assert all(line["virtual_round_s"] > 0 and line["eval_accuracy"] is not None for line in lines)
    clock = [0.0, *(line["virtual_s"] for line in lines)]
    assert clock == sorted(clock)
    after = [
        later["restored"] for line, later in itertools.pairwise(lines) if not line["accepted"] and later["accepted"]
    ]
    assert after
    assert all(after)
    out, done = tmp_path / "parts", 0
    while done < 8:
        with suppress(KeyboardInterrupt):
            run_scenario(scenario, out, resume=True, on_event=stop_after_a_round)
        done = len(RunFolder(out).rounds())
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert [line["accepted"] for line in RunFolder(out).rounds()] == [line["accepted"] for line in lines]


def stop_after_a_round(event):
    if isinstance(event, RoundDone) and event.line["round"] < 8:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["devices.mix=phone"], "phone-4g"),
        (["devices.profile={mine={gflops=1.0}}"], "lacks up_mbit"),
        (["devices.partial_work=true"], "needs devices.deadline"),
        (["devices.availability=probability(p=0)"], "probability"),
        (["devices.availability=trace(path=12)"], "path must be a text"),
        (["devices.mix={phone-4g=1e308, datacenter=1e308}"], "1e\\+09"),
        (['devices.profile={mine={like="phone-4g", memory_mb=0.01}}'], "the model needs at least"),
    ],
)
def test_mistakes_are_named(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        run_scenario(apply_overrides(from_toml(SCENARIO), overrides), tmp_path / "out")
    without = SCENARIO.replace("mix = {raspberry-pi-4 = 1, mine = 3}\n", "")
    with pytest.raises(ConfigError, match=r"devices\.\w+ needs devices\.mix"):
        run_scenario(from_toml(without), tmp_path / "out")

"""Devices: who has which, how long they take, when they are there."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsparse.devices import PROFILES, Device, Fleet, get_profile, make_availability
from fedsparse.devices.profiles import custom_profile
from fedsparse.errors import ConfigError, DataError

SLOW, FAST = Device("slow", 1.0, 1.0, 2.0, latency_s=0.5), Device("fast", 10.0, 100.0, 100.0)


def fleet(**settings) -> Fleet:
    values = {"mix": {SLOW: 1.0, FAST: 1.0}, "num_clients": 10, "seed": 3, "flop_per_step": 2e9} | settings
    return Fleet(**values)


def test_a_turn_is_down_then_compute_then_up():
    """1 MB down at 2 Mbit/s, 3 steps of 2 GFLOP at 1 GFLOP/s, 0.25 MB up at 1 Mbit/s, and the latency twice."""
    turn = fleet(mix={SLOW: 1.0}).turn("0", 1, 1_000_000, 3, 250_000)
    assert (turn.down_s, turn.compute_s, turn.up_s) == (0.5 + 4.0, 6.0, 0.5 + 2.0)
    assert turn.seconds == 13.0


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 99))
def test_every_profile_has_its_share(num_clients, shares, seed):
    mix = {Device(f"d{i}", 1.0 + i, 1.0, 1.0): share for i, share in enumerate(shares)}
    counts = Counter(device.name for device in fleet(mix=mix, num_clients=num_clients, seed=seed).kinds)
    assert counts.total() == num_clients
    for device, share in mix.items():
        assert abs(counts[device.name] - num_clients * share / sum(shares)) < 1.0 + 1e-9


def test_the_seed_says_who_has_what():
    one, same, other = (fleet(seed=seed, num_clients=40, compute_sigma=0.5) for seed in (1, 1, 2))
    names = [str(client) for client in range(40)]
    assert [one.device(c) for c in names] == [same.device(c) for c in reversed(names)][::-1]
    assert [one.device(c) for c in names] != [other.device(c) for c in names]


def test_computing_and_the_network_spread_apart():
    names = [str(client) for client in range(400)]
    narrow = fleet(mix={SLOW: 1.0}, num_clients=400, compute_sigma=0.7)
    assert {narrow.device(c).up_mbit for c in names} == {1.0}
    assert np.std([np.log(narrow.device(c).gflops) for c in names]) == pytest.approx(0.7, rel=0.15)
    wide = fleet(mix={SLOW: 1.0}, num_clients=400, network_sigma=0.7)
    assert {wide.device(c).gflops for c in names} == {1.0}
    assert all(wide.device(c).down_mbit == pytest.approx(2 * wide.device(c).up_mbit) for c in names)


def test_dropouts_come_as_often_as_asked_and_end_early():
    turns = [fleet(dropout=0.3).turn(str(c), r, 1000, 1, 1000) for c in range(10) for r in range(200)]
    gone = [turn for turn in turns if turn.dropped]
    assert len(gone) / len(turns) == pytest.approx(0.3, abs=0.03)
    assert all(turn.seconds < turn.down_s + turn.compute_s + turn.up_s for turn in gone)


@pytest.mark.parametrize(
    ("spec", "share"),
    [("always", 1.0), ("probability(p=0.7)", 0.7), ("periodic(on=0.25, period=100)", 0.25)],
)
def test_clients_are_there_as_often_as_asked(spec, share):
    there = make_availability(spec)
    seen = [there.there(str(c), float(t), str(t), 5) for c in range(50) for t in range(200)]
    assert np.mean(seen) == pytest.approx(share, abs=0.03)


def test_without_spread_all_come_and_go_together():
    there = make_availability("periodic(on=0.5, period=10, spread=0)")
    for t in range(20):
        assert len({there.there(str(c), float(t), "", 0) for c in range(9)}) == 1


def test_a_trace_says_when(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,start,end\n0,0,10\n1,5,20\n0,15,20\n")
    there = make_availability(f'trace(path="{path}")')
    at = {t: [c for c in "012" if there.there(c, t, "", 0)] for t in (0.0, 7.0, 12.0, 16.0, 27.0)}
    assert at == {0.0: ["0"], 7.0: ["0", "1"], 12.0: ["1"], 16.0: ["0", "1"], 27.0: ["0", "1"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0," + "9" * 200_000 + ",3\n", "cannot read"),
        ("x,0,5\n77,0,5\n", "names none of the clients"),
        ("", "no line"),
        ("0,5\n", "line 1"),
        ("0,9,3\n", "start < end"),
        ("0,a,b\n", "line 1"),
        ("0,-1,3\n", "start"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        fleet(availability=make_availability(f'trace(path="{path}")'))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sometimes", "always"),
        ("probability(p=2)", "p"),
        ("periodic(on=0)", "on"),
        ('trace(path="/no")', "cannot read"),
    ],
)
def test_bad_availability_is_explained(spec, words):
    with pytest.raises((ConfigError, DataError), match=words):
        make_availability(spec)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"gflops": 1.0}, "lacks up_mbit, down_mbit"),
        ({"like": "phone-5g"}, "phone-4g"),
        ({"like": "phone-4g", "speed": 3}, "speed"),
        ({"like": "phone-4g", "gflops": "fast"}, "must be a number"),
        ({"like": "phone-4g", "up_mbit": 0}, "up_mbit"),
        ({"like": "phone-4g", "latency_s": float("nan")}, "latency_s"),
        *(({"like": "phone-4g", "gflops": value}, "gflops") for value in (1e300, 1e-320, 10**400, float("inf"), -1)),
    ],
)
def test_bad_profiles_are_explained(numbers, words):
    with pytest.raises(ConfigError, match=words):
        custom_profile("mine", numbers)


def test_a_profile_of_ones_own_is_like_another():
    mine = custom_profile("mine", {"like": "phone-4g", "up_mbit": 1})
    phone = get_profile("phone-4g")
    assert (mine.up_mbit, mine.gflops, mine.memory_mb) == (1, phone.gflops, phone.memory_mb)
    assert all(device.source for device in PROFILES.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"mix": {}},
        {"mix": {SLOW: 0.0}},
        {"mix": {SLOW: 1e308}},
        {"dropout": 1.0},
        {"compute_sigma": -1.0},
        {"num_clients": 0},
    ],
)
def test_bad_fleets_are_refused(settings):
    with pytest.raises(ConfigError):
        fleet(**settings)
    with pytest.raises(ConfigError, match="no device for client"):
        fleet().device("10")

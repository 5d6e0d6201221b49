"""Warnings about conditions of the theorems: one where the condition is missed, none where it is met."""

import pytest

from fedsparse.scenario import apply_overrides, from_toml
from fedsparse.scenario.advice import advice

BASE = """
name = "plain"
rounds = 100
[data]
dataset = "digits"
num_clients = 4
[model]
name = "softmax"
[train]
local_steps = 2
lr = 0.1
[compression]
uplink = "topk(density=0.01)"
"""
SHIFT = "train.lr_schedule=inverse(a={a}, per='step')"


@pytest.mark.parametrize(
    ("missed", "met", "words"),
    [
        (["compression.error_memory=false"], [], "biased"),
        (
            ["compression.error_memory=false"],
            ["compression.error_memory=false", "compression.uplink=qsgd(levels=8)"],
            "biased",
        ),
        ([SHIFT.format(a=100)], [SHIFT.format(a=300)], "Take a >= 2"),
        (
            ["compression.uplink=hard_threshold(lam=0.1)", "train.lr_schedule=cosine"],
            ["compression.uplink=step_aware(hard_threshold(lam=0.1))", "train.lr_schedule=cosine"],
            "fixed lam",
        ),
        (
            ["compression.momentum_correction=0.9", "train.momentum=0.9"],
            ["compression.momentum_correction=0.9"],
            "twice",
        ),
    ],
)
def test_advice_is_given_where_a_condition_is_missed(missed, met, words):
    scenario = from_toml(BASE)
    (text,) = advice(apply_overrides(scenario, missed), 1000)
    assert words in text
    assert advice(apply_overrides(scenario, met), 1000) == []

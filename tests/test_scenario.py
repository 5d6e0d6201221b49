"""Scenario files: what they mean, and what a mistake in one is answered with."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsparse.errors import ConfigError
from fedsparse.scenario import (
    Scenario,
    all_keys,
    apply_overrides,
    choose_variant,
    expand,
    from_dict,
    from_toml,
    load,
    shipped,
    to_toml,
    validate_deep,
)

BASE = """
name = "small"
rounds = 3
[data]
dataset = "digits"
num_clients = 5
[model]
name = "softmax"
[train]
lr = 0.1
"""
VARIANTS = (
    BASE
    + """
[[variant]]
name = "dotted"
"compression.uplink" = "topk(k=5)"
"train.local_steps" = 7
"strategy.options.eta" = 0.5
[[variant]]
name = "nested"
[variant.compression]
uplink = "topk(k=5)"
[variant.train]
local_steps = 7
[variant.strategy.options]
eta = 0.5
"""
)


def test_dotted_and_nested_variants_mean_the_same_and_come_in_order() -> None:
    variants = expand(from_toml(VARIANTS))
    assert list(variants) == ["dotted", "nested"]
    assert variants["dotted"] == variants["nested"]
    assert (variants["dotted"].train.local_epochs, variants["dotted"].train.local_steps) == (None, 7)
    assert variants["dotted"].strategy.options == {"eta": 0.5}


def test_defaults_are_resolved_and_survive_the_file() -> None:
    scenario = from_toml(VARIANTS)
    assert scenario.train.local_epochs == 1
    assert from_toml(to_toml(scenario)) == scenario
    assert "local_epochs = 1" in to_toml(scenario)


VALUES = st.one_of(
    st.integers(-3, 10), st.floats(), st.booleans(), st.text(max_size=5), st.just([]), st.just([1, 2]), st.just({}),
    st.dictionaries(st.sampled_from(["lr", "name", "x"]), st.integers(0, 3), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("key", ["data.data_dir", "engine.federation"])
@pytest.mark.parametrize("path", ["\x00", "a\x00b", "~nobody-of-this-name/x"])
def test_what_is_no_path_is_refused(key, path):
    with pytest.raises(ConfigError, match=f"{key} = .* is no path"):
        apply_overrides(from_toml(BASE), [f"{key}={json.dumps(path)}"])


@settings(max_examples=400)
@given(key=st.sampled_from(sorted(all_keys())), value=VALUES)
def test_every_value_of_every_key_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    values: dict[str, Any] = json.loads(from_toml(BASE).model_dump_json(exclude_defaults=True))
    table, _, inner = key.rpartition(".")
    (values.setdefault(table, {}) if table else values)[inner] = value
    problem = ""
    try:
        scenario = from_dict(values)
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert key in problem
        assert repr(value) in problem
        assert "pydantic" not in problem
    else:
        assert from_toml(to_toml(scenario)) == scenario


@given(key=st.sampled_from(sorted(key for key in all_keys() if len(key) > 6)), data=st.data())
def test_a_misspelt_key_is_answered_with_the_right_one(key: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(key.rfind(".") + 2, len(key) - 1))
    wrong = key[:place] + "q" + key[place:]
    with pytest.raises(ConfigError, match="unknown key") as caught:
        apply_overrides(from_toml(BASE), [f"{wrong}=1"])
    assert f"{wrong!r}. Did you mean {key!r}?" in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("train.lr=1", 1.0),
        ("compression.uplink=topk(density=0.1)|sign", "topk(density=0.1)|sign"),
        ('compression.uplink="sign"', "sign"),
        ("compression.error_memory=false", False),
        ("seeds=[3, 4]", (3, 4)),
        ("strategy.options={eta = 0.5}", {"eta": 0.5}),
        ("train.clients_per_round=5", 5),
    ],
)
def test_set_reads_toml_and_bare_words(assignment: str, value: Any) -> None:
    scenario = apply_overrides(from_toml(BASE), [assignment])
    found: Any = scenario
    for part in assignment.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


def test_steps_take_the_place_of_epochs_only_where_they_are_set_later() -> None:
    steps = apply_overrides(from_toml(BASE), ["train.local_steps=4"])
    assert (steps.train.local_epochs, steps.train.local_steps) == (None, 4)
    with pytest.raises(ConfigError, match=r"local_epochs = 1 and train\.local_steps = 2 exclude"):
        from_toml(BASE + "local_epochs = 1\nlocal_steps = 2\n")


def test_an_override_that_a_variant_would_hide_is_refused() -> None:
    scenario = from_toml(VARIANTS)
    with pytest.raises(ConfigError, match=r"variant 'dotted' sets compression\.uplink itself"):
        apply_overrides(scenario, ["compression.uplink=none"])
    alone = apply_overrides(choose_variant(scenario, "dotted"), ["compression.uplink=none"])
    assert alone.compression.uplink == "none"
    with pytest.raises(ConfigError, match=r"unknown variant 'doted'\. Did you mean 'dotted'"):
        choose_variant(scenario, "doted")


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("name = ", ["not valid TOML"]),
        ('name = "x"\nroundz = 3\n', ["problems", "unknown key 'roundz'. Did you mean 'rounds'", "rounds is missing"]),
        (BASE + '[[variant]]\nname = "a"\n[[variant]]\nname = "a"\n', ["two variants are named 'a'"]),
        (BASE + '[[variant]]\nname = "a/b"\n', ["variant 'a/b'", "folder name"]),
        (BASE + '[[variant]]\nname = "a"\n"train.lr" = 0\n', ["variant 'a'", "train.lr = 0", "above 0"]),
        (BASE + '[[variant]]\nname = "a"\nlr = 1\n', ["variant 'a'", "'lr'. Did you mean 'train.lr'"]),
        (BASE + '[[variant]]\nname = "a"\nseed = 1\n', ["variant 'a' cannot set 'seed'"]),
        (BASE + "[[variant]]\nrounds = 1\n", ["variant[0].name is missing"]),
    ],
)
def test_mistakes_in_a_file_are_all_named_at_once(text: str, needles: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_toml(text, "my.toml")
    for needle in ["my.toml", *needles]:
        assert needle in str(caught.value)


def test_the_job_says_all_that_a_client_needs() -> None:
    from clients.job import parse_job

    scenario = apply_overrides(from_toml(BASE), ["train.clip_norm=0.5", "train.lr_schedule=cosine", "seed=9"])
    job = parse_job(scenario.job())
    assert (job.seed, job.dataset, job.num_clients, job.partition, job.model) == (9, "digits", 5, "iid", "softmax")
    assert (job.train.lr, job.train.clip_norm, job.train.lr_schedule, job.train.rounds) == (0.1, 0.5, "cosine", 3)
    assert (job.train.local_epochs, job.train.local_steps) == (1, None)


def test_the_scenario_in_the_readme_is_one() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```toml\n")[1:]]
    assert blocks
    whole = blocks[0]
    for block in blocks:  # one that begins with a table is a part, to be put into a whole scenario
        before = whole.partition("[[variant]]")[0] if block.startswith("[") else ""
        assert expand(from_toml(before + block, "README.md"))


@pytest.mark.parametrize("name", ["quickstart", "fashion-noniid"])
def test_shipped_scenarios_are_valid(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = load(name)
    assert scenario.name == name
    assert name in shipped()
    for variant in expand(scenario).values():
        try:
            validate_deep(variant)
        except Exception as error:
            if "is not on this machine" not in str(error):
                raise
            pytest.skip("the data set is not on this machine")


def test_relative_data_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scenario: Scenario = apply_overrides(from_toml(BASE), ["data.data_dir=here"])
    assert scenario.data.data_dir == str(tmp_path / "here")

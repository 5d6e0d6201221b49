"""A whole reproduction on small scale: runs, verdicts, page; and the papers' files fit their claims."""

import json
from pathlib import Path

import pytest

from fedsparse.cli import main
from fedsparse.errors import ConfigError
from fedsparse.reproduce import PAPERS, Outcome, find_paper, reproduce
from fedsparse.reproduce.page import write_page
from fedsparse.scenario import expand, load

SMALL = ["rounds=12", "evaluation.every=3", "data.num_clients=3"]


@pytest.mark.parametrize("name", list(PAPERS))
def test_every_scenario_of_a_paper_is_there_and_has_variants_and_seeds(name: str) -> None:
    for part in find_paper(name).parts:
        scenario = load(part.scenario)
        assert scenario.name == part.scenario
        assert len(scenario.seeds or ()) >= 3
        assert scenario.evaluation.objective
        assert scenario.engine.name == "inline"
        assert len(expand(scenario)) >= 2
    assert len({part.key for part in find_paper(name).parts}) == len(find_paper(name).parts)


@pytest.mark.slow
def test_a_reproduction_runs_judges_and_goes_on(tmp_path: Path) -> None:
    paper, out = find_paper("sahu2021"), tmp_path / "out"
    result = reproduce(paper, out, only=["madelon"], seeds=[0, 1], overrides=SMALL, command="how")
    assert len(result.findings) == len(paper.parts[1].claims)
    assert all(finding.verdict.outcome is not Outcome.NOT_RUN for finding in result.findings)
    page = write_page(result, out).read_text()
    for finding in result.findings:
        assert finding.verdict.outcome.value in page
    assert page.count('class="plot low"') == sum(len(claim.plots) for claim in paper.parts[1].claims)
    written = json.loads((out / "reproduction.json").read_text())
    assert written["parts"][0]["part"] == "madelon"
    assert [claim["verdict"] for claim in written["parts"][0]["claims"]] == [
        finding.verdict.outcome.value for finding in result.findings
    ]
    before = {path: path.stat().st_mtime_ns for path in out.glob("madelon/*/seed-*/summary.json")}
    assert len(before) == 8
    again = reproduce(paper, out, only=["madelon"], seeds=[0, 1], overrides=SMALL, command="how")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [finding.verdict.ours for finding in again.findings] == [finding.verdict.ours for finding in result.findings]


def test_foreign_folders_stay_as_they_are(tmp_path: Path) -> None:
    paper = find_paper("sahu2021")
    for name, content in {
        "report.html": "mine",
        "reproduction.json": '{"paper": "basu2019"}',
        "notes.txt": "mine",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ConfigError, match="choose another"):
            reproduce(paper, folder, only=["madelon"], seeds=[0, 1], overrides=SMALL)
        assert [path.read_text() for path in folder.iterdir()] == [content]


@pytest.mark.slow
def test_parts_run_one_by_one_come_together_and_changes_are_named(tmp_path: Path) -> None:
    paper, out = find_paper("sahu2021"), tmp_path / "out"
    for part in ("madelon", "madelon-small-steps"):
        result = reproduce(paper, out, only=[part], seeds=[0, 1], overrides=SMALL, command="how")
    assert set(result.comparisons) == {"madelon", "madelon-small-steps"}
    assert "rounds=12" in result.changed
    assert "rounds=12" in write_page(result, out).read_text()


def test_missing_data_is_a_verdict_and_not_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = reproduce(find_paper("stich2018"), tmp_path / "out", only=["rcv1"], seeds=[0])
    assert {finding.verdict.outcome for finding in result.findings} == {Outcome.NOT_RUN}
    assert "npm pack" in result.findings[0].verdict.reason
    write_page(result, tmp_path / "out")


def test_wrong_names_say_the_nearest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'sahu2021'"):
        find_paper("sahu2012")
    with pytest.raises(ConfigError, match="Did you mean 'madelon'"):
        reproduce(find_paper("sahu2021"), "out", only=["madelo"])
    monkeypatch.setattr("sys.argv", ["fedsparse", "reproduce"])
    assert main() == 0
    assert "basu2019" in capsys.readouterr().out

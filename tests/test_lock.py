"""Two processes and one output folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsparse.errors import ConfigError
from fedsparse.run import run_scenario
from fedsparse.run.lock import LOCK, exclusive, unconducted
from fedsparse.scenario import apply_overrides, load


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    code = (
        "import sys\nfrom fedsparse.run.lock import exclusive\n"
        f"with exclusive({str(folder)!r}):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another fedsparse is writing into"), exclusive(folder):
        pass
    holder.kill()
    holder.communicate()
    assert (folder / LOCK).exists(), "a killed process leaves the file, which holds nobody off"
    with exclusive(folder):
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path: Path) -> None:
    with exclusive(tmp_path / "a/b"):
        assert (tmp_path / "a/b").is_dir()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write into"), exclusive(tmp_path / "file/b"):
        pass


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_a_simulation_does_not_write_beside_a_deployed_run_that_goes_on(tmp_path: Path, how: str) -> None:
    scenario = apply_overrides(load("quickstart"), ["engine.name=inline", "rounds=1"])
    run_scenario(scenario, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with unconducted(tmp_path / "out"), pytest.raises(ConfigError, match=r"ServerApp of an earlier run.*deploy stop"):
        run_scenario(scenario, tmp_path / "out", **{how: True})
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before

"""The command line: one clear message for what the user got wrong, and exit codes that tell the truth."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedsparse import cli

TINY = """
name = "tiny"
rounds = 2
[data]
dataset = "digits"
num_clients = 5
partition = "dirichlet(alpha=0.5)"
[model]
name = "softmax"
[train]
lr = 0.1
[engine]
name = "inline"
[[variant]]
name = "dense"
[[variant]]
name = "sparse"
"compression.error_memory" = true
"compression.uplink" = "topk(density=0.1)"
"""
MODULES = {
    "broken_syntax.py": "def load(:\n",
    "raises_on_import.py": "raise RuntimeError('no licence found')\n",
    "mine.py": (
        "import numpy, torch\n"
        "number = 3\n"
        "def raises(*args): raise ValueError('out of cheese')\n"
        "def nothing(*args): return None\n"
        "def wide(shape, classes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes + 1))\n"
        "def narrow(shape, classes): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(63, classes))\n"
        "def flat(): return (numpy.zeros((9, 4)), numpy.arange(9) % 2, numpy.zeros((3, 4)), numpy.zeros(3, int))\n"
        "def holes(): return (numpy.full((9, 4), numpy.nan), numpy.arange(9) % 2, numpy.zeros((3, 4)), [0, 1, 0])\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("FEDSPARSE_DATA_DIR", "")
    (tmp_path / "tiny.toml").write_text(TINY)
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedsparse", *arguments])
    return cli.main()


def sets(*assignments: str) -> list[str]:
    return ["run", "tiny.toml", *(part for assignment in assignments for part in ("--set", assignment))]


EXPLODE = ("train.lr=1e30", "train.local_steps=5", "model.name=mlp")
BAD: list[tuple[list[str], list[str]]] = [
    (["run", "quikstart"], ["unknown scenario 'quikstart'", "Did you mean 'quickstart'?", "path"]),
    (["run", "no/such.toml"], ["no scenario file 'no/such.toml'"]),
    (["run", "tiny.tml"], ["unknown scenario 'tiny.tml'"]),
    (["run", "nowhere.toml"], ["no scenario file 'nowhere.toml'", "tiny.toml"]),
    (["run", "tiny.toml", "--variant", "spars"], ["unknown variant 'spars'", "Did you mean 'sparse'?"]),
    (["run", "tiny.toml", "--engine", "rays"], ["engine.name = 'rays'", "Did you mean 'ray'?", "inline"]),
    (["run", "tiny.toml", "--engine", "deployment"], ["engine.name = 'deployment'", "--federation DIR", "deploy init"]),
    (["run", "tiny.toml", "--federation", "."], ["engine.federation", "--engine deployment"]),
    (["run", "tiny.toml", "--engine", "deployment", "--federation", "."], ["holds no federation", "deploy init"]),
    (["deploy", "server", "gone"], ["gone holds no federation", "deploy init gone"]),
    (["deploy", "node", "."], ["holds no node.toml"]),
    (["deploy", "init", "fed", "--host", "a b"], ["--host 'a b'", "fl.example.org"]),
    (["deploy", "init", "fed", "--host", "x", "--nodes", "0"], ["--nodes 0", "at least 1"]),
    (["deploy", "init", "fed", "--host", "x", "--port", "1", "--inner-port", "1"], ["must differ"]),
    (["deploy", "status", "."], ["holds no federation"]),
    (["doctor", "gone"], ["gone is no folder"]),
    (["compare", "tiny.toml", "--seeds", "0,x"], ["--seeds '0,x'", "0,1,2"]),
    (["compare", "tiny.toml", "--seeds", "1,1"], ["--seeds '1,1'", "twice"]),
    (["compare", "tiny.toml", "--set", "compression.uplink=sign"], ["variant 'sparse' sets compression.uplink"]),
    (["list", "modles"], ["unknown list 'modles'", "Did you mean 'models'?"]),
    (["report", "."], [". holds no run and no comparison"]),
    (["report", "nowhere"], ["nowhere holds no run"]),
    (sets("train.lr"), ["--set 'train.lr' must look like key=value"]),
    (sets("lr=1"), ["unknown key 'lr'", "Did you mean 'train.lr'?"]),
    (sets("rounds=0"), ["rounds = 0", "at least 1"]),
    (sets("train.lr=-0.5"), ["train.lr = -0.5", "above 0"]),
    (sets("train.batch_size=2.5"), ["train.batch_size = 2.5", "whole number"]),
    (sets("train.clients_per_round=6"), ["train.clients_per_round = 6", "data.num_clients = 5"]),
    (sets("train.lr_schedule=cosin"), ["train.lr_schedule = 'cosin'", "Did you mean 'cosine'?"]),
    (sets("train.proximal_mu=1", "strategy.name=FedProx"), ["train.proximal_mu = 1", "strategy.options.proximal_mu"]),
    (sets("data.partition=dirichlet(alpha=0)"), ["data.partition = 'dirichlet(alpha=0)'", "alpha must be"]),
    (sets("data.partition=dirichlet(beta=1)"), ["'beta'", "Allowed: alpha"]),
    (sets("data.partition=shard"), ["unknown partition 'shard'", "Did you mean 'shards'?"]),
    (sets("data.partition=natural"), ["data.partition = 'natural'", "names no natural clients"]),
    (sets("data.dataset=fasion-mnist"), ["data.dataset = 'fasion-mnist'", "Did you mean 'fashion-mnist'?"]),
    (sets("data.dataset=mnist", "data.data_dir=empty"), ["data.data_dir = ", "empty", "no such folder"]),
    (sets("data.dataset=mnist"), ["data.dataset = 'mnist'", "not on this machine", "FEDSPARSE_DATA_DIR"]),
    (sets("model.name=mpl"), ["model.name = 'mpl'", "Did you mean 'mlp'?"]),
    (sets("model.name=mlp(hiden=3)"), ["'hiden'", "Did you mean 'hidden'?"]),
    (sets("strategy.name=FedAvgg"), ["strategy.name = 'FedAvgg'", "Did you mean 'FedAvg'?"]),
    (sets("strategy.name=FedXgbBagging"), ["strategy.name = 'FedXgbBagging'", "Allowed: "]),
    (sets("strategy.options.etta=1", "strategy.name=FedAdam"), ["strategy.options", "'etta'", "Did you mean 'eta'?"]),
    (sets("strategy.options.eta=big", "strategy.name=FedAdam"), ["strategy.options.eta = 'big'", "float"]),
    (sets("strategy.name=QFedAvg"), ["QFedAvg needs strategy.options.client_learning_rate"]),
    (sets("strategy.options.min_train_nodes=9"), ["min_train_nodes = 9", "num_clients = 5"]),
    (sets("compression.uplink=top_k(k=1)"), ["unknown operator or policy 'top_k'", "Did you mean 'topk'?"]),
    (sets("compression.uplink=topk(density=2)"), ["compression.uplink = 'topk(density=2)'", "density must be"]),
    (sets("compression.uplink=topk(density=0.1"), ["cannot read spec 'topk(density=0.1'"]),
    (sets("compression.error_memory=yes"), ["compression.error_memory = 'yes'", "true or false"]),
    (sets("engine.num_cpus=999", "engine.name=ray"), ["engine.num_cpus = 999", "this machine has"]),
    (sets("engine.max_workers=500", "data.num_clients=900", "engine.name=ray"), ["engine.max_workers = 500", "CPUs"]),
    (sets("engine.num_gpus=0.3", "engine.name=ray"), ["engine.num_gpus = 0.3", "GPUs"]),
    (sets("engine.num_cpus=0.5", "engine.name=flower"), ["engine.num_cpus = 0.5", "whole CPUs"]),
    (sets("engine.address=auto"), ["engine.address = 'auto'", "engine 'ray' only"]),
    (sets("data.dataset=nowhere:load"), ["data.dataset = 'nowhere:load'", "No module named 'nowhere'"]),
    (sets("data.dataset=broken_syntax:load"), ["broken_syntax", "SyntaxError"]),
    (sets("model.name=raises_on_import:f"), ["raises_on_import", "RuntimeError: no licence found"]),
    (sets("model.name=mine:number"), ["'mine:number' is a int, not a callable"]),
    (sets("model.name=mine:missing"), ["mine", "has no 'missing'"]),
    (sets("model.name=mine:raises"), ["'mine:raises' raised ValueError: out of cheese"]),
    (sets("data.dataset=mine:raises"), ["'mine:raises' raised ValueError: out of cheese"]),
    (sets("model.name=mine:nothing"), ["must return a torch.nn.Module, got NoneType"]),
    (sets("data.dataset=mine:nothing"), ["must return a Dataset or (x_train", "NoneType"]),
    (sets("model.name=mine:wide"), ["model.name = 'mine:wide'", "must give 10 numbers", "shape (2, 11)"]),
    (sets("model.name=mine:narrow"), ["model.name = 'mine:narrow'", "does not take the data's examples"]),
    (sets("data.dataset=mine:flat", "model.name=cnn"), ["model.name = 'cnn'", "needs images"]),
    (sets("data.dataset=mine:holes"), ["data.dataset = 'mine:holes'", "NaN"]),
    ([*sets(), "--out", "tiny.toml"], ["the output tiny.toml is a file", "--out"]),
    ([*sets(), "--out", "tiny.toml/below"], ["cannot write the output folder tiny.toml/below", "tiny.toml"]),
    ([*sets(), "--out", "."], ["the output folder . is not empty and holds no run"]),
    ([*sets(), "--out", "/proc/fedsparse"], ["cannot write the output folder /proc/fedsparse"]),
    (["run", "tiny.toml", "--colour"], ["No such option"]),
    (["rum", "tiny.toml"], ["No such command 'rum'"]),
    (["run"], ["Missing argument 'SCENARIO'"]),
]


@pytest.mark.parametrize(("arguments", "needles"), BAD, ids=[" ".join(arguments)[:70] for arguments, _ in BAD])
def test_bad_input(
    arguments: list[str],
    needles: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(folder.rglob("*"))
    assert call(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    for needle in needles:
        assert needle in said.err
    assert "Traceback" not in said.err + said.out
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before


def test_a_scenario_that_runs_says_where_everything_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", "tiny.toml", "--set", "train.lr=0.5") == 0
    said = capsys.readouterr().out
    assert "base settings; variants: dense, sparse" in said
    assert "results  runs/tiny" in said
    assert Path("runs/tiny/report.html").is_file()
    summary = json.loads(Path("runs/tiny/summary.json").read_text())
    assert f"{100 * summary['final_accuracy']:.1f}" in said
    assert summary["command"] == "fedsparse run tiny.toml --set train.lr=0.5"
    assert call(monkeypatch, "run", "tiny.toml") == 2
    assert "Say --overwrite" in capsys.readouterr().err
    assert call(monkeypatch, "run", "tiny.toml", "--overwrite", "--variant", "sparse") == 0
    assert Path("runs/tiny-sparse/model.safetensors").is_file()


def test_compare_prints_the_table_and_can_rebuild_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "compare", "tiny.toml", "--seeds", "1,2", "--set", "rounds=1") == 0
    said = capsys.readouterr().out
    assert "2 variants x 2 seeds = 4 runs" in said
    assert "difference to dense" in said
    assert "± is the 95 % confidence interval of the mean over 2 seeds" in said
    page = Path("runs/tiny/report.html")
    before = page.read_text()
    page.unlink()
    assert call(monkeypatch, "report", "runs/tiny") == 0
    assert page.read_text() == before


def test_a_run_that_fails_exits_with_1_and_a_bug_keeps_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *sets(*EXPLODE)) == 1
    said = capsys.readouterr().err
    assert "all 5 clients failed" in said
    assert "diverged" in said
    # A linear model bears any step size with a finite loss; the network of EXPLODE does not.
    overrides = [word for text in EXPLODE for word in ("--set", text)]
    assert call(monkeypatch, "compare", "tiny.toml", "--out", "cmp", *overrides) == 1

    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("fedsparse.run.run_scenario", bug)
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, *sets(), "--out", "again")


@pytest.mark.parametrize("what", ["scenarios", "operators", "datasets", "partitions", "models", "strategies", "keys"])
def test_list(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedsparse.listing import table

    assert call(monkeypatch, "list", what) == 0
    said = capsys.readouterr().out
    columns, lines = table(what)
    assert lines
    for line in lines:
        assert str(line[0]) in said
        assert len(line) == len(columns)


def test_the_program_itself_answers_without_loading_anything_heavy(folder: Path) -> None:
    def program(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "fedsparse.cli", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stdout + ended.stderr

    code, text = program("--version")
    assert (code, text.split()[0]) == (0, "fedsparse")
    code, text = program("run", "tiny.toml", "--set", "train.lrr=1")
    assert code == 2
    assert text.startswith("error: --set: unknown key 'train.lrr'. Did you mean 'train.lr'?")
    lean = "import sys; sys.argv = ['fedsparse', 'run', 'tiny.toml', '--set', 'rounds=0']; import fedsparse.cli as c; "
    lean += "assert c.main() == 2; heavy = {'torch', 'ray', 'flwr', 'sklearn', 'plotly'} & set(sys.modules); "
    ended = subprocess.run([sys.executable, "-c", lean + "assert not heavy, heavy"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

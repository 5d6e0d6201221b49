"""What lies in deploy/: units, images, a compose file, a proxy config."""

import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from fleet import Fleet, free_ports

from fedsparse.deploy.checks import connection, first_problem
from fedsparse.deploy.federation import Federation, Node
from fedsparse.engine.flower import CLIENT_APP, SERVER_APP
from fedsparse.scenario import from_toml

DEPLOY = Path(__file__).parents[2] / "deploy"
TOML = """
name = "proxied"
rounds = 2
[data]
dataset = "digits"
num_clients = 1
[model]
name = "softmax"
[train]
lr = 0.1
local_steps = 3
[compression]
uplink = "topk(density=0.1)"
"""


def test_the_compose_file_opens_one_port_and_mounts_no_key_where_it_is_not_needed():
    services = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert ports == {"server": ["9092:9092"]}, "the inner port stays inside"
    assert services["server"]["volumes"] == [
        "../../fleet/federation.toml:/fleet/federation.toml:ro",
        "../../fleet/ca.crt:/fleet/ca.crt:ro",
        "../../fleet/server:/fleet/server",
        "../../runs:/runs",
    ]
    assert [services[name]["volumes"] for name in ("node-0", "node-1")] == [
        ["../../fleet/node-0:/node"],
        ["../../fleet/node-1:/node"],
    ]
    for name, service in services.items():
        assert service["restart"] == "unless-stopped"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["init"] is True
        assert service["mem_limit"]
        assert service["build"]["target"] == name.partition("-")[0]
    assert services["server"]["healthcheck"]["test"][0] == "CMD"


def test_the_image_pins_its_base_runs_as_a_user_and_holds_no_keys():
    text = (DEPLOY / "docker/Dockerfile").read_text()
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    bases = [words[1] for words in lines if words[0] == "FROM"]
    assert bases == ["python:3.11-slim-bookworm", "node"]
    users = [words[1] for words in lines if words[0] == "USER"]
    assert users[-1] == "fedsparse"
    assert not any(words[0] == "ADD" for words in lines)
    commands = " ".join(" ".join(words) for words in lines)
    assert not re.search(r"curl|wget|https?://(?!download\.pytorch\.org/whl/cpu)", commands)
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.findall(r"pip install [^&;]*", line):
            assert "-c constraints.txt" in command or "-c /src/constraints.txt" in command, command
    copied = {name for words in lines if words[0] == "COPY" for name in words[1:-1]}
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert not re.search(r"\.key|fleet/", " ".join(copied))
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert allowed == copied, "the builder sees what the image is made of, and nothing else"


@pytest.mark.slow
@pytest.mark.xdist_group("gateway")
def test_the_health_check_tells_a_server_from_none_and_the_mounted_files_suffice(tmp_path):
    """The server as the compose file has it: federation.toml, ca.crt and server/, no other key."""
    check = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]["server"]["healthcheck"]["test"]
    fleet = Fleet(tmp_path / "fleet", 1)
    whole = fleet.federation.path
    few = tmp_path / "mounted"
    shutil.copytree(whole / "server", few / "server")
    for name in ("federation.toml", "ca.crt"):
        shutil.copyfile(whole / name, few / name)
    code = check[3].replace("/fleet/", f"{few}/").replace(":9092", f":{fleet.federation.file.port}")
    health = [sys.executable, *check[2:3], code]
    try:
        fleet.federation = Federation.open(few)
        assert subprocess.run(health, capture_output=True, check=False).returncode != 0
        fleet.start_server()
        assert subprocess.run(health, capture_output=True, text=True, check=False).stderr == ""
        assert first_problem(Node.open(whole / "node-0")) is None
    finally:
        fleet.stop()


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0,
    reason="needs a Docker engine",
)
@pytest.mark.timeout(900)
def test_the_image_is_built():
    command = ["docker", "build", "-f", str(DEPLOY / "docker/Dockerfile"), "--target", "node", str(DEPLOY.parent)]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("name", ["server", "node"])
def test_the_units_are_what_systemd_expects(name, tmp_path):
    path = DEPLOY / f"systemd/fedsparse-{name}.service"
    text = path.read_text()
    assert "Restart=always" in text
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "KillMode=mixed", "User=fedsparse"):
        assert line in text.splitlines()
    assert re.search(r"^MemoryMax=", text, re.MULTILINE)
    assert f"fedsparse deploy {name} /var/lib/fedsparse/" in text
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / path.name
    unit.write_text(text.replace("/opt/fedsparse/bin/fedsparse", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    mine = [line for line in done.stderr.splitlines() if path.name in line]
    assert mine == []


@pytest.mark.slow
@pytest.mark.xdist_group("gateway")
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx")
def test_nginx_lets_nodes_through_and_nobody_else(tmp_path):
    fleet = Fleet(tmp_path / "fleet", 1)
    (port,) = free_ports(1)
    text = (DEPLOY / "nginx.conf").read_text()
    text = text.replace("/var/lib/fedsparse/fleet", str(fleet.federation.path))
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace(":9092", f":{fleet.federation.file.port}")
    temporary = "".join(
        f"{kind}_temp_path {tmp_path};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("http {", "http {\n" + temporary)
    config = tmp_path / "nginx.conf"
    config.write_text(f"daemon off;\npid {tmp_path}/nginx.pid;\nerror_log {tmp_path}/error.log;\n" + text)
    nginx = None
    try:
        fleet.start_server()
        nginx = subprocess.Popen(["nginx", "-c", str(config), "-p", str(tmp_path)])
        fleet.wait(lambda: _status(fleet, port, "/fedsparse/hello") == 200, 30, "nginx")
        for path, status in (
            ("/v1/control/start-run", 404),
            ("/v1/runtime/acquire-task", 404),
            ("/docs", 404),
            ("/v1/fleet/pull-messages", 403),
        ):
            assert _status(fleet, port, path) == status, path
        for path in (
            "/v1/fleet/pull-messages/x",
            "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run",
            "/v1/control/start-run",
            "/",
        ):
            assert _status(fleet, port, path, b"") == 404, path
        assert _status(fleet, port, "/v1/fleet/pull-messages", b"") == 401
        folder = fleet.federation.node_folder(0)
        text = (folder / "node.toml").read_text()
        (folder / "node.toml").write_text(text.replace(f":{fleet.federation.file.port}", f":{port}"))
        assert [finding.level for finding in connection(Node.open(folder))] == ["ok"] * 6
        fleet.start_node(0)
        lines = fleet.run(from_toml(TOML), tmp_path / "run", apps=(SERVER_APP, CLIENT_APP))
        assert [line["accepted"] for line in lines] == [["0"], ["0"]]
    finally:
        if nginx is not None:
            nginx.terminate()
            nginx.wait(10)
        fleet.stop()


def _status(fleet: Fleet, port: int, path: str, data: bytes | None = None) -> int:
    context = ssl.create_default_context(cafile=str(fleet.federation.ca))
    try:
        return urllib.request.urlopen(f"https://127.0.0.1:{port}{path}", data, timeout=5, context=context).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

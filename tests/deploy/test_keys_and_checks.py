"""Folders, keys, certificates, and what `doctor` says of a way that is barred."""

import contextlib
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from fleet import Fleet, free_ports
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import sign_message

from fedsparse.deploy import create, keys
from fedsparse.deploy.checks import connection, first_problem
from fedsparse.deploy.doctor import examine
from fedsparse.deploy.federation import Federation, Node
from fedsparse.deploy.gateway import KEY_HEADER, LOGGED_A_MINUTE, is_own
from fedsparse.deploy.node import data_source, forget_old_runs, node_config
from fedsparse.deploy.supervise import Child
from fedsparse.errors import ConfigError
from fedsparse.run import RunFolder
from fedsparse.scenario import load


def signed(key: Path) -> dict[str, str]:
    """What a node's requests carry."""
    timestamp = now().isoformat()
    private = load_ssh_private_key(key.read_bytes(), None)
    signature = sign_message(private, timestamp.encode())
    encoded = (b64encode(text).decode() for text in (keys.public_key(key), signature))
    return {KEY_HEADER: next(encoded), FLEET_HTTP_SIGNATURE_HEADER: next(encoded), TIMESTAMP_HEADER: timestamp}


def made(path: Path, nodes: int = 2, host: str = "127.0.0.1") -> Federation:
    port, inner = free_ports(2)
    return create.create(path, host, nodes, port, inner)


def test_keys_are_secret_and_nothing_is_overwritten(tmp_path):
    federation = made(tmp_path / "fed")
    secrets = [federation.ca_key, federation.key, *(federation.node_folder(n) / "node.key" for n in (0, 1))]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600] * 4
    before = {path: path.read_bytes() for path in federation.path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a federation.*deploy add"):
        made(tmp_path / "fed")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not an empty folder"):
        made(tmp_path / "full")
    assert before == {path: path.read_bytes() for path in federation.path.rglob("*") if path.is_file()}


def test_nodes_are_added_with_new_numbers_and_old_keys_stay(tmp_path):
    federation = made(tmp_path / "fed")
    key = (federation.node_folder(0) / "node.key").read_bytes()
    more = create.add(federation, 3)
    assert list(more.file.nodes) == ["0", "1", "2", "3", "4"]
    assert len(more.public_keys()) == 5
    assert (federation.node_folder(0) / "node.key").read_bytes() == key
    assert Node.open(federation.node_folder(4)).file.num_nodes == 5
    assert Federation.open(federation.path).file == more.file


def test_a_removed_nodes_key_and_number_are_gone(tmp_path):
    federation = made(tmp_path / "fed", 3)
    after = create.add(create.remove(federation, 2), 1)
    assert list(after.file.nodes) == ["0", "1", "3"]
    assert keys.public_key(after.node_folder(2) / "node.key") not in after.public_keys()
    with pytest.raises(ConfigError, match="there is no node 2; the nodes are: 0, 1, 3"):
        create.remove(after, 2)


@pytest.mark.parametrize("host", ["", "a b", "http://x", "host:9092", "-x", "a..b", "x" * 300, "ü.example"])
def test_impossible_hosts_are_refused(tmp_path, host):
    with pytest.raises(ConfigError, match="--host"):
        create.create(tmp_path / "fed", host, 1, 9092, 9093)
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.1", "::1", "localhost"])
def test_the_servers_certificate_names_the_host(tmp_path, host):
    from cryptography import x509

    federation = made(tmp_path / "fed", 1, host)
    found = x509.load_pem_x509_certificate(federation.certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert keys.general_name(host) in list(names)
    node = Node.open(federation.node_folder(0))
    assert (node.host, node.port) == (host, federation.file.port)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("node = 0", "node = -1", "whole|number"),
        ("threads = 1", "threads = 0", "at least 1"),
        ("threads = 1", "thread = 1", "unknown key 'limits.thread'"),
        ("format = 1", "format = 9", "format 9"),
        ("[data]", "[data", "not valid TOML"),
        ("server = ", "# server = ", "server is missing"),
    ],
)
def test_a_broken_node_file_says_what_is_wrong(tmp_path, old, new, words):
    folder = made(tmp_path / "fed").node_folder(0)
    text = (folder / "node.toml").read_text()
    assert old in text
    (folder / "node.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words):
        Node.open(folder)


def test_the_folders_are_told_apart(tmp_path):
    federation = made(tmp_path / "fed")
    with pytest.raises(ConfigError, match="the server's folder"):
        Node.open(federation.path)
    with pytest.raises(ConfigError, match="a node's folder"):
        Federation.open(federation.node_folder(0))
    with pytest.raises(ConfigError, match="deploy init"):
        Federation.open(tmp_path)
    (federation.node_folder(0) / "node.key").unlink()
    with pytest.raises(ConfigError, match=r"node.key is missing"):
        Node.open(federation.node_folder(0))


def test_old_error_memories_go_and_the_latest_stay(tmp_path):
    node = Node.open(made(tmp_path / "fed").node_folder(0))
    for number in range(8):
        folder = node.memory / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "0.memory").write_bytes(b"x")
        os.utime(folder / "0.memory", (number, number))
    forget_old_runs(node)
    assert sorted(path.name for path in node.memory.iterdir()) == [f"run-{n}" for n in range(3, 8)]


def test_what_flower_is_told_of_a_node(tmp_path):
    from flwr.common.config import parse_config_args

    node = Node.open(made(tmp_path / "a fed").node_folder(1))
    told = parse_config_args([node_config(node)])
    assert told["partition-id"] == 1
    assert told["durable"] is True
    assert told["memory-dir"] == str(node.memory)


@pytest.mark.parametrize(
    ("source", "words"), [("a\0b", "ValueError: embedded null byte"), ("~nobody-here/x", "RuntimeError: Could not")]
)
def test_what_can_be_no_path_is_refused(tmp_path, source, words):
    made_node = Node.open(made(tmp_path / "fed", 1).node_folder(0))
    table = made_node.file.data.model_copy(update={"source": source})
    node = Node(made_node.path, made_node.file.model_copy(update={"data": table}))
    with pytest.raises(ConfigError, match=f"can be no path: {words}"):
        data_source(node)


def test_nobody_there_and_no_such_name(tmp_path):
    node = Node.open(made(tmp_path / "fed").node_folder(0))
    finding = first_problem(node)
    assert finding is not None
    assert "cannot be reached" in finding.what
    assert "deploy server" in finding.todo
    other = Node.open(made(tmp_path / "other", 1, "no-such-host.invalid").node_folder(0))
    finding = first_problem(other)
    assert finding is not None
    assert finding.what.startswith("DNS")


@pytest.mark.parametrize(
    ("days", "host", "words"),
    [
        (0, "127.0.0.1", "expired, by this device's clock"),
        (9, "10.9.9.9", "for another name than localhost.localdomain"),
    ],
)
def test_certificates_that_do_not_hold_are_explained(tmp_path, monkeypatch, days, host, words):
    """A real TLS server with such a certificate."""
    federation = made(tmp_path / "fed", 1, host)
    create.renew(federation, days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(federation.certificate, federation.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with contextlib.suppress(ssl.SSLError):
                        context.wrap_socket(listener.accept()[0], server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        folder = federation.node_folder(0)
        text = (folder / "node.toml").read_text()
        name = "127.0.0.1" if days == 0 else "localhost.localdomain"
        monkeypatch.setattr(socket, "getaddrinfo", _to_loopback(socket.getaddrinfo))
        port = listener.getsockname()[1]
        (folder / "node.toml").write_text(text.replace(f"{host}:{federation.file.port}", f"{name}:{port}"))
        finding = first_problem(Node.open(folder))
    assert finding is not None
    assert words in finding.what
    assert "deploy renew" in finding.todo


def _to_loopback(real):
    return lambda host, *rest, **more: real("127.0.0.1" if host == "localhost.localdomain" else host, *rest, **more)


def test_doctor_finds_open_keys_and_expired_certificates(tmp_path):
    federation = made(tmp_path / "fed")
    federation.key.chmod(0o644)
    lines = {(finding.level, finding.what) for finding in examine(federation.path)}
    assert any(level == "fix" and "can be read by others" in what for level, what in lines)
    create.renew(federation, days=0)
    assert any(f.level == "fix" and "certificate" in f.what and "renew" in f.todo for f in examine(federation.path))
    assert any(f.level == "fix" and "memory" in f.what for f in examine(None, parameters=10**12))


def test_a_run_folder_that_the_server_cannot_write_ends_the_run_before_it_begins(tmp_path):
    """In a container, or with a /tmp of its own, the server would train for hours into a folder that nobody sees."""
    from fedsparse.flower_app import _check_reached, _folder

    chosen = load("quickstart")
    with pytest.raises(ConfigError, match=r"cannot write into .*nowhere.*--out"):
        _check_reached(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    prepared = RunFolder.create(tmp_path / "prepared", chosen)
    _check_reached(prepared.path)
    assert _folder(prepared.path, chosen).path == prepared.path


def test_the_authoritys_key_may_be_kept_elsewhere(tmp_path):
    federation = made(tmp_path / "fed")
    federation.ca_key.unlink()
    findings = list(examine(federation.path))
    assert not [finding for finding in findings if finding.level == "fix"]
    assert any("only `fedsparse deploy renew` needs it" in finding.what for finding in findings)
    with pytest.raises(ConfigError, match=r"ca.key is missing"):
        create.renew(federation)
    assert len(create.add(federation, 1).file.nodes) == 3


def test_no_proxy_stands_before_this_machines_own_servers(tmp_path, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "intranet")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    Federation.open(made(tmp_path / "fed").path)
    assert all(urllib.request.proxy_bypass(host) for host in ("127.0.0.1", "localhost", "intranet"))
    assert not urllib.request.proxy_bypass("fl.example.org")


def test_a_disk_that_was_full_leaves_nobody_deaf(tmp_path):
    """The reader of a child's output goes on whatever its listener meets."""
    heard = []

    def listen(line: str) -> None:
        heard.append(line)
        raise OSError(28, "No space left on device")

    child = Child("child", [sys.executable, "-uc", "for i in range(3): print(i)"], dict(os.environ), tmp_path / "log")
    child.on_line = listen
    child.start()
    child.process.wait(30)
    deadline = time.monotonic() + 10
    while len(heard) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    for handler in child._log.handlers:
        handler.close()
    assert heard == ["0", "1", "2"]


@pytest.mark.parametrize("server", ["fl..example.org:9092", f"{'a' * 70}.org:9092", "fl\0.org:9092", "fl.org:0", "fl"])
def test_a_server_that_no_resolver_takes_is_refused(tmp_path, server):
    folder = made(tmp_path / "fed").node_folder(0)
    text = (folder / "node.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("server"))
    (folder / "node.toml").write_text(text.replace(line, f"server = {json.dumps(server)}"))
    with pytest.raises(ConfigError, match="must be host:port"):
        Node.open(folder)


@pytest.mark.parametrize("change", [{"nodes": {"abc": "ssh"}}, {"revoked": ["x"]}, {"nodes": {"0": "ssh-rsa AAAA"}}])
def test_damaged_entries_of_the_federation_are_named(tmp_path, change):
    federation = made(tmp_path / "fed")
    raw = federation.file.model_dump() | change
    (federation.path / "federation.toml").write_text(tomli_w.dumps(raw))
    with pytest.raises(ConfigError, match=r"federation\.toml"):
        Federation.open(federation.path).public_keys()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server alone."""
    fleet = Fleet(tmp_path_factory.mktemp("served"), 2)
    fleet.start_server()
    yield fleet
    fleet.stop()


@pytest.mark.slow
@pytest.mark.xdist_group("gateway")
class TestGateway:
    """What is open to the network, and what is not."""

    def test_a_registered_node_finds_nothing_to_complain_of(self, server):
        node = Node.open(server.federation.node_folder(1))
        assert [finding.level for finding in connection(node)] == ["ok"] * 6

    @pytest.mark.parametrize(
        "path",
        ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/health"],
    )
    def test_nobody_submits_code_through_the_port_for_nodes(self, server, path):
        assert self.post(server, path) == 404
        assert self.post(server, path, direct=True) != 404, "the SuperLink itself knows it: the gateway hides it"

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/control/list-runs",
            "/v1/fleet/../control/list-runs",
            "/v1/fleet/%2e%2e/control/list-runs",
            "/v1/fleet/..%2fcontrol/list-runs",
            "/v1/fleet/x/../../control/list-runs",
            "/v1/fleet//../../control/list-runs",
            "/v1/fleet/pull-messages/../../runtime/acquire-task",
            "/v1/fleet/../../docs",
        ],
    )
    def test_a_registered_key_opens_nothing_but_the_nodes_own_paths(self, server, path):
        """The control API has no login: whoever gets there runs code on the server."""
        headers = {**self.key(server), "content-type": "application/protobuf"}
        assert self.post(server, path, headers=headers) == 404
        assert self.post(server, "/v1/control/list-runs", headers=headers, direct=True) == 200, "it would have answered"

    def test_a_public_key_is_not_enough(self, server):
        """It is no secret: without a signature nobody gets a node's messages, or is counted as the node."""
        headers = self.key(server)
        other = signed(server.federation.node_folder(0) / "node.key")
        old = {**headers, TIMESTAMP_HEADER: "2020-01-01T00:00:00+00:00"}
        forged = {**headers, FLEET_HTTP_SIGNATURE_HEADER: other[FLEET_HTTP_SIGNATURE_HEADER]}
        for wrong in ({KEY_HEADER: headers[KEY_HEADER]}, old, forged, {**headers, TIMESTAMP_HEADER: "x"}):
            assert self.post(server, "/v1/fleet/pull-messages", headers=wrong) == 401
        self.logged(server, "it is not signed with the key of node 1")
        assert self.post(server, "/v1/fleet/pull-messages", b"\xff", headers) not in (401, 403), "the SuperLink judges"

    def test_nobody_answers_in_the_name_of_another_node(self, server):
        pushed = PushMessagesRequest()
        pushed.node.node_id = 5
        pushed.messages_list.add().metadata.src_node_id = 5
        assert is_own(pushed.SerializeToString())
        pushed.messages_list.add().metadata.src_node_id = 6
        assert self.post(server, "/v1/fleet/push-messages", pushed.SerializeToString(), self.key(server)) == 403
        self.logged(server, "it is in the name of another node")

    def test_what_a_stranger_asks_for_cannot_steer_the_terminal_or_fill_the_log(self, server):
        log = server.federation.server / "logs/gateway.log"
        assert self.post(server, "/x%1b%5b2J") == 404
        for _ in range(3 * LOGGED_A_MINUTE):
            self.post(server, "/filler")
        assert "\x1b" not in log.read_text()
        assert log.read_text().count("/filler") <= 2 * LOGGED_A_MINUTE, "they may fall into two minutes"

    def test_flwr_run_against_the_port_for_nodes_is_refused(self, server, tmp_path):
        from fedsparse.engine.flower import CLIENT_APP, SERVER_APP, write_app

        for name in ("app", "home"):
            (tmp_path / name).mkdir()
        write_app(tmp_path / "app", {"scenario": "x"}, SERVER_APP, CLIENT_APP)
        address = f"127.0.0.1:{server.federation.file.port}"
        text = f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{address}"\n'
        (tmp_path / "home/config.toml").write_text(text + f'root-certificates = "{server.federation.ca}"\n')
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), "run", str(tmp_path / "app"), "x"],
            env={**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0
        self.logged(server, "refused /v1/control/")

    def test_plain_text_is_not_spoken(self, server):
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://127.0.0.1:{server.federation.file.port}/health", timeout=5)

    def test_an_unregistered_key_is_refused_and_logged(self, server):
        folder = server.federation.node_folder(0)
        stranger = Node.open(folder)
        mine = stranger.key.read_bytes()
        try:
            keys.make_node(stranger.key)
            finding = first_problem(stranger)
            assert finding is not None
            assert "not registered" in finding.what
            assert self.post(server, "/v1/fleet/pull-messages") == 401
            self.logged(server, "its key is not registered")
            server.start_node(0)
            server.wait(lambda: "key is not registered" in server.said("node-0"), 40, "the node's own words")
            node = server.processes.pop("node-0")
            node.terminate()
            node.wait(30)
        finally:
            keys.write_secret(stranger.key, mine)

    def test_the_server_of_another_federation_is_not_trusted(self, server, tmp_path):
        other = made(tmp_path / "fed")
        folder = other.node_folder(0)
        text = (folder / "node.toml").read_text()
        (folder / "node.toml").write_text(text.replace(f":{other.file.port}", f":{server.federation.file.port}"))
        finding = first_problem(Node.open(folder))
        assert finding is not None
        assert "another authority" in finding.what

    def test_a_wrong_clock_is_told(self, server, monkeypatch):
        from fedsparse.deploy import checks

        real = checks.time.time
        monkeypatch.setattr(checks.time, "time", lambda: real() + 3600)
        finding = first_problem(Node.open(server.federation.node_folder(0)))
        assert finding is not None
        assert finding.what.startswith("clock: 3600.0 s ahead")

    def test_what_is_too_large_is_not_read(self, server):
        large = b"0" * ((server.federation.file.max_request_mb << 20) + 1)
        assert self.post(server, "/v1/fleet/push-object", large, self.key(server)) == 413

    def test_what_a_node_sends_at_once_is_bounded_by_all_together(self, server):
        """Half-sent requests wait in memory: beside one of nearly the greatest length a second gets no room."""
        file = server.federation.file
        size = (file.max_request_mb << 20) * 3 // 4
        context = ssl.create_default_context(cafile=str(server.federation.ca))
        lines = [f"{name}: {value}" for name, value in self.key(server).items()]
        head = "\r\n".join(["POST /v1/fleet/push-object HTTP/1.1", "host: x", f"content-length: {size}", *lines])
        with contextlib.ExitStack() as stack:
            for number in range(2):
                plain = socket.create_connection(("127.0.0.1", file.port), timeout=20)
                link = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
                link.sendall(head.encode() + b"\r\n\r\n")
                with contextlib.suppress(OSError):  # the answer may come before all is sent
                    link.sendall(b"0" * (size - 1))
                if number == 0:
                    link.settimeout(2)
                    with pytest.raises(TimeoutError):
                        link.recv(100)
            link.settimeout(20)
            assert b" 503 " in link.recv(100)
        self.logged(server, "too much comes at once")
        assert self.post(server, "/v1/fleet/pull-messages", b"\xff", self.key(server)) != 503, "both are gone"

    @staticmethod
    def key(server) -> dict[str, str]:
        """What a registered node's requests carry."""
        return signed(server.federation.node_folder(1) / "node.key")

    @staticmethod
    def logged(server, words) -> None:
        log = server.federation.server / "logs/gateway.log"
        server.wait(lambda: words in log.read_text(), 20, f"{words!r} in the log")

    @staticmethod
    def post(server, path, body=b"", headers=None, *, direct=False) -> int:
        file = server.federation.file
        context = ssl.create_default_context(cafile=str(server.federation.ca))
        request = urllib.request.Request(
            f"https://127.0.0.1:{file.inner_port if direct else file.port}{path}",
            data=body,
            headers={"content-type": "application/x-protobuf", **(headers or {})},
        )
        try:
            return urllib.request.urlopen(request, timeout=20, context=context).status
        except urllib.error.HTTPError as error:
            return error.code

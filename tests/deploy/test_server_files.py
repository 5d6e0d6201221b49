"""What the server's own files must be, found before the server starts, by `doctor` too, and mended as it says."""

import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w
from test_keys_and_checks import made

from fedsparse.deploy import create, keys
from fedsparse.deploy.doctor import examine
from fedsparse.deploy.federation import FEDERATION, Federation
from fedsparse.deploy.server import Server
from fedsparse.deploy.server_files import check_server_files
from fedsparse.errors import ConfigError


def rewrite(federation: Federation, **change: object) -> None:
    (federation.path / FEDERATION).write_text(tomli_w.dumps(federation.file.model_dump() | change))


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE photos (place)")


DAMAGES = {
    "certificate": lambda fed, _: fed.certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\nx"),
    "key": lambda fed, _: fed.key.write_bytes(b"\xff" * 100),
    "no key": lambda fed, _: fed.key.unlink(),
    "another's key": lambda fed, other: fed.key.write_bytes(other.key.read_bytes()),
    "another's pair": lambda fed, other: [
        getattr(fed, name).write_bytes(getattr(other, name).read_bytes()) for name in ("certificate", "key")
    ],
    "authority": lambda fed, _: fed.ca.write_bytes(b""),
    "database": lambda fed, _: fed.database.write_bytes(b"garbage " * 1000),
    "a folder for a database": lambda fed, _: fed.database.mkdir(),
    "no database behind a link": lambda fed, _: fed.database.symlink_to("nowhere"),
    "another's database": lambda fed, _: foreign_database(fed.database),
    "another's authority": lambda fed, other: fed.ca.write_bytes(other.ca.read_bytes()),
    "another host": lambda fed, _: rewrite(fed, host="fl.example.org"),
    "no address of ours": lambda fed, _: rewrite(fed, bind="192.0.2.1"),
    "ports": lambda fed, _: rewrite(fed, inner_port=fed.file.port),
    "one key twice": lambda fed, _: rewrite(fed, nodes=dict.fromkeys("01", fed.file.nodes["0"])),
    "a damaged key": lambda fed, _: rewrite(fed, nodes=fed.file.nodes | {"1": fed.file.nodes["1"][:60]}),
}
WORDS = {
    "certificate": "cannot be read as a certificate",
    "key": "cannot be read as a certificate",
    "no key": r"server.key is missing",
    "another's key": "is not the key of",
    "another's pair": "is not signed by",
    "authority": "is no certificate: bring ca.crt back",
    "database": "is damaged: move it away",
    "a folder for a database": "cannot be opened",
    "no database behind a link": "cannot be opened",
    "another's database": "is that of another program",
    "another's authority": "is not signed by .*: bring ca.crt back",
    "another host": "is for another name than host = 'fl.example.org'",
    "no address of ours": "bind must be an address of this machine",
    "ports": "port and inner_port are both",
    "one key twice": "nodes 0 and 1 have one and the same key",
    "a damaged key": "public key of node 1 is damaged",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_would_not_do_are_named_with_the_way_out(tmp_path, damage):
    before = made(tmp_path / "my fed")
    assert check_server_files(before) == []
    DAMAGES[damage](before, made(tmp_path / "another"))
    federation = Federation.open(before.path)
    with pytest.raises(ConfigError, match=WORDS[damage]) as told:
        Server(federation, print).run()
    found = any(finding.level == "fix" and finding.what in str(told.value) for finding in examine(before.path))
    assert found or damage == "no address of ours", "that only the server's own start can tell"
    if "renew" in str(told.value):
        typed = shlex.split(str(told.value).partition("fedsparse ")[2].removesuffix("."))
        assert typed == ["deploy", "renew", str(before.path)], "it can be typed as it stands"
        create.renew(federation)
        assert check_server_files(federation) == []


def test_a_database_in_use_is_no_damage(tmp_path):
    federation = made(tmp_path / "fed")
    database = sqlite3.connect(federation.database, isolation_level=None)
    for statement in ("CREATE TABLE alembic_version (y)", "BEGIN EXCLUSIVE", "INSERT INTO alembic_version VALUES (1)"):
        database.execute(statement)
    assert check_server_files(federation) == []
    database.close()


def test_only_the_authoritys_own_key_signs(tmp_path):
    federation, other = made(tmp_path / "fed"), made(tmp_path / "other")
    for content in (other.ca_key.read_bytes(), b"nothing"):
        keys.write_secret(federation.ca_key, content)
        with pytest.raises(ConfigError, match="no certificate and its key"):
            create.renew(federation)
    assert check_server_files(federation) == [], "what was there still is"


@pytest.mark.parametrize(("host", "bind"), [("::1", "::"), ("127.0.0.1", "0.0.0.0"), ("fl.example.org", "0.0.0.0")])
def test_the_port_is_opened_where_the_host_is(tmp_path, host, bind):
    assert made(tmp_path / "fed", host=host).file.bind == bind


def test_a_certificate_that_cannot_be_written_is_no_traceback(tmp_path):
    federation = made(tmp_path / "fed")
    federation.certificate.unlink()
    federation.certificate.mkdir()
    with pytest.raises(ConfigError, match=r"server\.crt is no file"):
        check_server_files(federation)
    with pytest.raises(ConfigError, match=r"cannot make the certificate: .*server\.crt"):
        create.renew(federation)

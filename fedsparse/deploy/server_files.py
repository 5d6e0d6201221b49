"""What must be right with the server's own files: the server looks before it starts, `doctor` tells."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fedsparse.deploy import keys
from fedsparse.deploy.checks import Finding
from fedsparse.deploy.federation import FEDERATION, Federation
from fedsparse.errors import ConfigError, shell

COPY = "bring ca.crt back from a copy; each node's folder has one"
_FLOWERS = "alembic_version"  # a table that every database of Flower's has


def server_files(federation: Federation) -> Iterator[Finding]:
    """Look at the settings, the nodes' public keys, the certificates and the SuperLink's database."""
    file = federation.file
    if file.port == file.inner_port:
        what = f"port and inner_port are both {file.port}"
        yield Finding("fix", what, f"change one of them in {federation.path / FEDERATION}")
    try:
        federation.public_keys()
    except ConfigError as error:
        yield Finding("fix", str(error))
    yield from _certificates(federation)
    yield from _database(federation.database)


def check_server_files(federation: Federation) -> list[Finding]:
    """Refuse to start with files that would not do, and return what to warn of.

    Raises
    ------
    ConfigError
        The first thing to mend.
    """
    found = list(server_files(federation))
    for finding in found:
        if finding.level == "fix":
            raise ConfigError(f"{finding.what}: {finding.todo}." if finding.todo else finding.what)
    return [finding for finding in found if finding.level == "warn"]


def _certificates(federation: Federation) -> Iterator[Finding]:
    renew = f"fedsparse deploy renew {shell(federation.path)}"
    for path, todo in ((federation.ca, COPY), (federation.certificate, renew), (federation.key, renew)):
        if not path.is_file():
            yield Finding("fix", f"{path} is {'no file' if path.exists() else 'missing'}", todo)
            return
    try:
        keys.expiry(federation.ca)
    except (OSError, ValueError):
        yield Finding("fix", f"{federation.ca} is no certificate", COPY)
        return
    try:
        yield _server_certificate(federation, renew)
    except (OSError, ValueError, TypeError):
        what = f"{federation.certificate} and {federation.key} cannot be read as a certificate and its key"
        yield Finding("fix", what, renew)


def _server_certificate(federation: Federation, renew: str) -> Finding:
    certificate, host = federation.certificate, federation.file.host
    if not keys.is_pair(certificate, federation.key):
        return Finding("fix", f"{federation.key} is not the key of {certificate}", renew)
    if not keys.is_signed_by(certificate, federation.ca):
        todo = COPY if _is_foreign(federation) else renew
        return Finding("fix", f"{certificate} is not signed by {federation.ca}, which the nodes trust", todo)
    if not keys.is_for(certificate, host):
        return Finding("fix", f"{certificate} is for another name than host = {host!r} in {FEDERATION}", renew)
    end, left = keys.expiry(certificate)
    if left < 0:
        return Finding("fix", f"the server's certificate expired on {end:%Y-%m-%d}", renew)
    soon = left < keys.SOON_DAYS
    return Finding(
        "warn" if soon else "ok", f"the server's certificate is valid until {end:%Y-%m-%d}", renew if soon else ""
    )


def _is_foreign(federation: Federation) -> bool:
    """Whether the authority's certificate is that of another authority, as far as one can tell here."""
    try:
        return not keys.is_pair(federation.ca, federation.ca_key)
    except (OSError, ValueError, TypeError):
        return False


def _database(path: Path) -> Iterator[Finding]:
    if not path.exists() and not path.is_symlink():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            sound = database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        wrong = "" if sound else "is damaged"
        if sound and tables and _FLOWERS not in tables:
            wrong = "is that of another program"
    except sqlite3.OperationalError as error:
        wrong = "" if "locked" in str(error) else f"cannot be opened ({error})"  # locked: it is in use
    except sqlite3.DatabaseError:
        wrong = "is damaged"
    if wrong:
        yield Finding(
            "fix",
            f"the SuperLink's database {path} {wrong}",
            "move it away: nodes are registered anew, and a run that was going on goes on with --resume",
        )

"""What must be right with the server's own files: the server looks before it starts, `doctor` tells."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fedsparse.deploy import keys
from fedsparse.deploy.checks import Finding, Level
from fedsparse.deploy.federation import FEDERATION, Federation
from fedsparse.errors import ConfigError, shell


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
    for path, todo in (
        (federation.ca, "bring it back from a copy; each node's folder has one"),
        (federation.certificate, renew),
        (federation.key, renew),
    ):
        if not path.is_file():
            yield Finding("fix", f"{path} is missing", todo)
            return
    try:
        keys.expiry(federation.ca)
    except (OSError, ValueError):
        yield Finding(
            "fix", f"{federation.ca} is no certificate", "bring it back from a copy; each node's folder has one"
        )
        return
    try:
        pair, signed = keys.is_pair(federation.certificate, federation.key), False
        signed = keys.is_signed_by(federation.certificate, federation.ca)
        end, left = keys.expiry(federation.certificate)
    except (OSError, ValueError, TypeError):
        what = f"{federation.certificate} and {federation.key} cannot be read as a certificate and its key"
        yield Finding("fix", what, renew)
        return
    if not pair:
        yield Finding("fix", f"{federation.key} is not the key of {federation.certificate}", renew)
    elif not signed:
        yield Finding("fix", f"{federation.certificate} is not signed by {federation.ca}, which the nodes trust", renew)
    else:
        level: Level = "fix" if left < 0 else "warn" if left < keys.SOON_DAYS else "ok"
        text = f"expired on {end:%Y-%m-%d}" if left < 0 else f"is valid until {end:%Y-%m-%d}"
        yield Finding(level, f"the server's certificate {text}", renew if level != "ok" else "")


def _database(path: Path) -> Iterator[Finding]:
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            sound = database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    except sqlite3.OperationalError:
        return  # in use, or not ours to read: the SuperLink will tell
    except sqlite3.DatabaseError:
        sound = False
    if not sound:
        yield Finding(
            "fix",
            f"the SuperLink's database {path} is damaged",
            "move it away: nodes are registered anew, and a run that was going on goes on with --resume",
        )

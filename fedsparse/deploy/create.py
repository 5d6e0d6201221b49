"""Make a federation's folders, add nodes to one, renew its server's certificate."""

import ipaddress
import re
import shutil
from pathlib import Path

import tomli_w

from fedsparse.deploy import keys
from fedsparse.deploy.federation import CA, FEDERATION, FORMAT, NODE, NODE_KEY, Federation, FederationFile
from fedsparse.errors import ConfigError, shell
from fedsparse.run.folder import write_text

_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?$")

_NODE_TEXT = """\
# Node {number} of the federation {name!r}. Copy this folder to the device, then start it there with
#   fedsparse deploy node {folder}

{values}
[data]
# What this device trains on; without it, part {number} of the scenario's own data set (for tests).
# source = "/path/to/folder-or-file"    # IDX files, .npz, .csv, a folder of images, or "package.module:callable"

[limits]
threads = 1
# memory_mb = 1024    # what each process may allocate
"""


def create(path: Path, host: str, nodes: int, port: int, inner_port: int) -> Federation:
    """Make a federation: certificate authority, server certificate, node keys, configs.

    Raises
    ------
    ConfigError
        The folder holds something already, or the host is no name or address.
    """
    check_host(host)
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} must be at least 1.")
    if port == inner_port:
        raise ConfigError(f"--port and --inner-port are both {port}: they must differ.")
    if (path / FEDERATION).is_file():
        raise ConfigError(
            f"{path} already holds a federation, and its keys would be lost: add nodes with `fedsparse deploy add "
            f"{shell(path)}`, renew the server's certificate with `fedsparse deploy renew {shell(path)}`, or choose "
            "another folder."
        )
    if (path.is_dir() and any(path.iterdir())) or path.is_file():
        raise ConfigError(f"{path} is not an empty folder: choose another.")
    file = FederationFile(
        format=FORMAT,
        name=path.absolute().name,
        host=host,
        port=port,
        inner_port=inner_port,
        bind="::" if _is_v6(host) else "0.0.0.0",
        nodes={},
    )
    federation = Federation(path, file)
    made = [parent for parent in (federation.path, *federation.path.parents) if not parent.exists()]
    try:
        for folder in (federation.path, federation.server, federation.ca_key.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys.make_ca(federation.ca, federation.ca_key, file.name)
        renew(federation)
        return add(federation, nodes)
    except OSError as error:
        for folder in made[:1]:
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"cannot write into {path}: {error.strerror}.") from None


def renew(federation: Federation, days: int = keys.SERVER_DAYS) -> None:
    """Make a new key and certificate for the server; nodes trust the authority, so they need nothing new."""
    try:
        keys.make_server(
            federation.certificate, federation.key, federation.ca, federation.ca_key, federation.file.host, days
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is missing: without it no certificate can be signed.") from None
    except OSError as error:
        raise ConfigError(f"cannot make the certificate: {error.filename}: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{federation.ca} and {federation.ca_key} are no certificate and its key: bring both back from a copy, or "
            "make a new federation."
        ) from None


def add(federation: Federation, count: int) -> Federation:
    """Make folders and keys for more nodes."""
    if count < 1:
        raise ConfigError(f"the number of nodes to add is {count}, it must be at least 1.")
    known = dict(federation.file.nodes)
    # A removed node's number is not given again: Flower would take its key for the new one's.
    first = max((int(number) for number in (*known, *federation.file.revoked)), default=-1) + 1
    numbers = range(first, first + count)
    for number in numbers:
        known[str(number)] = _make_node(federation, number, first + count).decode()
    file = federation.file.model_copy(update={"nodes": known})
    changed = Federation(federation.path, file)
    changed.save()
    return changed


def remove(federation: Federation, number: int) -> Federation:
    """Take away a node's right to connect: its device was lost, or has served its time."""
    if str(number) not in federation.file.nodes:
        raise ConfigError(f"there is no node {number}; the nodes are: {', '.join(federation.file.nodes)}.")
    nodes = {name: key for name, key in federation.file.nodes.items() if name != str(number)}
    file = federation.file.model_copy(update={"nodes": nodes, "revoked": [*federation.file.revoked, str(number)]})
    changed = Federation(federation.path, file)
    changed.save()
    return changed


def _make_node(federation: Federation, number: int, total: int) -> bytes:
    folder = federation.node_folder(number)
    folder.mkdir(mode=0o700, exist_ok=True)
    public = keys.make_node(folder / NODE_KEY)
    shutil.copyfile(federation.ca, folder / CA)
    host = f"[{federation.file.host}]" if ":" in federation.file.host else federation.file.host
    values = {
        "format": FORMAT,
        "federation": federation.file.name,
        "node": number,
        "num_nodes": total,
        "server": f"{host}:{federation.file.port}",
    }
    text = _NODE_TEXT.format(number=number, name=federation.file.name, folder=folder.name, values=tomli_w.dumps(values))
    write_text(folder / NODE, text)
    return public


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def check_host(host: str) -> None:
    """Refuse what is neither a host name nor an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > 253 or not _HOST.match(host) or ":" in host:
            raise ConfigError(
                f"--host {host!r} must be the name or address under which nodes reach the server, without a port, "
                "for example fl.example.org or 192.168.1.20."
            ) from None

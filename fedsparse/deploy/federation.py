"""The folders of a federation: what the server knows of it, and what a node needs of it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsparse.errors import ConfigError, shell
from fedsparse.flower_programs import reach_loopback_directly

FORMAT = 1
FEDERATION, NODE = "federation.toml", "node.toml"
CA, SERVER_CERTIFICATE, SERVER_KEY, NODE_KEY = "ca.crt", "server.crt", "server.key", "node.key"

Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FederationFile(_File):
    """federation.toml: the nodes' public keys, and where the server listens."""

    format: int = Field(description="the version of this file's format")
    name: Text = Field(description="a name")
    host: Text = Field(description="the name or address under which nodes reach the server")
    port: Port = Field(description="the port for nodes, from 1 to 65535")
    inner_port: Port = Field(description="the port of Flower's SuperLink on this machine alone, from 1 to 65535")
    bind: Text = Field(default="0.0.0.0", description="the address that the port for nodes is opened on")
    max_request_mb: Annotated[int, Field(ge=1)] = Field(
        default=64, description="the largest request in MB that is taken from a node"
    )
    revoked: list[Number] = Field(default=[], description="a list of the numbers of removed nodes")
    nodes: dict[Number, str] = Field(description="a table: a node's number and its public key")


class DataTable(_File):
    """[data] of node.toml."""

    source: Text | None = Field(
        default=None, description='a file or folder, or "package.module:callable": what this device trains on'
    )


class LimitsTable(_File):
    """[limits] of node.toml."""

    threads: Annotated[int, Field(ge=1)] = Field(default=1, description="the CPU threads of training, at least 1")
    memory_mb: Annotated[int, Field(ge=256)] | None = Field(
        default=None, description="the MB of memory that each process may allocate, at least 256"
    )
    keep_runs: Annotated[int, Field(ge=1)] = Field(
        default=5, description="the number of trainings whose error memory stays on the disk, at least 1"
    )


class NodeFile(_File):
    """node.toml: which node this is, its server, its data and limits."""

    format: int = Field(description="the version of this file's format")
    federation: Text = Field(description="the name of the federation")
    node: Annotated[int, Field(ge=0)] = Field(description="this node's number, from 0")
    num_nodes: Annotated[int, Field(ge=1)] = Field(description="the number of nodes when this file was made")
    server: Text = Field(description="host:port of the server")
    data: DataTable = Field(default=DataTable(), description="a table")
    limits: LimitsTable = Field(default=LimitsTable(), description="a table")


F = TypeVar("F", bound=_File)


class Federation:
    """The server's folder.

    Parameters
    ----------
    path : path
        The folder that `fedsparse deploy init` made.
    """

    def __init__(self, path: Path, file: FederationFile) -> None:
        self.path, self.file = path.absolute(), file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a folder.

        Raises
        ------
        ConfigError
            No federation, or a file that somebody broke.
        """
        if (path / NODE).is_file():
            raise ConfigError(f"{path} is a node's folder: start it with `fedsparse deploy node {shell(path)}`.")
        if not (path / FEDERATION).is_file():
            raise ConfigError(
                f"{path} holds no federation: make one with `fedsparse deploy init {shell(path)} --host NAME`."
            )
        reach_loopback_directly()  # whatever speaks to the federation's own servers begins here
        return cls(path, read(path / FEDERATION, FederationFile))

    def save(self) -> None:
        """Write federation.toml as a whole."""
        from fedsparse.run.folder import write_text

        write_text(self.path / FEDERATION, tomli_w.dumps(self.file.model_dump()))

    @property
    def server(self) -> Path:
        """Where the server keeps its own files."""
        return self.path / "server"

    @property
    def ca(self) -> Path:
        """The certificate that everybody trusts."""
        return self.path / CA

    @property
    def ca_key(self) -> Path:
        """The key that signs the server's certificates."""
        return self.path / "private" / "ca.key"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.server / SERVER_CERTIFICATE

    @property
    def key(self) -> Path:
        """The server's key."""
        return self.server / SERVER_KEY

    @property
    def database(self) -> Path:
        """Where Flower's SuperLink keeps nodes, runs and messages."""
        return self.server / "state.db"

    @property
    def inner(self) -> str:
        """Where Flower's SuperLink listens, for this machine alone."""
        return f"127.0.0.1:{self.file.inner_port}"

    def node_folder(self, number: int | str) -> Path:
        """Return the folder that is copied to a device."""
        return self.path / f"node-{number}"

    def public_keys(self) -> dict[bytes, str]:
        """Return the nodes' public keys, as Flower knows them, with their numbers."""
        from cryptography.exceptions import UnsupportedAlgorithm

        from fedsparse.deploy.keys import from_openssh

        found: dict[bytes, str] = {}
        for number, text in self.file.nodes.items():
            try:
                key = from_openssh(text.encode())
            except (ValueError, AssertionError, UnsupportedAlgorithm):
                raise ConfigError(
                    f"{self.path / FEDERATION}: the public key of node {number} is damaged: take the node out with "
                    f"`fedsparse deploy remove {shell(self.path)} {number}`, and make a new one with `deploy add`."
                ) from None
            if key in found:
                raise ConfigError(
                    f"{self.path / FEDERATION}: nodes {found[key]} and {number} have one and the same key: each device "
                    f"needs its own. Take one out with `fedsparse deploy remove {shell(self.path)} {number}`."
                )
            found[key] = number
        return found


class Node:
    """A device's folder.

    Parameters
    ----------
    path : path
        The folder that was copied from the server's.
    """

    def __init__(self, path: Path, file: NodeFile) -> None:
        self.path, self.file = path.absolute(), file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a folder.

        Raises
        ------
        ConfigError
            No node, or a file that somebody broke.
        """
        if (path / FEDERATION).is_file():
            raise ConfigError(f"{path} is the server's folder: name a node's in it, such as {path / 'node-0'}.")
        if not (path / NODE).is_file():
            raise ConfigError(f"{path} holds no {NODE}: copy a node's folder from the server's federation.")
        node = cls(path, read(path / NODE, NodeFile))
        for file in (node.ca, node.key):
            if not file.is_file():
                raise ConfigError(f"{file} is missing: copy the node's folder from the server again.")
        if not is_host(node.host) or not node.port:
            raise ConfigError(f"{path / NODE}: server = {node.file.server!r} must be host:port.")
        return node

    @property
    def ca(self) -> Path:
        """The certificate that the server's must be signed by."""
        return self.path / CA

    @property
    def key(self) -> Path:
        """The private key of this node."""
        return self.path / NODE_KEY

    @property
    def memory(self) -> Path:
        """Where this device's error memory lives."""
        return self.path / "memory"

    @property
    def host(self) -> str:
        """The server's name or address."""
        return self.file.server.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The server's port."""
        text = self.file.server.rpartition(":")[2]
        return int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0


def is_host(text: str) -> bool:
    """Whether a resolver takes it for a name or an address at all; some raise what nobody expects where it does not."""
    try:
        return bool(text.encode("idna")) and text.isprintable() and " " not in text
    except UnicodeError:
        return False


def read(path: Path, kind: type[F]) -> F:
    """Read one of the files; what is wrong with it becomes one ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    try:
        found = kind.model_validate(values)
    except ValidationError as error:
        lines = [_problem(item, kind) for item in error.errors(include_url=False)]
        raise ConfigError(f"{path}: " + "\n".join(lines)) from None
    if (version := values.get("format")) != FORMAT:
        raise ConfigError(f"{path} has format {version}, this version of fedsparse knows {FORMAT}: update the older.")
    return found


def _problem(item: Mapping[str, Any], kind: type[BaseModel]) -> str:
    path, table = [str(part) for part in item["loc"]], kind
    for part in path[:-1]:
        inner = table.model_fields[part].annotation if part in table.model_fields else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            table = inner
    key, last = ".".join(path), path[-1]
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}. Allowed: {', '.join(sorted(table.model_fields))}."
    field = table.model_fields.get(last)
    allowed = field.description if field is not None else item["msg"]
    if item["type"] == "missing":
        return f"{key} is missing: it must be {allowed}."
    return f"{key} = {item['input']!r} is not allowed: it must be {allowed}."

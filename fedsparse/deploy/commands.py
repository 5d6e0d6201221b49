"""`fedsparse deploy ...` and `fedsparse doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from fedsparse.errors import ConfigError, shell

app = typer.Typer(
    name="deploy", help="Real devices: make a federation, run its server and its nodes.", no_args_is_help=True
)

FederationArgument = Annotated[Path, typer.Argument(metavar="DIR")]


@app.command()
def init(
    directory: FederationArgument,
    host: Annotated[
        str, typer.Option("--host", metavar="NAME", help="Name or address under which nodes reach the server.")
    ],
    nodes: Annotated[int, typer.Option("--nodes", help="How many devices.")] = 4,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port for nodes.")] = 9092,
    inner_port: Annotated[
        int, typer.Option("--inner-port", min=1, max=65535, help="A port that only this machine sees.")
    ] = 9093,
) -> None:
    """Make a federation in DIR: a private CA, the server's certificate, and a folder with a key for each node."""
    from fedsparse.deploy.create import create

    federation = create(directory, host, nodes, port, inner_port)
    _say(f"made the federation {federation.file.name!r} for {nodes} nodes, which reach it as {host}:{port}")
    _say("")
    _say("next:")
    for command, where in (
        (f"fedsparse deploy server {shell(directory)}", "here"),
        (f"scp -r {shell(directory / 'node-0')} DEVICE:", "each node's folder to its device; it has a private key"),
        ("fedsparse deploy node node-0", "there"),
    ):
        _say(f"  {command:<40} # {where}")
    _say("")
    _say(f"`fedsparse doctor {shell(directory)}`, and there `fedsparse doctor node-0`, say what is missing.")


@app.command()
def add(
    directory: FederationArgument,
    nodes: Annotated[int, typer.Option("--nodes", help="How many more devices.")] = 1,
) -> None:
    """Add nodes to the federation in DIR; a running server takes them in when it is started again."""
    from fedsparse.deploy import create
    from fedsparse.deploy.federation import Federation

    before = Federation.open(directory)
    after = create.add(before, nodes)
    made = [number for number in after.file.nodes if number not in before.file.nodes]
    _say(f"made {', '.join(str(directory / f'node-{number}') for number in made)}; start the server again")


@app.command()
def remove(directory: FederationArgument, number: Annotated[int, typer.Argument(metavar="NODE")]) -> None:
    """Remove node number NODE from the federation in DIR: its key is refused once the server is started again."""
    from fedsparse.deploy import create
    from fedsparse.deploy.federation import Federation

    create.remove(Federation.open(directory), number)
    _say(f"node {number} is removed; start the server again, and its key is refused")


@app.command()
def renew(
    directory: FederationArgument,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long it is to be valid.")] = 825,
) -> None:
    """Make a new certificate for the server of the federation in DIR; nodes need nothing new."""
    from fedsparse.deploy import create, keys
    from fedsparse.deploy.federation import Federation

    federation = Federation.open(directory)
    create.renew(federation, days)
    end, _ = keys.expiry(federation.certificate)
    _say(f"the server's certificate is valid until {end:%Y-%m-%d}; start the server again")


@app.command()
def server(directory: FederationArgument) -> None:
    """Run the server of the federation in DIR until Ctrl-C: SuperLink, executor, and the gateway for nodes."""
    from fedsparse.deploy.federation import Federation
    from fedsparse.deploy.server import Server

    Server(Federation.open(directory), _say).run()


@app.command()
def node(directory: Annotated[Path, typer.Argument(metavar="NODE_DIR")]) -> None:
    """Run the node in NODE_DIR until Ctrl-C; it is started again whenever it ends."""
    from fedsparse.deploy.federation import Node
    from fedsparse.deploy.node import NodeRunner

    NodeRunner(Node.open(directory), _say).run()


@app.command()
def status(directory: FederationArgument) -> None:
    """Show the nodes of the federation in DIR: who is there, what they sent, what was accepted."""
    from rich.console import Console
    from rich.table import Table

    from fedsparse.deploy.federation import Federation
    from fedsparse.deploy.status import status as collect
    from fedsparse.terminal import out

    federation = Federation.open(directory)
    found = collect(federation)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "state", "last seen", "address", "MB up", "MB down", "accepted", "failed", "residual norm"):
        table.add_column(title, justify="left" if title in ("node", "state", "address") else "right")
    for each in found.nodes:
        table.add_row(
            each.node,
            each.state,
            _ago(each.seen_s),
            each.address or "",
            f"{each.up_bytes / 1e6:.2f}",
            f"{each.down_bytes / 1e6:.2f}",
            str(each.accepted),
            str(each.failed),
            "" if each.residual_norm is None else f"{each.residual_norm:.4g}",
        )
    Console(highlight=False, width=None if out.is_terminal else 140).print(table)
    for each in found.nodes:
        if each.reason is not None:
            _say(f"node {each.node} failed last: {each.reason}")
    if not found.running:
        _say(f"the server is not running: fedsparse deploy server {shell(directory)}")
    if found.refused:
        _say(f"{found.refused} requests were refused at the gateway; see {federation.server / 'logs' / 'gateway.log'}")
    _say(
        f"latest run: {found.run}"
        if found.run
        else f"no run yet: fedsparse run SCENARIO --engine deployment --federation {shell(directory)}"
    )


@app.command()
def stop(directory: FederationArgument) -> None:
    """Stop the run that goes on in the federation in DIR, wherever it was started; server and nodes stay.

    `fedsparse run ... --resume` goes on with it.
    """
    from fedsparse.deploy.control import Control
    from fedsparse.deploy.federation import Federation

    federation = Federation.open(directory)
    control = Control(federation.inner, federation.ca)
    going = control.going()
    for run_id in going:
        control.stop(run_id)
        _say(f"stopped run {run_id}")
    if not going:
        _say("no run goes on")


def doctor(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]")] = None,
    parameters: Annotated[
        int | None, typer.Option("--parameters", min=1, help="The model's size, to hold the free memory against.")
    ] = None,
) -> None:
    """Say what is right and wrong on this machine, and what to type.

    DIR is a federation's or a node's folder; with it, keys, certificates and the way to the server are looked at too.
    """
    from fedsparse.deploy.doctor import examine
    from fedsparse.terminal import out

    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{directory} is no folder.")
    styles = {"ok": "green", "warn": "yellow", "fix": "bold red"}
    wrong = 0
    for finding in examine(directory, parameters):
        wrong += finding.level == "fix"
        out.print(f"{finding.level:<4}", style=styles[finding.level], end="  ")
        out.print(finding.what, markup=False)
        if finding.todo and finding.level != "ok":
            out.print(f"      -> {finding.todo}", markup=False)
    if wrong:
        raise typer.Exit(1)


def _say(text: str) -> None:
    from fedsparse.terminal import out

    out.print(text, markup=False)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"

"""Where the command line writes; nothing else is loaded for it, so that a device's commands and errors come at once."""

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(text: str) -> None:
    """Show an error that the user can act on."""
    err.print("error:", style="bold red", end=" ")
    err.print(text, markup=False)

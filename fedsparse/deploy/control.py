"""Speak to a SuperLink's control API: the one place that uses Flower's own client for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedsparse.errors import RunError, shell


class Control:
    """The control API of a federation's SuperLink.

    Parameters
    ----------
    address : str
        host:port.
    ca : path
        The certificate authority.
    """

    def __init__(self, address: str, ca: Path) -> None:
        self._address, self._ca, self._folder = address, ca, ca.parent

    @contextmanager
    def _client(self) -> Iterator[Any]:
        interceptors = [RuntimeVersionHttpInterceptor(component_name="fedsparse")]
        client = ControlHttpClient.from_server_address(self._address, False, self._ca.read_bytes(), interceptors)
        try:
            yield client
        except httpx.TransportError as error:
            raise RunError(
                f"the federation's server does not answer at {self._address} ({error}): start it with "
                f"`fedsparse deploy server {shell(self._folder)}`."
            ) from None
        except httpx.HTTPStatusError as error:
            raise RunError(f"the SuperLink refuses: {error.response.text[:300]}") from None
        finally:
            client.close()

    def nodes(self) -> list[Any]:
        """Return what Flower knows of the nodes: name, node_id, status, public_key, last_activated_at, ..."""
        with self._client() as client:
            return list(client.ListNodes(ListNodesRequest()).nodes_info)

    def register(self, names: dict[bytes, str]) -> list[str]:
        """Register the public keys that are not registered yet under their names; return those names."""
        with self._client() as client:
            known = {bytes(node.public_key) for node in client.ListNodes(ListNodesRequest()).nodes_info}
            new = {key: name for key, name in names.items() if key not in known}
            for key, name in new.items():
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
        return list(new.values())

    def runs(self) -> dict[int, Any]:
        """Return all runs by their id."""
        with self._client() as client:
            return dict(client.ListRuns(ListRunsRequest()).run_dict)

    def going(self) -> list[int]:
        """Return the ids of the runs that are not finished."""
        return [run_id for run_id, run in self.runs().items() if run.status.status != "finished"]

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        with self._client() as client:
            client.StopRun(StopRunRequest(run_id=run_id))

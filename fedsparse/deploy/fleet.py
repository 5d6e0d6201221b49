"""Speak to the server as a node: the one place on a device that uses Flower's own client for it."""

from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsparse.deploy.federation import Node


def sign_off(node: Node, node_id: int) -> bool:
    """Tell the server that a node's SuperNode is not there any more.

    One that was killed could not say so itself, and the server would refuse its successor for up to a minute.

    Parameters
    ----------
    node : Node
    node_id : int
        Flower's id for it.

    Returns
    -------
    bool
        Whether the server heard it.
    """
    private = load_ssh_private_key(node.key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, private.public_key()),
    ]
    try:
        with FleetHttpClient.from_server_address(node.file.server, False, node.ca.read_bytes(), interceptors) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
        return True
    except (httpx.HTTPError, RuntimeError):
        return False

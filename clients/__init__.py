"""The client side: a mod that compresses any Flower ClientApp, and an app of our own."""

from clients.mod import CompressionMod

__all__ = ["CompressionMod"]

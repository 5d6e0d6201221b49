"""Simulated devices: how fast they compute and send, when they are there, and a clock that adds it up."""

from fedsparse.devices.availability import AVAILABILITY, Availability, make_availability
from fedsparse.devices.fleet import Fleet, Member, Mix
from fedsparse.devices.profiles import PROFILES, Device, get_profile

__all__ = [
    "AVAILABILITY",
    "PROFILES",
    "Availability",
    "Device",
    "Fleet",
    "Member",
    "Mix",
    "get_profile",
    "make_availability",
]

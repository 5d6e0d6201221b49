"""From a scenario's [devices] to a fleet on a virtual clock."""

from typing import TYPE_CHECKING

from fedsparse.devices import Device, Fleet, get_profile, make_availability
from fedsparse.devices.profiles import PROFILES, custom_profile
from fedsparse.errors import ConfigError, unknown_name
from fedsparse.scenario.schema import Devices, Scenario

if TYPE_CHECKING:
    from strategies.conditions import Conditions


def make_mix(devices: Devices) -> dict[Device, float]:
    """Return the profiles of a scenario with their shares.

    Raises
    ------
    ConfigError
        Unknown profiles, impossible numbers.
    """
    own = {name: custom_profile(name, numbers) for name, numbers in devices.profile.items()}
    if devices.mix is None:
        return {}
    shares = {devices.mix: 1.0} if isinstance(devices.mix, str) else devices.mix
    for name in shares:
        if name not in own and name not in PROFILES:
            raise unknown_name("device profile", name, [*own, *PROFILES])
    return {own[name] if name in own else get_profile(name): share for name, share in shares.items()}


def make_conditions(scenario: Scenario, flop_per_step: float, typical_steps: float = 1.0) -> "Conditions":
    """Return a scenario's devices on a virtual clock.

    Parameters
    ----------
    scenario : Scenario
        With a mix.
    flop_per_step : float
        Floating-point operations of one local step.
    typical_steps : float
        Local steps that a client usually takes.
    """
    from strategies.conditions import Conditions

    devices = scenario.devices
    fleet = Fleet(
        make_mix(devices),
        scenario.data.num_clients,
        scenario.seed,
        flop_per_step,
        compute_sigma=devices.compute_sigma,
        network_sigma=devices.network_sigma,
        availability=make_availability(devices.availability),
        dropout=devices.dropout,
    )
    return Conditions(
        fleet,
        deadline=devices.deadline,
        over_select=devices.over_select,
        partial_work=devices.partial_work,
        typical_steps=typical_steps,
    )


def check_devices(scenario: Scenario) -> None:
    """Refuse what cannot be simulated.

    Raises
    ------
    ConfigError
        Settings without a mix, unknown profiles, impossible combinations, an engine that has no virtual clock.
    """
    devices = scenario.devices
    if devices.mix is None:
        changed = sorted(devices.model_dump(exclude_defaults=True))
        if changed:
            raise ConfigError(
                f'devices.{changed[0]} needs devices.mix, such as devices.mix = "phone-4g"; '
                "`fedsparse list devices` shows all profiles."
            )
        return
    if scenario.engine.name == "deployment":
        raise ConfigError("devices are simulated: with the deployment engine the real ones count. Leave out [devices].")
    make_conditions(scenario, 1.0)


def check_device_memory(scenario: Scenario, num_parameters: int) -> None:
    """Refuse a model that a device of the scenario cannot hold.

    Raises
    ------
    ConfigError
        Parameters, gradients, update and error memory alone, in float32, take more than a device has.
    """
    need = 4 * 4 * num_parameters / 1e6
    for device in make_mix(scenario.devices):
        if need > device.memory_mb:
            raise ConfigError(
                f"the model needs at least {need:.4g} MB (parameters, gradients, update and error memory in float32); "
                f"device {device.name} has {device.memory_mb:.4g} MB."
            )

"""What all tests share."""

from hypothesis import settings

# Machines are noisy: how long an example takes is no property of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

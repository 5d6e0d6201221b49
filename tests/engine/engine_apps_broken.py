"""A client app module that does not import."""

app = 1 / 0

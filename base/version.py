"""The version of this project. `pyproject.toml` reads it from here."""

VERSION = "0.1.0"

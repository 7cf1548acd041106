"""Errors, files and checks of values for all other packages of the trainer."""

__version__ = "0.2.0"
"""Version of the project, in the package metadata, checkpoints and config.json."""

"""Functions for all packages of the trainer: errors, files, tensors, validation of values."""

__version__ = "0.2.0"
"""Version of the project, as in the package metadata, checkpoints and config.json."""

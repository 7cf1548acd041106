"""What all other packages of the trainer use: errors, files, checks of values."""

__version__ = "0.2.0"
"""Of the project; the package, every checkpoint and every config.json name it."""

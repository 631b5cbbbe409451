"""Meshloom trains, fine-tunes, compresses and serves language models on any mesh of devices, from one description of a model."""

__version__ = "0.1.0"

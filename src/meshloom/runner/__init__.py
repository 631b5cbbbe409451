"""The one loop over layers, and the ways to run it."""

"""The runs that ship, as YAML files, and the loader that turns one into a checked configuration."""

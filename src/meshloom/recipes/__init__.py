"""The runs that ship, as YAML files, the configuration of a run, and what each command does: train, eval, convert, verify."""

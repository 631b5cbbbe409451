"""A language for distributed tensor programs: axes have names, rules send names to mesh axes, and no rule changes a result."""

from meshloom.named import elementwise  # gives tensors their operators  # noqa: F401

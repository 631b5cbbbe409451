"""Any JAX function over several devices: strategies of its operations, an integer program that chooses among them, the choice applied."""

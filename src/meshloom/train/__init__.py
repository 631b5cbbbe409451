"""The train step, the loop around it, optimizers, metrics."""

"""Eight simulated CPU devices for every test, and a compiler that hurries; set before jax is imported."""

import os

FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",  # compiling takes most of the suite's time; these two change no collective and no layout
    "xla_llvm_disable_expensive_passes": "true",
}

os.environ["JAX_PLATFORMS"] = "cpu"
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{name}={value}" for name, value in FLAGS.items() if name not in given)]).strip()

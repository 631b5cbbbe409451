"""Train steps compiled for TPUs that are not there: libtpu compiles for a named topology on any machine (`pip install "meshloom[tpu]"`). What is shared with
`meshloom plan --compile` lies in src/meshloom/recipes/topology.py."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nobody to ask what machine this is
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened, so several may compile at once
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from meshloom.recipes.topology import APART, Job, against_formula, devices, planned, rows, step, traffic

__all__ = ["APART", "Job", "against_formula", "devices", "planned", "rows", "step", "traffic"]

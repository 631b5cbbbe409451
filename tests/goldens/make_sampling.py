"""Makes tests/goldens/sampling.npz: what the logits processors of `transformers` leave of random logits.

Command: python tests/goldens/make_sampling.py   (transformers 5.24, torch 2.13, CPU; seconds)
"""

from pathlib import Path

import numpy as np
import torch
from transformers.generation import logits_process

rng = np.random.default_rng(0)
logits, ids = rng.normal(0, 2, (4, 97)).astype(np.float32), rng.integers(0, 97, (4, 12))
text, out = torch.tensor(ids), torch.tensor(logits)
for step in (
    logits_process.RepetitionPenaltyLogitsProcessor(1.4),
    logits_process.TemperatureLogitsWarper(0.7),
    logits_process.TopKLogitsWarper(20),
    logits_process.TopPLogitsWarper(0.8),
):
    out = step(text, out)
np.savez_compressed(Path(__file__).parent / "sampling.npz", logits=logits, ids=ids, left=out.numpy())

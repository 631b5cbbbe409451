"""The other side of the benchmarks: PyTorch and transformers programs, `python benchmarks/peers.py {eager,compile,trainer,generate,static} SHAPE FOLDER`.

Each reads the same starting weights from a Hugging Face folder, and takes the same batches, optimizer and clipping as ours.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from shapes import BETAS, CLIP, DECAY, LEARNING_RATE, SHAPES, Shape, tokens
from torch import nn
from torch.nn import functional as F
from turns import Turns


class Gpt(nn.Module):
    """GPT-2 in plain PyTorch with its fused attention: the fastest form of this model that PyTorch offers on a CPU."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        d = c.n_embd
        self.heads, self.wte, self.wpe = c.n_head, nn.Embedding(c.vocab_size, d), nn.Embedding(c.n_positions, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(d),
                    "attn": nn.Linear(d, 3 * d),
                    "proj": nn.Linear(d, d),
                    "ln_2": nn.LayerNorm(d),
                    "fc": nn.Linear(d, c.n_inner),
                    "down": nn.Linear(c.n_inner, d),
                }
            )
            for _ in range(c.n_layer)
        )
        self.ln_f = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean loss of tokens x against y, [batch, seq] both."""
        b, t = x.shape
        x = self.wte(x) + self.wpe(torch.arange(t))
        split = lambda a: a.view(b, t, self.heads, -1).transpose(1, 2)
        for w in self.blocks:
            q, k, v = map(split, w["attn"](w["ln_1"](x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + w["proj"](a.transpose(1, 2).reshape(b, t, -1))
            x = x + w["down"](F.gelu(w["fc"](w["ln_2"](x)), approximate="tanh"))
        return F.cross_entropy(F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1), y.flatten())


def plain_gpt(theirs: Any) -> Gpt:
    """The plain model with the weights of transformers' GPT-2, whose linear layers are stored transposed."""
    mine, body = Gpt(theirs.config), theirs.transformer
    pairs = [(mine.wte, body.wte), (mine.wpe, body.wpe), (mine.ln_f, body.ln_f)]
    for w, b in zip(mine.blocks, body.h):
        pairs += [(w["ln_1"], b.ln_1), (w["ln_2"], b.ln_2)]
        pairs += [(w["attn"], b.attn.c_attn), (w["proj"], b.attn.c_proj), (w["fc"], b.mlp.c_fc), (w["down"], b.mlp.c_proj)]
    for a, b in pairs:
        a.weight.data = (b.weight.data.T if isinstance(a, nn.Linear) else b.weight.data).clone().contiguous()
        if getattr(a, "bias", None) is not None:
            a.bias.data = b.bias.data.clone()
    return mine


def hf_model(folder: str) -> Any:
    """transformers' model of a folder, with PyTorch's fused attention and no dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    c = AutoConfig.from_pretrained(folder)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(c, name):
            setattr(c, name, 0.0)
    return AutoModelForCausalLM.from_pretrained(folder, config=c, attn_implementation="sdpa", dtype=torch.float32)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with decay on matrices only."""
    matrices, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)


def steps(turns: Turns, shape: Shape, folder: str, compiled: bool) -> None:
    """One optimizer step a turn, written as PyTorch's own tutorials write it."""
    theirs = hf_model(folder)
    model = plain_gpt(theirs) if shape.model["family"] == "gpt2" else theirs
    optimizer, held = adamw(model), {"i": 0}
    plain = isinstance(model, Gpt)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x, y) if plain else F.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def work() -> dict[str, Any]:
        ids = torch.from_numpy(tokens(shape, held["i"]))
        held["i"] += 1
        loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.item()}

    turns.loop(work)


def trainer(turns: Turns, shape: Shape, folder: str) -> None:
    """transformers' Trainer: a turn is from the end of one of its steps to the end of the next, batch fetching included."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Wait(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            turns.tell(ready=True)
            turns.wait()

        def on_step_end(self, args, state, control, **_):
            turns.done(loss=float(last["loss"]))
            control.should_training_stop = not turns.wait()

    class Told(Trainer):
        def compute_loss(self, *args, **kwargs):
            out = super().compute_loss(*args, **kwargs)
            last["loss"] = (out[0] if isinstance(out, tuple) else out).detach()
            return out

    last: dict[str, torch.Tensor] = {}
    rows = [row for i in range(4) for row in tokens(shape, i)]
    # labels are shifted inside the model: it reads seq + 1 tokens of which the last is a label alone, so give it seq
    data = [{"input_ids": torch.from_numpy(r[:-1].copy()), "labels": torch.from_numpy(r[:-1].copy())} for r in rows]
    out = str(Path(folder).parent / "trainer")
    args = TrainingArguments(
        out, per_device_train_batch_size=shape.batch, max_steps=100000, learning_rate=LEARNING_RATE, weight_decay=DECAY, max_grad_norm=CLIP,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], lr_scheduler_type="constant", optim="adamw_torch_fused", logging_steps=1000000,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    Told(model=hf_model(folder), args=args, train_dataset=data, callbacks=[Wait()]).train()


def generate(turns: Turns, shape: Shape, folder: str, cache: str | None, new: int = 128, prompt: int = 32) -> None:
    """One greedy continuation of one prompt a turn.  cache: transformers' name of a cache; None: its own choice."""
    model = hf_model(folder).eval()
    most = shape.model["max_seq"]
    new, prompt = min(new, most // 2), min(prompt, most // 4)
    ids = torch.from_numpy(tokens(shape, 0)[:1, :prompt].copy())
    how = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0} | (
        {"cache_implementation": cache} if cache else {}
    )

    def work() -> dict[str, Any]:
        with torch.no_grad():
            return {"ids": model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, prompt:].tolist()}

    turns.loop(work, new=new)


WORK = {
    "eager": lambda *a: steps(*a, compiled=False),
    "compile": lambda *a: steps(*a, compiled=True),
    "trainer": trainer,
    "generate": lambda *a: generate(*a, cache=None),
    "static": lambda *a: generate(*a, cache="static"),
}

if __name__ == "__main__":
    WORK[sys.argv[1]](Turns(), SHAPES[sys.argv[2]], sys.argv[3])

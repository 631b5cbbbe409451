"""Fine-tuning a Hugging Face folder on text of your own, with the loss on unseen text before and after.

    python examples/finetune_hf.py [--steps 60] [--base FOLDER] [--out runs/finetune]

Without --base it first trains a small model on the corpus that ships (Shakespeare, Jane Austen) and takes the Hugging Face folder of that run.
Then it learns Python from five files of the standard library, and is scored on a sixth, which it never saw. FOLDER may be any model of
docs/models.md that holds a tokenizer.json: the result has its config.json, tokenizer files and tensor names, and `transformers` loads it.

About 45 s on two CPU cores. It prints both runs, and then

    before  7.64 nats a token, perplexity 2,074, 4.32 bits a byte
    after   5.71 nats a token, perplexity 301, 3.22 bits a byte
"""

import argparse
from pathlib import Path

from meshloom.core.config import load
from meshloom.recipes import folder, launch
from meshloom.recipes.evaluate import evaluate
from meshloom.recipes.load import load_recipe
from meshloom.recipes.run import RunConfig

LIBRARY = Path(argparse.__file__).parent
LEARNED, UNSEEN = ("argparse.py", "inspect.py", "pathlib.py", "tarfile.py", "typing.py"), "subprocess.py"
SIZES = ("model.layers=2", "model.embed=128", "model.heads=4", "model.kv_heads=2", "model.ffn=344", "data.seq=128")
OTHERS = ("eval.batches=2", "checkpoint.every=0", "sample.prompts=[]")


def python(name: str) -> dict:
    """A file of the standard library as a source: each run of lines between blank ones is a document."""
    return {"path": str(LIBRARY / name), "format": "text", "split": "paragraph"}


def make_base(out: Path, steps: int) -> Path:
    """A small model to start from: the shipped recipe with other sizes.  Returns its Hugging Face folder."""
    launch.train(load_recipe("quickstart", [*SIZES, *OTHERS, f"train.steps={steps}", f"schedule.warmup={steps // 10}"]), out)
    return out / "hf"


def finetune(base: Path, out: Path, steps: int) -> Path:
    """Trains all weights of a model on Python.  Returns the Hugging Face folder of the result."""
    recipe = {
        "name": "finetune",
        "model": {"from": str(base)},
        "tokenizer": {"path": str(base)},
        "data": {"train": [python(name) for name in LEARNED], "valid": [python(UNSEEN)], "seq": 128},
        "batch": {"sequences": 16},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "linear", "warmup": steps // 10},
        "train": {"steps": steps},
        "checkpoint": {"every": 0},
    }
    launch.train(load(RunConfig, recipe), out)
    return out / "hf"


def main() -> None:
    """Base, fine-tuning, and the loss of both."""
    asked = argparse.ArgumentParser(description="Fine-tuning a Hugging Face folder.")
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument("--base", type=Path)
    asked.add_argument("--out", type=Path, default=folder.fresh("finetune"))
    args = asked.parse_args()
    base = args.base or make_base(args.out / "base", args.steps)
    tuned = finetune(base, args.out / "tuned", args.steps)
    text = args.out / "unseen.txt"
    text.write_text((LIBRARY / UNSEEN).read_text())
    before, after = (evaluate(str(model), (str(text),), seq=128) for model in (base, tuned))
    print(f"{UNSEEN}, {before.bytes:,} bytes that neither model has seen, in rows of {before.seq} tokens")
    for name, score in (("before", before), ("after", after)):
        print(f"{name:7} {score.loss:.2f} nats a token, perplexity {score.perplexity:,.0f}, {score.bits_per_byte:.2f} bits a byte")
    print(f"{tuned}: {', '.join(sorted(path.name for path in tuned.iterdir()))}")
    assert after.loss < before.loss


if __name__ == "__main__":
    main()

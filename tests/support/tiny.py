"""A causal language model of some 50,000 parameters with a character tokenizer, for tests.

Its sizes are the smallest that vLLM's CPU kernels take (head_dim 32). Norm weights are not all one and the head is
not nearly flat, so that a weight which a back end forgets or confuses shows in the log-probs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Family = Literal["qwen3", "llama"]

HEAD_DIM = 32
SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=?! \n.,:;()[]<>_'\"#"
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
PAD_ID, EOS_ID = SPECIAL.index("<pad>"), SPECIAL.index("<eos>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}<eos>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a character (capitals become small letters), `VOCAB_SIZE` = 64 in all."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    *, family: Family = "qwen3", tied: bool = False, layers: int = 2, hidden: int = 64, seed: int = 0
) -> PreTrainedModel:
    """Build the model, fp32, in training mode, the same for the same arguments; the global RNG stays as it is.

    Args:
        family: the architecture.
        tied: whether the head shares the embedding's weight.
        layers: the number of layers.
        hidden: the hidden size, a multiple of 64 (an even number of heads of size 32).
        seed: of the weights.

    Returns:
        The model.
    """
    if hidden % (2 * HEAD_DIM):
        raise ValueError(f"hidden must be a multiple of {2 * HEAD_DIM}, got {hidden}")
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def write_tiny_model(
    path: Path, *, family: Family = "qwen3", tied: bool = False, layers: int = 2, hidden: int = 64, seed: int = 0
) -> Path:
    """Write the model of `tiny_model` and its tokenizer as a Hugging Face directory (config, fp32 safetensors).

    Args:
        path: the directory; created if absent.
        family: see `tiny_model`, as for the others.
        tied: whether the head shares the embedding's weight.
        layers: the number of layers.
        hidden: the hidden size.
        seed: of the weights.

    Returns:
        ``path``.
    """
    tiny_model(family=family, tied=tied, layers=layers, hidden=hidden, seed=seed).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def write_tiny_reward_model(path: Path, *, seed: int = 3) -> Path:
    """Write a reward model, a Llama with one label whose head is not flat, and its tokenizer.

    Args:
        path: the directory; created if absent.
        seed: of the weights.

    Returns:
        ``path``.
    """
    causal = tiny_model(family="llama", seed=seed)
    causal.config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        judge = LlamaForSequenceClassification(causal.config)
    judge.model.load_state_dict(causal.base_model.state_dict())
    with torch.no_grad():
        draw = torch.Generator().manual_seed(seed)
        judge.score.weight.copy_(torch.randn(judge.score.weight.shape, generator=draw))
    judge.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path

"""A model of words, for routers that take text or want a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path


def words_model(folder: Path, count: int) -> Path:
    """A model whose tokenizer knows so many words: token N is wN, but for the last."""
    folder.mkdir()
    last = count - 1
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": last} | {f"w{number}": number for number in range(last)}, "unk_token": "<unk>"},
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": count, "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32768,
        "bos_token_id": last, "eos_token_id": last,
    }  # fmt: skip
    chat = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat, "bos_token": "<unk>", "eos_token": "<unk>", "unk_token": "<unk>"}
    for name, content in (("tokenizer", tokenizer), ("config", config), ("tokenizer_config", special)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder

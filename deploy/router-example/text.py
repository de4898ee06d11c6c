"""What router and engines must agree on: how a request becomes tokens.

Here every byte is a token. A real router uses the model's own tokenizer and chat template: tokens that differ from the engine's
find nothing.
"""

from __future__ import annotations

from typing import Any


def tokens_of(body: dict[str, Any]) -> list[int]:
    """The prompt's tokens, of a completion or a chat."""
    messages = body.get("messages")
    if messages is None:
        return list(str(body.get("prompt", "")).encode())
    text = "".join(f"<|{message.get('role')}|>{message.get('content')}\n" for message in messages)
    return list(text.encode())

"""Saves conversations to files and loads them: `/save` and `/load`."""

import json
from pathlib import Path
from typing import Any

from .conversation import Conversation, as_text

_ROLES = ("user", "assistant")


def save(conversation: Conversation, name: str) -> tuple[Path, int]:
    """Write the messages to a new file, as JSON if its name ends in .json, else as text.

    Returns the path and the number of messages. Raises ValueError when the file exists or cannot be written.
    """
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    messages = [*system, *conversation.messages]
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps(messages, indent=2, ensure_ascii=False)
    else:
        text = "\n\n".join(f"{message['role']}:\n{as_text(message['content'])}" for message in messages)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except FileExistsError:
        raise ValueError(f"/save {path}: the file exists already; choose another name") from None
    except OSError as error:
        path.unlink(missing_ok=True)  # half of it
        raise ValueError(f"/save {path}: {error.strerror}") from error
    return path, len(messages)


def load(conversation: Conversation, name: str) -> int:
    """Replace the conversation by the messages of a .json file that `save` has written; return how many there are.

    Raises ValueError, and leaves the conversation unchanged, when the file is not valid.
    """
    path = Path(name).expanduser()
    where = f"/load {path}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: is not the JSON that /save FILE.json writes: {error}") from None
    messages = _check_messages(content, where)
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages.pop(0)["content"] if has_system else None
    for number, message in enumerate(messages):
        if message["role"] not in _ROLES:
            raise ValueError(
                f"{where}: message {number + 1} has the role {message['role']!r}, expected user, assistant"
            )
    conversation.restore(messages, system)
    return len(messages)


def _check_messages(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise ValueError(f"{where}: expected a list of messages, found {type(content).__name__}")
    for number, message in enumerate(content, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{where}: message {number} has no role and content")
        if not isinstance(message["content"], str):
            raise ValueError(f"{where}: message {number} has pictures or videos, which are not kept in the file")
    return [{"role": message["role"], "content": message["content"]} for message in content]

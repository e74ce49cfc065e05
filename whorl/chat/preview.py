"""Shows a picture in terminals that can: those with iTerm2's protocol, and kitty's for PNG files."""

import base64
import os
from collections.abc import Mapping
from pathlib import Path

_MOST = 4 << 20  # bytes of a file
_ROWS = 8
_CHUNK = 4096
_PNG = b"\x89PNG"


def picture(path: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what shows a picture; None: the terminal cannot, or the file is large."""
    if path.stat().st_size > _MOST:
        return None
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    if environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return f"\x1b]1337;File=inline=1;height={_ROWS}:{text}\a\n"
    if "KITTY_WINDOW_ID" not in environ or not data.startswith(_PNG):
        return None
    parts = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    heads = [f"a=T,f=100,r={_ROWS},"] + [""] * (len(parts) - 1)
    ends = [1] * (len(parts) - 1) + [0]
    return "".join(f"\x1b_G{h}m={e};{p}\x1b\\" for h, e, p in zip(heads, ends, parts, strict=True)) + "\n"

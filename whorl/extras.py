"""How to install what a feature lacks: whorl is on no package index, where its name belongs to another project."""

import importlib.util
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from whorl import __version__

DISTRIBUTION = "whorl-llm"  # as in pyproject.toml; the import name and the command are whorl

_SERVER = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def need_server() -> None:
    """Raise ValueError when the packages of the extra `serve` are not installed."""
    missing = [name for name in _SERVER if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} not installed: {how_to_install('serve')}")


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this whorl, from the checkout or the wheel that it came from."""
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    origin = _origin()
    if origin is not None and origin.exists():
        return f"pip install '{origin}[{extra}]'"
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    return f"pip install -e '.[{extra}]' in a checkout of whorl, or pip install 'FOLDER/{wheel}[{extra}]'"


def _origin() -> Path | None:
    """Return the local file or folder that pip installed; None if it was something else."""
    from importlib import metadata  # takes 30 ms

    try:
        record = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(record)["url"]) if record else None
    return Path(unquote(url.path)) if url is not None and url.scheme == "file" else None

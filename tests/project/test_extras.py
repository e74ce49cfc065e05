"""How to install an extra: never by a name that the package index has given, or could give, to somebody else."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from whorl import __version__, extras
from whorl.extras import DISTRIBUTION, how_to_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# whorl or whorl-llm where pip would look for it on the index: not a path, not part of another name.
_INSTALL = r"(?:pip3? (?:install|download)|pipx (?:install|run)|uvx|uv (?:add|tool install))"
BY_NAME = re.compile(rf"(?<![\w./@-])whorl(-llm)?\[|{_INSTALL}(?: +-\S+)* +['\"]?whorl(-llm)?(?=[\s'\"`=<>,;)]|$)")


def test_the_distribution_has_its_own_name_and_names_it_in_its_extras() -> None:
    assert PROJECT["name"] == DISTRIBUTION != "whorl"
    needs = [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    assert {need.partition("[")[0] for need in needs if need.startswith("whorl")} == {DISTRIBUTION}


@pytest.mark.parametrize(
    "text",
    [
        "pip install whorl",
        "pip install -U 'whorl[serve]'",
        "needs `whorl[serve]`: see",
        "uv add whorl",
    ],
)
def test_the_foreign_name_would_be_noticed(text: str) -> None:
    assert BY_NAME.search(text)
    assert not BY_NAME.search(text.replace("whorl", "./whorl"))


def test_no_file_tells_anybody_to_install_it_by_name() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in {*tracked} - {"pyproject.toml", "tests/project/test_extras.py"}:
        path = ROOT / name
        if path.suffix not in (".png", ".jsonl") and path.is_file():
            match = BY_NAME.search(path.read_text(encoding="utf-8", errors="replace"))
            assert match is None, f"{name}: {match[0]!r} is another project's package"


def test_what_can_be_installed_exists() -> None:
    """Extras in commands of pages and in messages are those of pyproject.toml."""
    known = set(PROJECT["optional-dependencies"])
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("whorl/**/*.py"), *ROOT.glob("deploy/**/*"))
    for path in filter(Path.is_file, pages):
        for match in re.finditer(r"pip install[^\n]*?\.\[([\w,]+)\]|how_to_install\(.(\w+).\)", path.read_text()):
            assert set((match[1] or match[2]).split(",")) <= known, f"{path.name}: {match[0]}"


def test_from_a_checkout() -> None:
    assert how_to_install("serve") == f"pip install -e '{ROOT}[serve]'"


def test_from_a_wheel_or_from_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "whorl" / "extras.py"))
    wheel = tmp_path / "a wheel.whl"
    record = f'{{"url": "file://{tmp_path}/a%20wheel.whl", "archive_info": {{}}}}'
    installed = SimpleNamespace(read_text=lambda name: record if name == "direct_url.json" else None)
    monkeypatch.setattr(metadata, "distribution", lambda name: {DISTRIBUTION: installed}[name])
    by_hand = f"pip install -e '.[serve]' in a checkout of whorl, or pip install 'FOLDER/whorl_llm-{__version__}-py3-"
    assert how_to_install("serve").startswith(by_hand)  # the wheel is no longer there
    wheel.touch()
    assert how_to_install("serve") == f"pip install '{wheel}[serve]'"
    record = '{"url": "https://example.com/w.whl", "archive_info": {}}'
    assert how_to_install("serve").startswith(by_hand)
    record = ""
    assert how_to_install("serve").startswith(by_hand)

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert how_to_install("serve").startswith(by_hand)

"""Write what the documentation does not write by hand: drawings, charts, tables of figures and the API page.

python docs/source/build.py            write them
python docs/source/build.py --check    exit 1 and name the files that are out of date
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api
import charts
import figures
import pictures

ROOT = Path(__file__).parents[2]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def built() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    folder = ROOT / "docs" / "pictures"
    files = {folder / f"{name}.svg": draw().svg() for name, draw in pictures.PICTURES.items()}
    files[folder / "speed.svg"] = charts.speed().svg()
    files |= {page: figures.fill(page.read_text()) for page in pages() if "<!-- figures: " in page.read_text()}
    files[ROOT / "docs" / "api.md"] = api.page()
    return files


def main() -> int:
    contents = built()
    stale = [path for path, text in contents.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run make docs", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(contents[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

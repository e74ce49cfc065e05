"""Write what `make test-all` found, from pytest's JUnit file: `record_all.py RESULT.xml RECORD.md LONG.txt`.

RECORD.md: the result. LONG.txt: the tests that took a second or more, which `make test` leaves out (tests/conftest.py).
"""

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from whorl.device import default_device, device_name, versions


def record(junit: str) -> str:
    suites = ElementTree.fromstring(junit).iter("testsuite")
    counts: Counter[str] = Counter()
    seconds = 0.0
    reasons: Counter[str] = Counter()
    for suite in suites:
        seconds += float(suite.get("time", 0))
        counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
        reasons.update(skip.get("message", "") for skip in suite.iter("skipped"))
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    failed = counts["failures"] + counts["errors"]
    device = default_device()
    lines = [
        "# The last `make test-all`",
        "",
        f"- Result: {passed} passed, {failed} failed, {counts['skipped']} skipped, in {seconds / 60:.1f} minutes",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime())}",
        f"- Commit: {_git('rev-parse', '--short', 'HEAD')}{' with changes' if _git('status', '--porcelain') else ''}",
        f"- Device: {device}, {device_name(device)}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions().items())}",
    ]
    if reasons:
        lines += ["", "Skipped:", "", *(f"- {count} x {reason}" for reason, count in sorted(reasons.items()))]
    return "\n".join(lines) + "\n"


def long_tests(junit: str, least: float = 1.0) -> str:
    """Return seconds, file and name of each test that took `least` seconds or more; not of those marked slow."""
    lines = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        is_slow = any(p.get("name") == "slow" for p in case.iter("property"))
        if not is_slow and (seconds := float(case.get("time", 0))) >= least:
            file = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
            lines.append(f"{seconds:.0f} {file}::{case.get('name')}")
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.split(" ", 1)[1]))


def _git(*arguments: str) -> str:
    completed = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return completed.stdout.strip() if completed.returncode == 0 else "unknown"


if __name__ == "__main__":
    result = Path(sys.argv[1]).read_text()
    Path(sys.argv[2]).write_text(record(result))
    Path(sys.argv[3]).write_text(long_tests(result))

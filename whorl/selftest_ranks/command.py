"""`whorl selftest --ranks`: each check as it ends, then the report; the exit code says whether all passed."""

import json
import sys
from typing import NoReturn

from . import Outcome, render, run


def run_and_print(ranks: int, device: str, as_json: bool) -> NoReturn:
    """Run all checks, print the report as text or JSON, and exit with 0 if all passed, else 1."""

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.name}: {outcome.status}", file=sys.stderr, flush=True)

    report = run(ranks, device, tell=tell)
    print(json.dumps(report.as_dict(), indent=2) if as_json else render(report))
    sys.exit(0 if report.passed else 1)

"""The command `whorl`, and `python -m whorl`. Ctrl-C ends it without a traceback from here on."""

import os
import sys

try:
    from whorl.startup import INTERRUPTED, end_at_once, leave
except KeyboardInterrupt:
    os._exit(130)


def main() -> None:
    end_at_once()
    from whorl.cli import run

    code = run()
    if code == INTERRUPTED:
        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

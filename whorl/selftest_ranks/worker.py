"""One process of a check, started by torchrun: runs the check and writes its result into a file."""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path

from .checks import CHECKS, Skipped

# After this time a collective raises an error; shorter than the limit of a check, so that a report names the rank.
_LIMIT = datetime.timedelta(seconds=240)


def main(name: str, device: str, ranks: str, folder: str) -> int:
    """Run the check `name`, write rank, status and detail to FOLDER/rankN.json, and return 1 if it failed, else 0."""
    rank = int(os.environ["RANK"])
    status, detail = "passed", ""
    try:
        detail = _run(name, device, int(ranks), rank)
    except Skipped as reason:
        status, detail = "skipped", str(reason)
    except BaseException as error:  # whatever a vendor's library raises goes into the report
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first_line = (str(error).strip().splitlines() or [""])[0]
        status, detail = "failed", f"{type(error).__name__}: {first_line} ({Path(frame.filename).name}:{frame.lineno})"
    path = Path(folder) / f"rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps({"rank": rank, "status": status, "detail": detail}))
    path.with_suffix(".part").rename(path)
    return int(status == "failed")


def _run(name: str, device: str, ranks: int, rank: int) -> str:
    check = CHECKS[name]
    if check.starts_ranks:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(variable, None)  # the engine starts its ranks itself
        return check.run(device, ranks)
    import torch
    from torch import distributed

    from whorl.device import collective_backend, use_device

    use_device(device, int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(collective_backend(device), timeout=_LIMIT)
    torch.manual_seed(rank)
    try:
        return check.run(device, ranks)
    finally:
        if sys.exc_info()[0] is None:  # after an error this could wait for ever for a lost rank
            distributed.destroy_process_group()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread of a broken collective may block a normal exit

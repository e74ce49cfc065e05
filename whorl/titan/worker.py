"""The program that torchrun starts on every rank of `whorl train`: TorchTitan's main with our trainer."""

import signal
import sys
import traceback
from pathlib import Path

from whorl.device import HOST, default_device
from whorl.titan.ending import end_with_parent
from whorl.titan.train_command import REASON

PACKAGE = Path(__file__).parents[1]


def main() -> None:
    """Train on this rank, with the command-line arguments as TorchTitan's options.

    The log ends with the reason of an error, if it has one that is written for users.
    """
    end_with_parent(signal.SIGKILL)()  # otherwise a rank would train on after torchrun was killed
    if default_device() == HOST:
        from whorl.titan import cpu

        cpu.install()
    import torchtitan.train

    from whorl.titan.register import register
    from whorl.titan.trainer import WhorlTrainer

    register()
    try:
        torchtitan.train.main(WhorlTrainer)
    except BaseException as error:
        if (reason := reason_of(error)) is None:
            raise
        traceback.print_exc()
        print(f"{REASON}{reason}", file=sys.stderr)
        sys.exit(1)


def reason_of(error: BaseException) -> str | None:
    """Return the message of an error of the system, or of one that our code raises on purpose; None for any other."""
    from torch.distributed.checkpoint.api import CheckpointException

    from whorl.titan.checkpoint_files import first_error
    from whorl.titan.nan_watch import NotFinite

    if isinstance(error, CheckpointException):
        error = first_error(error)
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    is_expected = isinstance(error, OSError | NotFinite) or (isinstance(error, ValueError) and is_ours)
    return str(error) if is_expected else None


if __name__ == "__main__":
    main()

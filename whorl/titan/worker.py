"""The program that torchrun starts on every rank of `whorl train`: TorchTitan's main with our trainer."""

import signal

from whorl.device import HOST, default_device
from whorl.titan.ending import end_with_parent


def main() -> None:
    """Train on this rank, with the command-line arguments as TorchTitan's options."""
    end_with_parent(signal.SIGKILL)()  # otherwise a rank would train on after torchrun was killed
    if default_device() == HOST:
        from whorl.titan import cpu

        cpu.install()
    import torchtitan.train

    from whorl.titan.register import register
    from whorl.titan.trainer import WhorlTrainer

    register()
    torchtitan.train.main(WhorlTrainer)


if __name__ == "__main__":
    main()

"""What torchrun starts on every rank of `whorl train`: TorchTitan's own main, with our trainer and our names."""

import signal

from whorl.device import HOST, default_device
from whorl.titan.ending import end_with_parent


def main() -> None:
    end_with_parent(signal.SIGKILL)()  # a rank without torchrun would train on, with nobody to end it
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

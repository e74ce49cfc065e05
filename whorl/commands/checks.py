"""Commands that check: a configuration, this machine's operators, and their numbers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from whorl.options import Device, Json, exit_on_bad_usage, need_torch, print_json, stop
from whorl.startup import starting


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A model folder, config.json, launch script, YAML or JSON flags, or a log."
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="megatron, mindspeed, mindspeed-mm, bridge, vllm, sglang, hf, torchtitan, whorl, or a job's: verl, "
            "slime, vime, nemo-rl, trl, prime-rl. Default: guessed."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="The model will be trained: check gradients too.")] = False,
    device: Annotated[str | None, typer.Option(help="npu or cuda: the device the model will run on.")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A log or traceback to explain.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A torch profiler trace: report which rotary operators ran.")
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A trainer to compare with its rollout; PATH is then the model of both. Without --rollout, FILE is a "
            "job that starts both.",
        ),
    ] = None,
    rollout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The launch of the trainer's rollout: vLLM, SGLang or whorl.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report which rotary path a configuration takes, and what is wrong with it, before anything runs.

    With --trainer and --rollout: what the two sides of a training compute differently, by which mechanism, and the fix.
    """
    if not any((path, log, trace, trainer, rollout)):
        stop("doctor: nothing to check; give a PATH, --log FILE, --trace FILE or --trainer FILE")
    from whorl.doctor.command import run

    sys.exit(run(path, framework, settings, train, device, log, trace, as_json, trainer, rollout))


def ops(as_json: Json = False) -> None:
    """List the operators and, for each backend, whether it runs here or why not."""
    need_torch()
    with starting():
        from whorl.ops import availability

    print(availability.as_json() if as_json else availability.as_table())


def selftest(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: 1 on a CPU, else up to 8, which compile kernels.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Check N ranks together instead, one device each."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every case of every operator in every backend of this machine; the report belongs in a bug report.

    With --ranks N, check collectives, sequence and tensor parallelism, and every way of sharding a training step over
    this machine's collectives (NCCL, HCCL; gloo on a CPU) against the same work on one rank.
    """
    need_torch()
    with starting():
        from whorl import selftest as tests
        from whorl.device import default_device, require

    with exit_on_bad_usage():
        chosen = require(device.value if device else default_device())
    if ranks is not None:
        from whorl.selftest_ranks.command import run_and_print

        with exit_on_bad_usage():
            run_and_print(ranks, chosen, as_json)
    report = tests.run(chosen, jobs=jobs or tests.default_jobs(chosen))
    if as_json:
        print_json(report.as_dict())
    else:
        print(tests.render(report))
    sys.exit(0 if report.passed else 1)

"""Turns the options of `whorl bench train` into a table of rows, a loss curve, or an earlier curve shown again."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from whorl.bench.outputs import need_plot, write_document
from whorl.bench.provenance import Document
from whorl.bench.train_options import TrainOptions
from whorl.extras import how_to_install
from whorl.files import check_output_file
from whorl.startup import starting

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right
CURVE_ONLY = ("read", "plot")


def build_benchmark(options: TrainOptions) -> Work:
    """Return the benchmark that the options select, ready to run; raises ValueError for options that conflict."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError(f"bench train needs torchtitan: {how_to_install('train')}")
    if misplaced := [name for name in CURVE_ONLY if getattr(options, name) is not None and not options.curve]:
        raise ValueError(f"--{misplaced[0]} needs --curve")
    if options.plot is not None:
        need_plot(options.plot)
    if options.out is not None:
        check_output_file(options.out)
    earlier = None if options.read is None else _read(options.read)
    with starting():
        from whorl.device import default_device
    device = options.device or default_device()
    if device == "cpu":
        from whorl.titan import cpu

        cpu.install()
    return _curve(options, device, earlier) if options.curve else _table(options, device)


def _read(path: Path) -> Document:
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--read {path}: cannot be read: {error}") from error
    return document


def _table(options: TrainOptions, device: str) -> Work:
    from whorl.bench import train, train_report

    names = ("tiny", "rows", "layers", "seq", "warmup", "peer", "ring", "time_limit", "profile", "out")
    settings = train.TrainSettings.resolve(
        device=device, steps=options.steps or 6, **{name: getattr(options, name) for name in names}
    )

    def work() -> tuple[Document, str, bool]:
        document = train.run(settings)
        return document, train_report.render(document), train.is_good(document)

    return work


def _curve(options: TrainOptions, device: str, earlier: Document | None) -> Work:
    from whorl.bench import train_curve

    row = options.rows if "," not in options.rows else "kernels"
    settings = train_curve.CurveSettings.resolve(device=device, tiny=options.tiny, row=row, steps=options.steps or 200)

    def work() -> tuple[Document, str, bool]:
        document = earlier or train_curve.run(settings)
        if options.out is not None:
            write_document(document, options.out)
        if options.plot is not None:
            train_curve.write_plot(document, options.plot)
        return document, train_curve.render(document), train_curve.is_good(document)

    return work

"""What `whorl bench train` makes of its options: a table of rows, a curve, or an earlier curve read again."""

import importlib.util
import json
from collections.abc import Callable

from whorl.bench.ops_report import need_plot
from whorl.bench.provenance import Document
from whorl.bench.train_options import TrainOptions
from whorl.device import default_device

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right
CURVE_ONLY = ("read", "plot")


def prepare(asked: TrainOptions) -> Work:
    """Refuse with ValueError what does not go together; the rest is the work."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError("bench train needs torchtitan: pip install 'whorl[train]'")
    if strangers := [name for name in CURVE_ONLY if getattr(asked, name) is not None and not asked.curve]:
        raise ValueError(f"--{strangers[0]} is about a curve: add --curve")
    if asked.plot is not None:
        need_plot(asked.plot)
    device = asked.device or default_device()
    if device == "cpu":
        from whorl.titan import cpu

        cpu.install()
    return _curve(asked, device) if asked.curve else _table(asked, device)


def _table(asked: TrainOptions, device: str) -> Work:
    from whorl.bench import train, train_report

    taken = ("tiny", "rows", "layers", "seq", "warmup", "peer", "time_limit", "profile", "out")
    settings = train.TrainSettings.resolve(
        device=device, steps=asked.steps or 6, **{name: getattr(asked, name) for name in taken}
    )

    def work() -> tuple[Document, str, bool]:
        document = train.run(settings)
        return document, train_report.render(document), train.is_good(document)

    return work


def _curve(asked: TrainOptions, device: str) -> Work:
    from whorl.bench import train_curve

    row = asked.rows if "," not in asked.rows else "kernels"
    settings = train_curve.CurveSettings.resolve(device=device, tiny=asked.tiny, row=row, steps=asked.steps or 200)
    earlier = None if asked.read is None else json.loads(asked.read.read_text(encoding="utf-8"))

    def work() -> tuple[Document, str, bool]:
        document = earlier or train_curve.run(settings)
        if asked.out is not None:
            asked.out.write_text(json.dumps(document, indent=2), encoding="utf-8")
        if asked.plot is not None:
            train_curve.write_plot(document, asked.plot)
        return document, train_curve.render(document), train_curve.is_good(document)

    return work

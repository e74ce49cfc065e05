"""What `whorl bench train` makes of its options: a table of rows, a curve, or an earlier curve read again."""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from whorl.bench.ops_report import need_plot
from whorl.bench.provenance import Document
from whorl.device import default_device

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right
CURVE_ONLY = ("read", "plot")


def prepare(**given: Any) -> Work:
    """Refuse with ValueError what does not go together; the rest is the work."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError("bench train needs torchtitan: pip install 'whorl[train]'")
    if strangers := [name for name in CURVE_ONLY if given[name] is not None and not given["curve"]]:
        raise ValueError(f"--{strangers[0]} is about a curve: add --curve")
    if given["plot"] is not None:
        need_plot(given["plot"])
    device = str(given["device"] or default_device())
    if device == "cpu":
        from whorl.titan import cpu

        cpu.install()
    return _curve(given, device) if given["curve"] else _table(given, device)


def _table(given: dict[str, Any], device: str) -> Work:
    from whorl.bench import train, train_report

    taken = ("tiny", "rows", "layers", "seq", "warmup", "peer", "time_limit", "profile", "out")
    settings = train.Settings.resolve(device=device, steps=given["steps"] or 6, **{name: given[name] for name in taken})

    def work() -> tuple[Document, str, bool]:
        document = train.run(settings)
        return document, train_report.render(document), train.is_good(document)

    return work


def _curve(given: dict[str, Any], device: str) -> Work:
    from whorl.bench import train_curve

    row = given["rows"] if "," not in given["rows"] else "kernels"
    settings = train_curve.Settings.resolve(device=device, tiny=given["tiny"], row=row, steps=given["steps"] or 200)
    earlier = None if given["read"] is None else json.loads(given["read"].read_text(encoding="utf-8"))

    def work() -> tuple[Document, str, bool]:
        document = earlier or train_curve.run(settings)
        if given["out"] is not None:
            given["out"].write_text(json.dumps(document, indent=2), encoding="utf-8")
        if given["plot"] is not None:
            train_curve.write_plot(document, given["plot"])
        return document, train_curve.render(document), train_curve.is_good(document)

    return work

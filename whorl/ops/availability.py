"""`whorl ops`: list every operator and, for each backend, whether it runs on this machine or why not."""

import json

from whorl.device import BACKENDS, HOST, REFERENCE, default_device, device_name

from . import OPS, _torch_npu
from .cpu import library


def as_json() -> str:
    """Return the list as JSON."""
    device = default_device()
    operators = []
    for name, op in OPS.items():
        backends = {b: {"available": why is None, "reason": why} for b, why in op.availability(device).items()}
        operators.append({"name": name, "schema": f"whorl::{name}{op.schema}", "backends": backends})
    return json.dumps({"device": device, "device_name": device_name(device), "operators": operators}, indent=2)


def as_table() -> str:
    """Return the list as a table for a terminal."""
    device = default_device()
    backends = (REFERENCE, *BACKENDS)
    rows: list[tuple[str, ...]] = [("operator", *backends)]
    for name, op in OPS.items():
        reasons = op.availability(device)
        rows.append((name, *((reasons[b] or "yes") if b in reasons else "-" for b in backends)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    heading = [f"device {device}: {device_name(device)}"]
    if device == HOST:
        heading.append(library.describe())
    if device == "npu":
        heading.append(f"batch-invariant operators of AscendC: {_torch_npu.batch_invariant_operators()}")
    return "\n".join([*heading, "", *cells])

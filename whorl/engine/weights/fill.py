"""From checkpoint to model: every tensor accounted for, then copied, one at a time."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Slot, Weighted, slots, weighted
from whorl.nn import weights as formats

from .checkpoint import Checkpoint, Source, some

log = logging.getLogger(__name__)
_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # into each other, where a slot allows it


def check_fit(model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes are not the model's; the model may be on "meta"."""
    wanted = slots(model)
    _check(checkpoint.path, _sources(model, checkpoint), wanted, _copies(wanted))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    layers, only = getattr(model, "ignored_layers", ()), getattr(model, "only", "")
    mine = {name: source for name, source in checkpoint.sources.items() if name.startswith(only)}
    return {n: s for n, s in mine.items() if not n.endswith(model.ignored) and not n.startswith(layers)}


def fill(model: Any, checkpoint: Checkpoint, *, progress: bool = False, unpack: bool = False) -> None:
    """Copy every tensor of a checkpoint that fits into its slot, as the slot's format wants it.

    unpack: quantised weights become plain ones. A layer is finished when its last tensor is there, so that no more than
    one is held both ways.
    """
    wanted, sources = slots(model), _sources(model, checkpoint)
    copies = {name: slot for name, slot in _copies(wanted).items() if name in sources}
    conversion = _conversion(sources, {**wanted, **copies}, model.dtype)
    del wanted  # views of parameters, which would keep them alive
    owners = _owners(model, sources)
    with torch.inference_mode(), progress_bar(f"Loading {conversion}", _total(sources.values()), progress) as advance:
        for name, source in sources.items():
            if name in owners:
                owners[name].copy(name, source, unpack)
            advance(source.nbytes)
        for name, slot in copies.items():
            if not torch.equal(_read(sources[name], slot).to(slot.into), slot.into):
                raise ValueError(
                    f"{checkpoint.path}: config.json says tie_word_embeddings, but {name} is another matrix than the "
                    f"embedding; set tie_word_embeddings to false"
                )
    log.info("%s: %d tensors, %s", checkpoint.path, len(sources), conversion)


class _Owner:
    """A layer that is being filled, and its slots that are still empty."""

    def __init__(self, layer: Weighted, empty: dict[str, Slot]) -> None:
        self.layer, self.empty = layer, empty

    def copy(self, name: str, source: Source, unpack: bool) -> None:
        _copy(name, self.empty.pop(name), source)
        if self.empty:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.layer.finish()
            if unpack:
                self.layer.unpack(formats.DENSE)


def _owners(model: Any, sources: Mapping[str, Source]) -> dict[str, _Owner]:
    """The layer of each tensor. Slots that may stay empty get what they have then."""
    found: dict[str, _Owner] = {}
    for name, layer in weighted(model):
        empty = dict(layer.slots(name))
        for lost in [source for source in empty if source not in sources]:
            slot = empty.pop(lost)
            assert slot.default is not None, lost
            with torch.no_grad():
                slot.into.fill_(slot.default)
        found |= dict.fromkeys(empty, _Owner(layer, empty))
    return found


def _copies(wanted: Mapping[str, Slot]) -> dict[str, Slot]:
    """What a checkpoint may hold a second time: the head of a model that uses the embedding for it."""
    if any(name.startswith("lm_head.") for name in wanted):
        return {}
    found = ((name.partition("embed_tokens."), slot) for name, slot in wanted.items())
    return {f"lm_head.{end}": slot for (_, is_embedding, end), slot in found if is_embedding}


def _check(path: Path, sources: Mapping[str, Source], wanted: Mapping[str, Slot], copies: Mapping[str, Slot]) -> None:
    every = {**wanted, **copies}
    found = {
        "missing": [n for n, slot in wanted.items() if n not in sources and slot.default is None],
        "not part of the model": [n for n in sources if n not in every],
        "of another shape": [
            f"{n} {list(s.shape)}, expected {list(every[n].shape)}"
            for n, s in sources.items()
            if n in every and not every[n].fits(s.shape)
        ],
        "of a dtype that cannot be converted": [
            f"{n} {s.dtype}"
            for n, s in sources.items()
            if n in every and every[n].dtype is None and s.gives not in (*_CONVERTED, *every[n].also)
        ],
        "of another dtype": [
            f"{n} {s.dtype}, expected {str(every[n].dtype).removeprefix('torch.')}"
            for n, s in sources.items()
            if n in every and every[n].dtype not in (None, s.gives)
        ],
    }
    wrong = [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]
    if wrong:
        raise ValueError(f"{path}: the tensors do not fit config.json; {'; '.join(wrong)}")


def _read(source: Source, slot: Slot) -> Tensor:
    if source.shape == slot.shape:
        return source.read(slot.index)
    if slot.is_exchanged(source.shape):
        return source.read((*slot.index[:-2], *slot.index[:-3:-1])).transpose(-1, -2)
    # One number: [], [1] and [1, 1] are the same to those who write scales.
    return source.read(tuple(slice(None) for _ in source.shape)).reshape(slot.into.shape)


def _copy(name: str, slot: Slot, source: Source) -> None:
    for other in slot.more:
        _copy(name, other, source)
    part = _read(source, slot)
    assert part.shape == slot.into.shape, f"{name}: {list(part.shape)} goes into {list(slot.into.shape)}"
    slot.into.copy_(part)
    if slot.into.dtype == torch.float16 and part.dtype != torch.float16 and not slot.into.isfinite().all():
        raise ValueError(f"{name}: values of {part.dtype} do not fit float16; load with dtype bfloat16 or float32")


def _conversion(sources: Mapping[str, Source], wanted: Mapping[str, Slot], dtype: torch.dtype) -> str:
    """Such as "BF16 to float32"."""
    kept = {s.dtype for n, s in sources.items() if n in wanted and wanted[n].dtype is not None}
    converted = sorted({s.dtype for n, s in sources.items() if n not in wanted or wanted[n].dtype is None})
    as_stored = f", {', '.join(sorted(kept))} as stored" if kept else ""
    return f"{', '.join(converted)} to {str(dtype).removeprefix('torch.')}{as_stored}"


def _total(sources: Iterable[Source]) -> int:
    return sum(source.nbytes for source in sources)


@contextmanager
def progress_bar(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    shown = shown and console.is_terminal  # a bar that is gone at the end leaves an empty line in a file
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)

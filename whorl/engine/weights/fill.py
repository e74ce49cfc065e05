"""Fill a model from a checkpoint: check that every tensor has a place, then copy them one at a time."""

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
_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # to each other, if a slot allows it


def check_fit(model: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError if names, shapes or dtypes of a checkpoint are not the model's; the model may be on "meta"."""
    model_slots = slots(model)
    _check(checkpoint.path, _sources(model, checkpoint), model_slots, _copies(model_slots))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the tensors that the model loads: names that begin with `only`, less the endings in `ignored` and the
    beginnings in `ignored_layers`, all of them attributes of the model."""
    layers, only = getattr(model, "ignored_layers", ()), getattr(model, "only", "")
    sources = {name: source for name, source in checkpoint.sources.items() if name.startswith(only)}
    return {n: s for n, s in sources.items() if not n.endswith(model.ignored) and not n.startswith(layers)}


def fill(model: Any, checkpoint: Checkpoint, *, progress: bool = False, unpack: bool = False) -> None:
    """Copy every tensor of a checkpoint that passed `check_fit` to its slot, in the slot's format.

    unpack: unpack quantised weights to plain ones. A layer is unpacked as soon as its last tensor is there, so that no
    more than one layer is in memory in both forms.
    """
    model_slots, sources = slots(model), _sources(model, checkpoint)
    copies = {name: slot for name, slot in _copies(model_slots).items() if name in sources}
    conversion = _conversion(sources, {**model_slots, **copies}, model.dtype)
    del model_slots  # views of parameters, which would keep them alive
    owners = _owners(model, sources)
    with torch.inference_mode(), progress_bar(f"Loading {conversion}", _total(sources.values()), progress) as advance:
        for name, source in sources.items():
            if name in owners:
                owners[name].copy(name, source, unpack)
            advance(source.nbytes)
        for name, slot in copies.items():
            if not torch.equal(_read(sources[name], slot).to(slot.into), slot.into):
                raise ValueError(
                    f"{checkpoint.path}: config.json has tie_word_embeddings, but {name} differs from the embedding; "
                    f"set tie_word_embeddings to false"
                )
    log.info("%s: %d tensors, %s", checkpoint.path, len(sources), conversion)


class _Owner:
    """A layer that is being filled, and those of its slots that are still empty."""

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
    """Return the layer of each tensor. Optional slots without a tensor are filled with their default."""
    owners: dict[str, _Owner] = {}
    for name, layer in weighted(model):
        empty = dict(layer.slots(name))
        for missing in [source for source in empty if source not in sources]:
            slot = empty.pop(missing)
            assert slot.default is not None, missing
            with torch.no_grad():
                slot.into.fill_(slot.default)
        owners |= dict.fromkeys(empty, _Owner(layer, empty))
    return owners


def _copies(model_slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Return slots of tensors that a checkpoint may hold twice: a head that is tied to the embedding."""
    if any(name.startswith("lm_head.") for name in model_slots):
        return {}
    parts = ((name.partition("embed_tokens."), slot) for name, slot in model_slots.items())
    return {f"lm_head.{end}": slot for (_, is_embedding, end), slot in parts if is_embedding}


def _check(
    path: Path, sources: Mapping[str, Source], model_slots: Mapping[str, Slot], copies: Mapping[str, Slot]
) -> None:
    every = {**model_slots, **copies}
    problems = {
        "missing": [n for n, slot in model_slots.items() if n not in sources and slot.default is None],
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
    lines = [f"{len(names)} {problem}: {some(names)}" for problem, names in problems.items() if names]
    if lines:
        raise ValueError(f"{path}: the tensors do not fit config.json; {'; '.join(lines)}")


def _read(source: Source, slot: Slot) -> Tensor:
    """Return this rank's part of a tensor, in the shape of the slot; the file may hold it transposed."""
    if source.shape == slot.shape:
        return source.read(slot.index)
    if slot.is_exchanged(source.shape):
        return source.read((*slot.index[:-2], *slot.index[:-3:-1])).transpose(-1, -2)
    # One number: quantisers write scales as [], [1] or [1, 1].
    return source.read(tuple(slice(None) for _ in source.shape)).reshape(slot.into.shape)


def _copy(name: str, slot: Slot, source: Source) -> None:
    """Copy a tensor to its slot; ValueError if a value is too large for float16."""
    for second in slot.more:
        _copy(name, second, source)
    part = _read(source, slot)
    assert part.shape == slot.into.shape, f"{name}: {list(part.shape)} goes into {list(slot.into.shape)}"
    slot.into.copy_(part)
    if slot.into.dtype == torch.float16 and part.dtype != torch.float16 and not slot.into.isfinite().all():
        raise ValueError(f"{name}: values of {part.dtype} do not fit float16; load with dtype bfloat16 or float32")


def _conversion(sources: Mapping[str, Source], all_slots: Mapping[str, Slot], dtype: torch.dtype) -> str:
    """Return a description of the conversion, such as "BF16 to float32"."""
    unchanged = {s.dtype for n, s in sources.items() if n in all_slots and all_slots[n].dtype is not None}
    converted = sorted({s.dtype for n, s in sources.items() if n not in all_slots or all_slots[n].dtype is None})
    as_stored = f", {', '.join(sorted(unchanged))} as stored" if unchanged else ""
    return f"{', '.join(converted)} to {str(dtype).removeprefix('torch.')}{as_stored}"


def _total(sources: Iterable[Source]) -> int:
    return sum(source.nbytes for source in sources)


@contextmanager
def progress_bar(description: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes on a terminal; yield a function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    shown = shown and console.is_terminal  # a bar that is gone at the end leaves an empty line in a file
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)

"""Fill a model from a checkpoint: check that every tensor has a place, then copy them one at a time."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Destination, Weighted, destinations, weighted
from whorl.nn import weights as formats

from .checkpoint import Checkpoint, Source, some

log = logging.getLogger(__name__)
_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # to each other, if a destination allows it


def check_fit(model: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError if names, shapes or dtypes of a checkpoint are not the model's; the model may be on "meta"."""
    expected = destinations(model)
    _check(checkpoint.path, _sources(model, checkpoint), expected, _copies(expected))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the tensors that the model loads: names that begin with `only`, less the endings in `ignored` and the
    beginnings in `ignored_layers`, all of them attributes of the model, and less what only other ranks have."""
    layers, only = getattr(model, "ignored_layers", ()), getattr(model, "only", "")
    sources = {name: source for name, source in checkpoint.sources.items() if name.startswith(only)}
    elsewhere = {beginning for name, layer in weighted(model) for beginning in layer.elsewhere(name)}
    if elsewhere:
        sources = {n: s for n, s in sources.items() if elsewhere.isdisjoint(_beginnings(n))}
    return {n: s for n, s in sources.items() if not n.endswith(model.ignored) and not n.startswith(layers)}


def _beginnings(name: str) -> Iterator[str]:
    """Yield the beginnings of a name that end with a dot."""
    return (name[: i + 1] for i, letter in enumerate(name) if letter == ".")


def fill(model: Any, checkpoint: Checkpoint, *, progress: bool = False, unpack: bool = False) -> None:
    """Copy every tensor of a checkpoint that passed `check_fit` to its destination, in the destination's format.

    unpack: unpack quantised weights to plain ones. A layer is unpacked as soon as its last tensor is there, so that no
    more than one layer is in memory in both forms.
    """
    expected, sources = destinations(model), _sources(model, checkpoint)
    copies = {name: destination for name, destination in _copies(expected).items() if name in sources}
    conversion = _conversion(sources, {**expected, **copies}, model.dtype)
    del expected  # views of parameters, which would keep them alive
    owners, num_bytes = _owners(model, sources), sum(source.nbytes for source in sources.values())
    with torch.inference_mode(), progress_bar(f"Loading {conversion}", num_bytes, progress) as advance:
        for name, source in sources.items():
            if name in owners:
                owners[name].copy(name, source, unpack)
            advance(source.nbytes)
        for name, destination in copies.items():
            if not torch.equal(read_part(sources[name], destination).to(destination.into), destination.into):
                raise ValueError(
                    f"{checkpoint.path}: config.json has tie_word_embeddings, but {name} differs from the embedding; "
                    f"set tie_word_embeddings to false"
                )
    log.info("%s: %d tensors, %s", checkpoint.path, len(sources), conversion)


class _Owner:
    """A layer that is being filled, and those of its destinations that are still empty."""

    def __init__(self, layer: Weighted, empty: dict[str, Destination]) -> None:
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
    """Return the layer of each tensor. Optional destinations without a tensor are filled with their default."""
    owners: dict[str, _Owner] = {}
    for name, layer in weighted(model):
        empty = dict(layer.destinations(name))
        for missing in [source for source in empty if source not in sources]:
            destination = empty.pop(missing)
            assert destination.default is not None, missing
            with torch.no_grad():
                for part in destination.parts:
                    part.into.fill_(destination.default)
        owners |= dict.fromkeys(empty, _Owner(layer, empty))
    return owners


def _copies(expected: Mapping[str, Destination]) -> dict[str, Destination]:
    """Return destinations of tensors that a checkpoint may hold twice: a head that is tied to the embedding."""
    if any(name.startswith("lm_head.") for name in expected):
        return {}
    parts = ((name.partition("embed_tokens."), destination) for name, destination in expected.items())
    return {f"lm_head.{end}": destination for (_, is_embedding, end), destination in parts if is_embedding}


def _check(
    path: Path,
    sources: Mapping[str, Source],
    expected: Mapping[str, Destination],
    copies: Mapping[str, Destination],
) -> None:
    missing = [n for n, destination in expected.items() if n not in sources and destination.default is None]
    lines = [f"{len(missing)} missing: {some(missing)}"] if missing else []
    lines += misfits(sources, {**expected, **copies})
    if lines:
        raise ValueError(f"{path}: the tensors do not fit config.json; {'; '.join(lines)}")


def misfits(sources: Mapping[str, Source], every: Mapping[str, Destination]) -> list[str]:
    """Return what is wrong with tensors for these destinations, a line for each kind of mistake; empty: nothing."""
    problems = {
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
    return [f"{len(names)} {problem}: {some(names)}" for problem, names in problems.items() if names]


def read_part(source: Source, destination: Destination) -> Tensor:
    """Return this rank's part of a tensor, in the shape of the destination; the file may hold it transposed."""
    if source.shape == destination.shape:
        return source.read(destination.index)
    if destination.is_exchanged(source.shape):
        return source.read((*destination.index[:-2], *destination.index[:-3:-1])).transpose(-1, -2)
    # One number: quantisers write scales as [], [1] or [1, 1].
    return source.read(tuple(slice(None) for _ in source.shape)).reshape(destination.into.shape)


def _copy(name: str, destination: Destination, source: Source) -> None:
    """Copy a tensor to its destination; ValueError if a value is too large for float16."""
    for second in destination.more:
        _copy(name, second, source)
    part = read_part(source, destination)
    assert part.shape == destination.into.shape, f"{name}: {list(part.shape)} goes into {list(destination.into.shape)}"
    destination.into.copy_(part)
    if (
        destination.into.dtype == torch.float16
        and part.dtype != torch.float16
        and not destination.into.isfinite().all()
    ):
        raise ValueError(f"{name}: values of {part.dtype} do not fit float16; load with dtype bfloat16 or float32")


def _conversion(sources: Mapping[str, Source], by_name: Mapping[str, Destination], dtype: torch.dtype) -> str:
    """Return a description of the conversion, such as "BF16 to float32"."""
    unchanged = {s.dtype for n, s in sources.items() if n in by_name and by_name[n].dtype is not None}
    converted = sorted({s.dtype for n, s in sources.items() if n not in by_name or by_name[n].dtype is None})
    as_stored = f", {', '.join(sorted(unchanged))} as stored" if unchanged else ""
    return f"{', '.join(converted)} to {str(dtype).removeprefix('torch.')}{as_stored}"


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

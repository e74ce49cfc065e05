"""From checkpoint to model: every tensor accounted for, then copied, one at a time."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from whorl.nn import Slot, slots

from .checkpoint import Checkpoint, Source, some

log = logging.getLogger(__name__)
# What safetensors may hold beside what can be converted; GGUF's types are all dequantised.
_FOREIGN = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")


def check_fit(model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes are not the model's; the model may be on "meta"."""
    wanted = slots(model)
    _check(checkpoint.path, _sources(model, checkpoint), wanted, _copies(wanted))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    return {n: s for n, s in checkpoint.sources.items() if not n.endswith(model.ignored)}


def fill(model: Any, checkpoint: Checkpoint, *, progress: bool = False) -> None:
    """Copy every tensor of a checkpoint that fits into its slot, in the slot's dtype."""
    wanted, sources = slots(model), _sources(model, checkpoint)
    copies = _copies(wanted)
    conversion = _conversion(sources.values(), model)
    with torch.inference_mode(), _bar(conversion, _total(sources.values()), progress) as advance:
        for name, source in sources.items():
            if name in wanted:
                _copy(name, wanted[name], source)
            advance(source.nbytes)
        for name, slot in copies.items():
            if name in sources and not torch.equal(sources[name].read(slot.index).to(slot.into), slot.into):
                raise ValueError(
                    f"{checkpoint.path}: config.json says tie_word_embeddings, but {name} is another matrix than the "
                    f"embedding; set tie_word_embeddings to false"
                )
    log.info("%s: %d tensors, %s", checkpoint.path, len(sources), conversion)


def _copies(wanted: Mapping[str, Slot]) -> dict[str, Slot]:
    """What a checkpoint may hold a second time: the head of a model that uses the embedding for it."""
    return {} if "lm_head.weight" in wanted else {"lm_head.weight": wanted["model.embed_tokens.weight"]}


def _check(path: Path, sources: Mapping[str, Source], wanted: Mapping[str, Slot], copies: Mapping[str, Slot]) -> None:
    every = {**wanted, **copies}
    found = {
        "missing": [n for n in wanted if n not in sources],
        "not part of the model": [n for n in sources if n not in every],
        "of another shape": [
            f"{n} {list(s.shape)}, expected {list(every[n].shape)}"
            for n, s in sources.items()
            if n in every and s.shape != every[n].shape
        ],
        "of a dtype that cannot be converted": [
            f"{n} {s.dtype}" for n, s in sources.items() if n in every and s.dtype in _FOREIGN
        ],
    }
    wrong = [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]
    if wrong:
        raise ValueError(f"{path}: the tensors do not fit config.json; {'; '.join(wrong)}")


def _copy(name: str, slot: Slot, source: Source) -> None:
    part = source.read(slot.index)
    slot.into.copy_(part)
    if slot.into.dtype == torch.float16 and part.dtype != torch.float16 and not slot.into.isfinite().all():
        raise ValueError(f"{name}: values of {part.dtype} do not fit float16; load with dtype bfloat16 or float32")


def _conversion(sources: Iterable[Source], model: Any) -> str:
    """Such as "BF16 to float32"."""
    stored = sorted({source.dtype for source in sources})
    return f"{', '.join(stored)} to {str(next(model.parameters()).dtype).removeprefix('torch.')}"


def _total(sources: Iterable[Source]) -> int:
    return sum(source.nbytes for source in sources)


@contextmanager
def _bar(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    shown = shown and console.is_terminal  # a bar that is gone at the end leaves an empty line in a file
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    with bar:
        task = bar.add_task(f"Loading {what}", total=total)
        yield lambda count: bar.advance(task, count)

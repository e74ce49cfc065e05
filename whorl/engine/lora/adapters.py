"""The adapters that an engine has: their names, their slots on the device, and which sequences use them.

A name that is loaded again, or unloaded, keeps its old slot until the last sequence that began with it is finished. So
a sequence has one adapter from its first token to its last, and a cached block belongs to one version of one adapter.
"""

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from whorl.nn import LowRanks, Target, Update, Vocabulary

from ..memory import named_errors
from ..sequence import Sequence
from ..weights.checkpoint import some
from .files import AdapterFile, read_adapter

_LAYER = re.compile(r"(?:layers|blocks)\.\d+\..+")
Write = Callable[[int, Mapping[str, Update]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. identity: a digest of its updates, to which blocks and features that it has computed belong,
    in this process and in others. sequences: those that began with it. sees: it updates the vision tower, so that an
    image's features depend on it."""

    name: str
    path: str
    identity: str
    slot: int
    rank: int
    sees: bool = False
    sequences: "weakref.WeakSet[Sequence]" = field(default_factory=weakref.WeakSet)

    def give(self, seq: Sequence) -> None:
        """Let a new sequence use this adapter."""
        seq.adapter, seq.slot = self.identity, self.slot
        seq.vision_slot = self.slot if self.sees else -1
        self.sequences.add(seq)

    @property
    def is_used(self) -> bool:
        return any(not seq.is_finished for seq in self.sequences)


class Adapters:
    """Adapters by name. most: how many have a slot at once, those included that are unloaded and still used."""

    def __init__(self, model: object, most: int) -> None:
        self.most = most
        self.low_ranks = LowRanks(model, most)
        self.by_name: dict[str, Adapter] = {}
        self._unloaded: list[Adapter] = []  # those that sequences may still use

    def find(self, name: str) -> Adapter:
        """Return an adapter; ValueError if there is none of this name."""
        if name not in self.by_name:
            loaded = f"loaded are {some(self.by_name)}" if self.by_name else "none is loaded"
            raise ValueError(f"lora: no adapter is named {name!r}; {loaded}")
        return self.by_name[name]

    def load(self, name: str, source: str | Path | AdapterFile, write: Write, *, replace: bool = False) -> Adapter:
        """Load an adapter into a free slot.

        source: a folder, a Hugging Face id or what `read_adapter` returned. write: writes updates to a slot, on all
        ranks. replace: an adapter that has the name is unloaded. Raises ValueError if the adapter cannot be served,
        the name is taken or no slot is free, OutOfMemory if its matrices do not fit; nothing has changed then.
        """
        if not name or name != name.strip():
            raise ValueError(f"lora: the name is {name!r}, expected one without spaces around it")
        if name in self.by_name and not replace:
            raise ValueError(f"lora: {name!r} is loaded, from {self.by_name[name].path}; unload it, or replace it")
        file = source if isinstance(source, AdapterFile) else read_adapter(source)
        updates = place(file, self.low_ranks.targets)
        _check_copies(file, self.low_ranks.model)
        slot, identity = self._free_slot(name), _digest(updates)
        with named_errors(f"loading the adapter {name}"):
            write(slot, updates)
        self.unload(name, missing_ok=True)
        sees = any(_sees(key) for key in updates)
        rank = max(update.rank for update in updates.values())
        adapter = Adapter(name, str(file.path), identity, slot, rank, sees)
        self.by_name[name] = adapter
        return adapter

    def unload(self, name: str, *, missing_ok: bool = False) -> None:
        """Forget an adapter; sequences that use it go on. ValueError if there is none of this name."""
        if missing_ok and name not in self.by_name:
            return
        self._unloaded.append(self.find(name))
        del self.by_name[name]

    def _free_slot(self, name: str) -> int:
        """Return a slot that no loaded adapter has, nor one that a sequence uses. The slot of an adapter of this name,
        which is to be replaced, counts as free if no sequence uses it."""
        self._unloaded = [adapter for adapter in self._unloaded if adapter.is_used]
        kept = [adapter for adapter in self.by_name.values() if adapter.name != name or adapter.is_used]
        taken = {adapter.slot for adapter in (*kept, *self._unloaded)}
        free = next((slot for slot in range(self.most) if slot not in taken), None)
        if free is None:
            used = f", {len(self._unloaded)} unloaded ones are still used" if self._unloaded else ""
            raise ValueError(
                f"lora: {name!r}: all {self.most} slots are taken, by {some(adapter.name for adapter in kept)}{used}; "
                "unload one, or start with more (--max-loras)"
            )
        return free


def _digest(updates: Mapping[str, Update]) -> str:
    """Return a digest of the names and values of updates; of all bytes, as an adapter may be made to deceive."""
    sha = hashlib.sha256()
    for name, update in sorted(updates.items()):
        sha.update(f"{name} {update.scale!r}".encode())
        for x in (update.a, update.b, update.bias):
            sha.update(b"-" if x is None else f"{tuple(x.shape)} {x.dtype}".encode())
            sha.update(b"" if x is None else x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def _sees(key: str) -> bool:
    return ".visual." in f".{key}"


def place(file: AdapterFile, targets: Mapping[str, Target]) -> dict[str, Update]:
    """Return the updates of an adapter by target; ValueError where the model has no place for one, or of another shape,
    or the config does not agree with the file."""
    aliases = _aliases(targets)
    updates: dict[str, Update] = {}
    for module, pairs in file.modules.items():
        for name, update in _updates(file, module, pairs, targets, aliases):
            if name in updates:
                raise ValueError(f"{file.path}: {name} is updated twice")
            updates[name] = update
    _check_complete(file, targets, updates)
    return updates


def _aliases(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return the names of targets by their ends from the layer on: wrappers of a model differ in what is before."""
    ends = [(match[0], name) for name in targets if (match := _LAYER.search(name))]
    counts: dict[str, int] = {}
    for end, _ in ends:
        counts[end] = counts.get(end, 0) + 1
    return {end: name for end, name in ends if counts[end] == 1}


def _updates(
    file: AdapterFile,
    module: str,
    pairs: Iterable[Mapping[str, Tensor]],
    targets: Mapping[str, Target],
    aliases: Mapping[str, str],
) -> Iterator[tuple[str, Update]]:
    """Yield the updates of one module, or of the stacked parameters that it has, by target."""
    match = _LAYER.search(module)
    stacks = {name: target for name, target in targets.items() if target.is_stack}
    name = module if module in targets else aliases.get(match[0] if match else "", module)
    for tensors in pairs:
        if name in targets and not targets[name].is_stack:
            key = module if file.config.targets(module) else f"{module}.weight"
            chosen, experts = name, None
        else:
            chosen, experts = _stack(module, tensors, stacks, aliases), 0
            key = f"{module}.{chosen.rpartition('.')[2]}"
        target = targets.get(chosen)
        if target is None:
            raise ValueError(f"{file.path}: the model cannot update {module} for each request: {_reason(module)}")
        if not file.config.targets(key) and not file.config.targets_parameter(key):
            raise ValueError(f"{file.path}: the file updates {module}, which its config does not name")
        update = file.update(key, tensors, target.matrix.shape[0] if experts == 0 else None)
        shape = (update.b.shape[-2], update.a.shape[-1])
        if shape != target.shape:
            raise ValueError(f"{file.path}: {module} is updated as {list(shape)}, expected {list(target.shape)}")
        yield chosen, update


def _stack(module: str, tensors: Mapping[str, Tensor], stacks: Mapping[str, Target], aliases: Mapping[str, str]) -> str:
    """Return the stack of a module that has the shape of an update; "" if there is none.

    PEFT nests a wrapper for each parameter and saves no parameter's name, and gate and up have another shape than down.
    """
    shape = (tensors["B.weight"].shape[0], tensors["A.weight"].shape[1])
    for name, target in stacks.items():
        end = name.rpartition(".")[2]
        match = _LAYER.search(f"{module}.{end}")
        if name in (f"{module}.{end}", aliases.get(match[0] if match else "")) and target.shape == shape:
            return name
    return ""


def _reason(module: str) -> str:
    if module.endswith("kv_b_proj"):
        return "it is multiplied head by head, never as a whole; merge the adapter"
    if module.endswith(("embed_tokens", "gate", "router")):
        return "no product that updates could add to has this name; merge the adapter"
    return "it has no such linear layer; is this the base that the adapter was trained on?"


def _check_copies(file: AdapterFile, model: object) -> None:
    """Raise ValueError if the file has a head or an embedding that is not the base's."""
    for name, matrix in model.named_modules() if file.copies and isinstance(model, nn.Module) else ():
        if not isinstance(matrix, Vocabulary):
            continue
        part = matrix.parts[0]
        for copied in (
            [name] if name in file.copies else ["lm_head"] if matrix.is_head and "lm_head" in file.copies else []
        ):
            copy = file.copies[copied]
            if not matrix.format.has_weight and tuple(copy.shape) == part.shape:
                continue  # the base's values are rounded here, so they cannot be compared
            if tuple(copy.shape) != part.shape or not torch.equal(
                copy[part.rows, part.columns].to(matrix.weight), matrix.weight[part.place]
            ):
                raise ValueError(f"{file.path}: it has another {copied} than the base; merge the adapter")


def _check_complete(file: AdapterFile, targets: Mapping[str, Target], updates: Mapping[str, Update]) -> None:
    """Raise ValueError if the config names a linear layer of the model that the file has no update of."""
    config = file.config
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        return  # it stands for the linear layers of the library's version that trained it
    updated = {targets[name].matrix for name in updates}
    missing = [
        name
        for name, target in targets.items()
        if name not in updates and target.entry is None and not target.is_stack and config.targets(name)
    ]
    missing += [
        name
        for name, target in targets.items()
        if target.is_stack and target.matrix not in updated and config.targets_parameter(name)
    ]
    if missing:
        raise ValueError(f"{file.path}: its config names {some(missing)}, which the file does not update: is it cut?")

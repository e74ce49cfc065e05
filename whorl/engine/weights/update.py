"""New values for the weights of a model that is already loaded: tensors by Hugging Face's names, in any order.

What a checkpoint's tensors must satisfy holds here as well. Values are copied into the parameters that are there, so
that recorded graphs and views of them stay valid.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Destination, Matrix, Weighted, weighted
from whorl.nn import weights as formats

from .checkpoint import Source, some
from .fill import misfits, read_part

log = logging.getLogger(__name__)
Signature = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


class UpdateError(ValueError):
    """The tensors of an update are not those of the model."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a layer that is sent separately, and the names of its tensors in each of the forms it may have."""

    layer: Weighted
    forms: tuple[frozenset[str], ...]


class Places:
    """Where the tensors of a trainer go in a model: views of its parameters, made once.

    Raises UpdateError if the model has weights that cannot be replaced, because they are quantised.
    """

    def __init__(self, model: Any) -> None:
        self.destinations: dict[str, Destination] = {}
        self.pieces: list[_Piece] = []
        self.piece_of: dict[str, _Piece] = {}
        self.twins: dict[str, str] = {}  # the other name of a matrix that has two
        self.checked: dict[str, Signature] = {}  # what fits, of earlier updates: there may be thousands of tensors
        self.ignored_ends = tuple(getattr(model, "ignored", ()))
        self.ignored_layers = tuple(getattr(model, "ignored_layers", ()))
        for name, layer in weighted(model) if isinstance(model, torch.nn.Module) else ():
            _check_plain(name, layer)
            for forms in layer.forms(name):
                self._add(layer, forms)
        self._add_twin()
        if not self.pieces:
            raise UpdateError(f"update_weights: {type(model).__name__} has no weights with names of a checkpoint")

    def _add(self, layer: Weighted, forms: tuple[dict[str, Destination], ...]) -> None:
        piece = _Piece(layer, tuple(frozenset(form) for form in forms))
        self.pieces.append(piece)
        for form in forms:
            self.destinations |= form
            self.piece_of |= dict.fromkeys(form, piece)

    def _add_twin(self) -> None:
        """Give an embedding that is the head as well its other name: trainers send one of the two, or both."""
        heads = {n: f"lm_head.{n.partition('embed_tokens.')[2]}" for n in self.destinations if "embed_tokens." in n}
        for name, head in heads.items():
            if any(other.startswith("lm_head.") for other in self.destinations):
                return
            piece = self.piece_of[head] = self.piece_of[name]
            piece.forms += (frozenset([head]),)
            self.destinations[head] = self.destinations[name]
            self.twins |= {name: head, head: name}

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint may have the tensor although the model does not read it."""
        return name not in self.destinations and (
            name.endswith(self.ignored_ends) or name.startswith(self.ignored_layers)
        )


def _check_plain(name: str, layer: Weighted) -> None:
    for _, module in layer.named_modules():
        if isinstance(module, Matrix) and not module.format.has_weight:
            raise UpdateError(
                f"update_weights: {name} is quantised ({module.format}), expected plain weights: serve an unquantised "
                "model, or one that is unpacked when it is loaded"
            )


class Update:
    """One update of a model's weights. `copy` as often as there are tensors, then `finish`.

    is_partial: tensors may be missing; their old values stay. Attribute has_copied: whether the weights are a mixture
    until `finish`, not the old ones.
    """

    def __init__(self, places: Places, *, is_partial: bool = False) -> None:
        self.places, self.is_partial, self.has_copied = places, is_partial, False
        self._received: set[str] = set()
        self._has_warned = False

    def check(self, tensors: Mapping[str, Signature]) -> None:
        """Raise UpdateError unless every one of these tensors has a place, and was not sent before."""
        places = self.places
        known, checked = places.destinations, places.checked
        sources = {
            name: _source(signature)
            for name, signature in tensors.items()
            if checked.get(name) != signature and not places.is_ignored(name)
        }
        lines = misfits(sources, known)
        if repeated := self._received & tensors.keys():
            lines.append(f"{len(repeated)} sent twice: {some(sorted(repeated))}")
        lines += self._stored_lines(sources)
        if lines:
            raise UpdateError(f"update_weights: the tensors do not fit the model; {'; '.join(lines)}")
        checked.update((name, tensors[name]) for name in sources)

    def _stored_lines(self, sources: Mapping[str, Source]) -> list[str]:
        """Refuse to round where weights are kept in fewer bits than the model's, to save memory."""
        wide = []
        for name, source in sources.items():
            layer = self.places.piece_of[name].layer if name in self.places.piece_of else None
            is_stored = isinstance(layer, Matrix) and layer.format != formats.DENSE
            if is_stored and source.gives != self.places.destinations[name].into.dtype:
                wide.append(f"{name} {source.dtype}")
        if not wide:
            return []
        return [f"{len(wide)} wider than the 16 bits in which this model is kept (load it with unpack): {some(wide)}"]

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check tensors and copy them, all in one operation of the device."""
        known = self.places.destinations
        named = {name: tensor for name, tensor in tensors if not self.places.is_ignored(name)}
        self.check({name: (tensor.shape, tensor.dtype) for name, tensor in named.items()})
        self.has_copied = self.has_copied or bool(named)  # before the copy: it may fail half way
        into: list[Tensor] = []
        parts: list[Tensor] = []
        for name, tensor in named.items():
            place = known[name]
            if self.places.twins and (twin := self.places.twins.get(name)) in self._received:
                _copy_all(into, parts)
                self._check_twin(name, str(twin), _part_of(tensor, place))
            elif place.into.shape == tensor.shape and not place.more:  # most are, and there may be thousands
                parts.append(tensor)
                into.append(place.into)
            else:
                for each in _all(place):
                    parts.append(_part_of(tensor, each))
                    into.append(each.into)
            if tensor.dtype != place.into.dtype:
                for each in _all(place):
                    self._check_range(name, _part_of(tensor, each), each.into)
            self._received.add(name)
        _copy_all(into, parts)

    def _check_twin(self, name: str, twin: str, values: Tensor) -> None:
        into = self.places.destinations[name].into
        if not torch.equal(values.to(into), into):
            raise UpdateError(f"update_weights: {name} and {twin} are one matrix here, and came with other values")

    def _check_range(self, name: str, part: Tensor, into: Tensor) -> None:
        """Warn that values are rounded; raise UpdateError if they are too large."""
        if part.dtype.itemsize > into.dtype.itemsize and not self._has_warned:
            self._has_warned = True
            log.warning(
                "update_weights: %s comes in %s and is rounded to %s, as when it is loaded",
                name,
                part.dtype,
                into.dtype,
            )
        if into.dtype == torch.float16 and not part.to(torch.float16).isfinite().all():
            raise UpdateError(f"update_weights: {name}: values of {part.dtype} do not fit float16")

    def missing(self) -> list[str]:
        """Return the names of tensors that have not come, those of the form of which most have."""
        names: list[str] = []
        for piece in self.places.pieces:
            if not any(form <= self._received for form in piece.forms):
                left: list[frozenset[str]] = [form - self._received for form in piece.forms]
                shortest = min(left, key=len)
                names += sorted(shortest)
        return [name for name in names if self.places.destinations[name].default is None]

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Rearrange the new weights for the kernels. Raises UpdateError if tensors are missing."""
        missing = self.missing()
        if missing and not self.is_partial:
            raise UpdateError(f"update_weights: {len(missing)} tensors are missing: {some(missing)}")
        layers = {piece.layer: None for piece in self.places.pieces if any(f & self._received for f in piece.forms)}
        for layer in layers:
            layer.finish()


def _copy_all(into: list[Tensor], parts: list[Tensor]) -> None:
    """Copy the parts and empty both lists."""
    if into:
        torch._foreach_copy_(into, parts)
    into.clear()
    parts.clear()


def _all(destination: Destination) -> Iterable[Destination]:
    yield destination
    for more in destination.more:
        yield from _all(more)


def _source(signature: Signature, read: Callable[[Any], Tensor] | None = None) -> Source:
    shape, dtype = signature
    name = str(dtype).removeprefix("torch.")
    return Source(shape=tuple(shape), dtype=name, gives=dtype, nbytes=0, read=read)  # type: ignore[arg-type]


def _part_of(tensor: Tensor, place: Destination) -> Tensor:
    """Return what goes to the place: this rank's share of the tensor, which may come transposed."""
    return read_part(_source((tensor.shape, tensor.dtype), tensor.__getitem__), place)

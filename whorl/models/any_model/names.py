"""The names and stacks of a checkpoint's tensors, as transformers turns them into those of its model."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from whorl.models.checkpoint_tensors import Made

from .skeleton import skeleton

_COMPUTED = ("rotary_emb.inv_freq",)  # ends of names of tensors that are computed here


def converted(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Made]:
    """Return the tensors of the model of a config.json by name, for the tensors of a checkpoint with these shapes.

    The stacks of a quantised checkpoint's experts are not made: their formats know the separate tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    hf = skeleton(values)
    transforms = get_model_conversion_mapping(hf)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings: Any = [each for each in transforms if not isinstance(each, WeightConverter)]
    if values.get("quantization_config") or values.get("compression_config"):
        converters = []
    own, dropped, tied = hf.state_dict(), _dropped(hf), _tied(hf)
    one: dict[str, Made] = {}
    many: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for source in sorted(shapes, key=dot_natural_key):
        target, _ = rename_source_key(source, renamings, [], hf.base_model_prefix, own)
        final, pattern = rename_source_key(source, renamings, converters, hf.base_model_prefix, own)
        if pattern is not None:
            index = next(i for i, each in enumerate(converters) if pattern in each.source_patterns)
            many.setdefault((final, index), []).append((pattern, source))
        elif target in tied:
            continue
        elif target in own or not dropped(target):
            one[target] = Made(shapes[source], (source,))
    for (final, index), pairs in many.items():
        one |= _merged(hf, final, converters[index], pairs, shapes)
    return one


def _dropped(hf: Any) -> Callable[[str], bool]:
    """Return which tensors are not read although no parameter has their name."""
    patterns = [re.compile(each) for each in getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or []]
    return lambda name: name.endswith(_COMPUTED) or any(each.search(name) for each in patterns)


def _tied(hf: Any) -> set[str]:
    """Return the names of tensors that are the embedding's as well. Where it is called embed_tokens the loader compares
    both."""
    is_tied = hf.config.tie_word_embeddings
    names = set(getattr(hf, "_tied_weights_keys", None) or []) if is_tied else set()
    is_compared = any(name.endswith("embed_tokens.weight") for name in hf.state_dict())
    return {name for name in names if not (is_compared and name.startswith("lm_head."))}


def _merged(
    hf: Any, final: str, converter: Any, pairs: list[tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Made]:
    """Return the tensors that a converter of transformers makes of sources. pairs: their patterns and names."""
    patterns, sources = [pattern for pattern, _ in pairs], tuple(source for _, source in pairs)

    def make_all(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        collected: dict[str, list[Tensor]] = {}
        for pattern, tensor in zip(patterns, tensors, strict=True):
            collected.setdefault(pattern, []).append(tensor)
        made: Any = collected
        for operation in converter.operations:
            made = operation.convert(
                made,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=final,
                model=hf,
                config=hf.config,
                missing_keys=None,
            )
        first = converter.target_patterns[0]
        return {final.replace(first, key): each[0] if isinstance(each, list) else each for key, each in made.items()}

    def maker(name: str) -> Callable[[list[Tensor]], Tensor]:
        return lambda tensors: make_all(tensors)[name]

    sizes = make_all(torch.empty(shapes[source], device="meta") for source in sources)
    return {name: Made(tuple(each.shape), sources, maker(name)) for name, each in sizes.items()}

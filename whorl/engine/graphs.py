"""Recorded calls: a runner's calls are padded to a few sizes (graph_sizes.py), recorded as graphs and replayed.

`NO_GRAPHS` in whorl/device.py lists the devices that cannot record, and why.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from whorl.device import ahead, graph_pool, record_graph, synchronize
from whorl.device import use_graphs as wants_graphs
from whorl.ops._varied import varied

from .call import Call
from .dummy_calls import DummyCalls
from .graph_sizes import BESIDE, PROMPTS, GraphSizes, most_prompts
from .inputs import Inputs, Padded

Outputs = tuple[Tensor, Tensor, Tensor]  # hidden states of all tokens, logits and token ids of the samples
Compute = Callable[..., Outputs]  # `Runner._compute`
Key = tuple[int, int]


class Graph:
    """A recorded call of this size. Padding tokens write no keys and attend to nothing."""

    replay: Callable[[], None]
    outputs: Outputs  # every replay writes to these tensors

    def __init__(self, padded: Padded) -> None:
        self.padded = padded

    def outputs_of(self, call: Call) -> Outputs:
        """Return the outputs of a call that has been replayed, without padding."""
        hidden, logits, token_ids = self.outputs
        num_tokens, _, num_samples = call.size
        if call.decoding_from is not None:
            assert self.padded.decoding_from is not None
            num_prompt_tokens, first = call.decoding_from[0], self.padded.decoding_from[0]
            hidden = torch.cat((hidden[:num_prompt_tokens], hidden[first : first + num_tokens - num_prompt_tokens]))
        return hidden[:num_tokens], logits[:num_samples], token_ids[:num_samples]


class Graphs:
    """The graphs of a runner, by the sizes of calls.

    inputs, states: the fixed memory where graphs read a call and the target model's hidden states. use_graphs: as in
    the settings. has_prompts: whether calls with prompts are recorded, up to `max_prompt_tokens` tokens.
    Attributes decoding: by tokens and keys; prompts: by tokens of prompts and of decoding sequences.
    """

    def __init__(
        self,
        inputs: Inputs,
        dummies: DummyCalls,
        device: str,
        *,
        use_graphs: bool | None,
        states: Tensor | None,
        block_size: int,
        max_len: int,
        max_prompt_tokens: int,
        has_prompts: bool,
    ) -> None:
        self._inputs, self._dummies, self._device, self._states = inputs, dummies, device, states
        self._block_size, self._max_len, self._has_prompts = block_size, max_len, has_prompts
        self._is_on = wants_graphs(device, use_graphs)
        sizes = {"max_tokens": inputs.max_tokens, "max_prompt_tokens": max_prompt_tokens}
        self._sizes = GraphSizes(max_len=max_len, **sizes)
        self.decoding: dict[Key, Graph | None] = {}
        self.prompts: dict[Key, Graph | None] = {}
        self._adapted: dict[bool, dict[Key, Graph | None]] = {}  # calls with adapters, by whether they decode
        self.clear()

    def clear(self) -> None:
        """Forget all graphs: what they read is elsewhere now."""
        for graphs in (self.decoding, self.prompts, self._adapted):
            graphs.clear()
        self._prompt_outputs: Outputs | None = None
        # The outputs of a graph are valid until the next graph of its pool is replayed, and a step may have both kinds.
        self._pool, self._prompt_pool = (graph_pool(self._device) if self._is_on else None for _ in range(2))

    def forget_adapted(self) -> None:
        """Forget the graphs of calls with adapters."""
        self._adapted.clear()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run calls without graphs in this context, so that hooks of the model's modules are called."""
        is_on, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = is_on

    def decoding_sizes(self, max_tokens: int) -> list[Key]:
        """Return tokens and keys of all graphs that decode calls of up to `max_tokens` may need; [] without graphs."""
        return self._sizes.decoding(max_tokens) if self._is_on else []

    def prompt_sizes(self) -> list[Key]:
        """Return the most tokens and sequences of prompts of all graphs for calls with prompts, smallest first; []
        without any."""
        return self._sizes.prompts() if self._is_on and self._has_prompts else []

    def find(self, call: Call, compute: Compute) -> Graph | None:
        """Return the graph that fits a call, recorded if it is new; None if the call is not to be replayed."""
        if not self._is_on or call.is_eager:
            return None
        if not call.is_decode:
            return self._find_prompt(call, compute)
        key = self._sizes.for_decoding(call.size[0], call.num_keys) if call.is_dense else None
        if key is None:
            return None
        graphs = self._adapted.setdefault(True, {}) if call.is_adapted else self.decoding
        if key not in graphs:
            num_tokens, keys = key
            padded = Padded((num_tokens,) * 3, is_recorded=True)
            dummy = self._dummies.decode(num_tokens)
            dummy.is_adapted = call.is_adapted
            with ahead():
                graphs[key] = self._record(dummy, padded, keys, self._pool, compute)
        return graphs[key]

    def _find_prompt(self, call: Call, compute: Compute) -> Graph | None:
        """As `find`, for a call with prompts, without images or hidden states."""
        num_tokens = call.size[0] if call.decoding_from is None else call.decoding_from[0]
        key = self._sizes.for_prompts(num_tokens, call.num_prompts, call.size[0] - num_tokens)
        if key is None or not self._has_prompts or call.axes is not None:
            return None
        graphs = self._adapted.setdefault(False, {}) if call.is_adapted else self.prompts
        if key not in graphs:
            num_tokens, num_decoding = key
            num_prompts = most_prompts(num_tokens)
            size = num_tokens + num_decoding, num_prompts + num_decoding, num_prompts + num_decoding
            padded = Padded(size, (num_tokens, num_prompts) if num_decoding else None, is_recorded=True)
            length = min(num_tokens, self._max_len, self._inputs.max_tokens - num_decoding)
            dummy = self._dummies.joined(length, num_decoding)
            dummy.is_adapted = call.is_adapted
            with varied():  # else every graph would compile kernels of its own
                graphs[key] = self._record(dummy, padded, self._max_len, self._prompt_pool, compute)
        return graphs[key]

    def _record(self, dummy: Call, padded: Padded, keys: int, pool: Any, compute: Compute) -> Graph | None:
        """Record a call of this size that may read up to `keys` tokens of a lane; None if the device cannot record it.

        dummy: the call whose indices are used while recording; it writes nothing to the caches. pool: the graph's
        memory pool.
        """
        self._inputs.send(dummy, padded)
        graph, inputs = Graph(padded), self._inputs.tensors(padded.size)
        options: dict[str, Any] = {"width": -(-keys // self._block_size), "decoding_from": padded.decoding_from}
        options |= {"is_decode": dummy.is_decode, "is_dense": dummy.is_decode, "is_adapted": dummy.is_adapted}
        options["states"] = None if self._states is None else self._states[: padded.size[0]]

        def run() -> None:
            outputs = compute(inputs, **options)
            graph.outputs = outputs if dummy.is_decode else self._copied(outputs)

        run()  # compiles and selects kernels and builds tables, none of which may happen while recording
        synchronize(self._device)
        with _uncollected():
            replay = record_graph(self._device, run, pool=pool)
        if replay is None:
            return None
        graph.replay = replay
        return graph

    def _copied(self, outputs: Outputs) -> Outputs:
        """Copy the outputs of a call with prompts to memory that all such graphs share.

        Else each of the many graphs would keep memory for its own logits. The copy is short beside a prompt.
        """
        if self._prompt_outputs is None:
            sizes = (PROMPTS[-1] + BESIDE[-1], *(most_prompts(PROMPTS[-1]) + BESIDE[-1],) * 2)
            shapes = [(size, *x.shape[1:]) for size, x in zip(sizes, outputs, strict=True)]
            hidden, logits, ids = (x.new_empty(shape) for shape, x in zip(shapes, outputs, strict=True))
            self._prompt_outputs = hidden, logits, ids
        hidden, logits, ids = (to[: len(x)].copy_(x) for to, x in zip(self._prompt_outputs, outputs, strict=True))
        return hidden, logits, ids


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from running: it may free the graphs and the memory of an engine that is gone, which
    is not allowed while a device records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

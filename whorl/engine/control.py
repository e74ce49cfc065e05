"""What a trainer does to a running engine: pause it, give it new weights, put it to sleep. `LLM` has the methods.

While the engine is held no step is launched and requests wait. New weights are copied into the old ones, so an update
that fails half way leaves neither the old nor the new weights: then the engine is torn, and refuses everything but
another update.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .output import Delta
from .sequence import FinishReason, Sequence, WeightsError, detokenizer_for
from .sleep import TAGS
from .weights.update import Places, Update

if TYPE_CHECKING:
    from .llm import LLM

PauseMode = Literal["abort", "wait", "keep"]
_AT_ONCE = 1 << 28  # bytes of tensors that are copied in one operation


class Control:
    """The state of an engine that a trainer steers.

    Attributes version: of the weights. deltas: of sequences that went on or ended outside of a step; the next step
    returns them. torn: why the weights are a mixture; None: they are not. update: the one that is in progress.
    """

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self.version, self.num_updates = "0", 0
        self.deltas: list[Delta] = []
        self.torn: str | None = None
        self.update: Update | None = None
        self.pause_mode: PauseMode | None = None
        self._places: Places | None = None
        self.asleep: set[str] = set()  # what has given its memory back
        self._late: list[Sequence] = []  # came during a pause that waits for those before them

    @property
    def is_held(self) -> bool:
        """Whether no step may be launched now."""
        is_paused = self.pause_mode is not None and self.pause_mode != "wait"
        return is_paused or self.update is not None or self.torn is not None or bool(self.asleep)

    @property
    def num_late(self) -> int:
        return len(self._late)

    def check(self) -> None:
        """Raise WeightsError if the weights are a mixture."""
        if self.torn is not None:
            raise WeightsError(
                f"the weights are incomplete, because an update failed ({self.torn}); repair them by a whole update"
            )

    # ---- pauses

    def pause(self, mode: PauseMode) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause: mode is {mode!r}, expected abort, wait or keep")
        self._land_all()
        if mode == "abort":
            self.abort_all()
        self.pause_mode = mode

    def resume(self) -> None:
        self.check()
        self.pause_mode = None
        late, self._late = self._late, []
        for seq in late:
            self._llm.scheduler.add(seq)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, behind a pause that waits for the others to end."""
        if self.pause_mode == "wait":
            self._late.append(seq)
        else:
            self._llm.scheduler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a finished sequence out of the queue in which it is."""
        if seq in self._late:
            self._late.remove(seq)
        else:
            self._llm.scheduler.finish(seq)

    def abort_all(self) -> None:
        """Abort every sequence; the next step returns their last deltas."""
        scheduler = self._llm.scheduler
        waiting = [seq for line in scheduler.waiting.lines.values() for seq in line]
        for seq in [*scheduler.running, *waiting, *self._late]:
            self._abort(seq)

    def _abort(self, seq: Sequence) -> None:
        self._llm.abort(seq)
        self.deltas.append(Delta(seq, [], seq.text.take(is_finished=True), FinishReason.ABORT))

    def _land_all(self) -> None:
        """Read the tokens of every step that was launched."""
        while self._llm.is_flying:
            self.deltas += self._llm.land()

    # ---- sleep

    def sleep(self, level: int, mode: PauseMode) -> None:
        llm = self._llm
        if level not in (1, 2):
            raise ValueError(f"sleep: level is {level}, expected 1 or 2; to hold the engine with its memory, pause it")
        if self.update is not None:
            raise WeightsError("sleep: an update is in progress; finish it first")
        if self.asleep:
            raise WeightsError("sleep: the engine sleeps already")
        if (llm.proposer is not None and llm.proposer.has_weights) or not isinstance(llm.model, torch.nn.Module):
            raise ValueError("sleep: an engine with a draft model cannot sleep; draft from the prompt, or not at all")
        if mode == "wait" and llm.has_work:
            raise WeightsError("sleep: requests are in progress; pause with mode wait first, until they have ended")
        self._land_all()
        if mode == "abort":
            self.abort_all()
        llm.forget()
        self._places = None  # views of the weights, which would keep their memory
        llm.runner.sleep(is_saved=level == 1)
        self.asleep = set(TAGS)
        if level == 2:
            self.torn = "they were discarded by sleep at level 2"

    def wake(self, tags: Iterable[str] | None) -> None:
        chosen = TAGS if tags is None else tuple(tags)
        if unknown := [tag for tag in chosen if tag not in TAGS]:
            raise ValueError(f"wake: {unknown[0]!r} is unknown, expected {' or '.join(TAGS)}")
        for tag in self.asleep.intersection(chosen):
            self._llm.runner.wake(tag)
            self.asleep.remove(tag)
        self._llm.forget()  # requests that came meanwhile may have named their prefixes after absent weights
        self._llm.renew_addresses()

    # ---- weights

    def begin(self, *, is_partial: bool = False) -> Update:
        """Begin an update; nothing runs until `finish` or `fail`."""
        if self.update is not None:
            raise WeightsError("update_weights: another update is in progress; finish it first")
        if is_partial:
            self.check()
        if "weights" in self.asleep:
            raise WeightsError("update_weights: the engine sleeps without its weights; wake them first")
        if self._llm.settings.divides_experts:
            raise WeightsError("update_weights: ranks divide the experts; new weights come to shards only: use tp")
        if self._places is None:
            self._places = Places(self._llm.model)
        self._land_all()
        self.update = self._llm.runner.begin_update(self._places, is_partial=is_partial)
        return self.update

    def finish(self, version: str | None) -> str:
        """End the update in progress: the weights have the new version, and nothing computed with the old is used."""
        if self.update is None:
            raise WeightsError("update_weights: there is no update to finish; begin one first")
        try:
            self.update.finish()
        except BaseException as error:
            self.fail(str(error))
            raise
        self.num_updates += 1
        self.version = str(self.num_updates) if version is None else version
        self.update, self.torn = None, None
        self._llm.forget_weights()
        self._settle_sequences()
        return self.version

    def fail(self, reason: str) -> None:
        """Give up the update in progress. If it has copied anything, the weights are torn and all requests end."""
        update, self.update = self.update, None
        if update is None or not update.has_copied:
            return
        self.torn = reason
        self._llm.forget_weights()
        self.abort_all()

    def _settle_sequences(self) -> None:
        """Do with every sequence what it asked for in case of new weights."""
        llm = self._llm
        for seq in [seq for line in llm.scheduler.waiting.lines.values() for seq in line]:
            action = seq.params.on_update
            if not seq.num_outputs:  # nothing of it depends on the old weights but the scores of its prompt
                seq.prompt_logprobs, seq.weight_versions = [], []
            elif action == "abort":
                self._abort(seq)
            elif action == "restart":
                seq.restart(detokenizer_for(seq.params, llm.tokenizer))

    def update_all(self, tensors: Iterable[tuple[str, Tensor]], version: str | None, *, is_partial: bool) -> str:
        """Do a whole update."""
        update = self.begin(is_partial=is_partial)
        try:
            chunk: list[tuple[str, Tensor]] = []
            size = 0
            for name, tensor in tensors:
                chunk.append((name, tensor))
                size += tensor.nbytes
                if size >= _AT_ONCE:
                    update.copy(chunk)
                    chunk, size = [], 0
            update.copy(chunk)
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        return self.finish(version)


class WeightVersions:
    """The version counters of a model's weights, to detect whether weights have changed since the KV cache was
    computed. torch counts in-place changes, except those through `.data`."""

    def __init__(self, model: object) -> None:
        self._weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
        self._known, self._addresses = self._read()

    def have_changed(self) -> bool:
        """Return whether weights have changed since the last call. RuntimeError if a weight is another tensor now:
        recorded graphs read the old memory."""
        versions, addresses = self._read()
        if addresses != self._addresses:
            raise RuntimeError(
                "LLM: a weight was replaced by another tensor, and recorded graphs read the old one; copy new values "
                "into the weights (parameter.copy_ under torch.no_grad), or create a new LLM"
            )
        previous, self._known = self._known, versions
        return versions != previous

    def _read(self) -> tuple[list[int], list[int]]:
        """Return the version counter and the address of each weight."""
        versions = [0 if weight.is_inference() else weight._version for weight in self._weights]
        return versions, [weight.data_ptr() for weight in self._weights]

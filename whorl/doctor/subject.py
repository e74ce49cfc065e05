"""The live model that a checklist examines, with the facts that its cases share."""

from dataclasses import dataclass
from typing import Any, Literal

from whorl.doctor.live_model import RotaryOwner
from whorl.doctor.rotation import Call, ForwardRecord, rope_config

Outcome = Literal["pass", "fail", "does not apply"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model under test, its inputs, and the record of one forward.

    owner: the module that owns the language model's rotary object; switch: the user's object that turns a fused path on
    and off by its attribute `enabled`, or None.
    """

    model: Any
    batch: Any
    owner: RotaryOwner
    switch: Any
    record: ForwardRecord

    @property
    def is_mrope(self) -> bool:
        return self.sections is not None or self.owner.branch == "mrope"

    @property
    def sections(self) -> list[int] | None:
        if self.owner.sections:
            return self.owner.sections
        rope = rope_config(self.owner)
        return list(rope.sections) if rope is not None and rope.sections else None

    @property
    def calls(self) -> list[Call]:
        """The recorded calls of rotating functions whose signature is known."""
        return [call for call in self.record.calls if call.takes_angles or call.takes_cos_sin]

    @property
    def positions(self) -> Any:
        """The position ids, positions or sequence length that the rotary object's first call got; None without one."""
        arguments = self.record.rotary[0] if self.record.rotary else {}
        return arguments.get("position_ids", arguments.get("positions", arguments.get("max_seq_len")))


Answer = tuple[Outcome, str]  # the outcome of a case, and what was seen

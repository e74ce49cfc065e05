"""A live model under test: what every case of the checklist asks."""

from dataclasses import dataclass
from typing import Any, Literal

from whorl.doctor.live_model import Live
from whorl.doctor.rotation import Call, Watched, rope_config

Outcome = Literal["pass", "fail", "does not apply"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model under test, its language model's rotary object, and what one forward of the batch did."""

    model: Any
    batch: Any
    live: Live
    switch: Any
    seen: Watched

    @property
    def is_mrope(self) -> bool:
        return self.sections is not None or self.live.branch == "mrope"

    @property
    def sections(self) -> list[int] | None:
        if self.live.sections:
            return self.live.sections
        rope = rope_config(self.live)
        return list(rope.sections) if rope is not None and rope.sections else None

    @property
    def calls(self) -> list[Call]:
        return [call for call in self.seen.calls if call.takes_angles or call.takes_cos_sin]

    @property
    def positions(self) -> Any:
        given = self.seen.rotary[0] if self.seen.rotary else {}
        return given.get("position_ids", given.get("positions", given.get("max_seq_len")))


Answer = tuple[Outcome, str]

"""Training that is killed at any moment goes on from its last complete checkpoint, to the bit."""

import itertools
import random
import time
from pathlib import Path

import pytest
import titan_job
from titan_job import Job, Told

SAVE_EVERY = 2
MODES = ("disabled", "async")


def flags(folder: Path, steps: int, mode: str) -> list[str]:
    return [
        *("--job.dump_folder", str(folder), "--training.steps", str(steps), "--checkpoint.async_mode", mode),
        *("--checkpoint.interval", str(SAVE_EVERY), "--checkpoint.keep_latest_k", "3", "--optimizer.swap"),
    ]


def complete(folder: Path) -> int:
    """The newest step whose metadata is there; 0: none."""
    return max(
        (int(p.parent.name.removeprefix("step-")) for p in folder.glob("checkpoint/step-*/.metadata")), default=0
    )


def unfinished(folder: Path) -> int:
    return sum(not (p / ".metadata").is_file() for p in folder.glob("checkpoint/step-*"))


class Pace:
    """How long a step and a save take here, from a run that nobody disturbed."""

    def __init__(self, folder: Path, steps: int, size: int) -> None:
        job = Job(titan_job.train, flags(folder, steps, "disabled"), size)
        times = [(event, time.monotonic()) for event in job.events()]
        self.reference = job.finish()
        assert not any(t.error for t in self.reference), self.reference
        begun = {e[1]: t for e, t in times if e[0] == "saving"}
        self.save = max(t - begun[e[1]] for e, t in times if e[0] == "saved")
        losses = [t for e, t in times if e[0] == "loss"]
        self.step = sorted(b - a for a, b in itertools.pairwise(losses))[len(losses) // 2]


def kill(job: Job, pace: Pace, draw: random.Random, moment: str) -> None:
    """At a random moment of the first or second save from now on, or of one of the next steps."""
    word, left, length = ("saving", draw.randint(1, 2), pace.save)
    if moment == "step":
        word, left, length = ("loss", draw.randint(1, 5), pace.step)
    for event in job.events():
        left -= event[0] == word
        if left == 0:
            until = time.monotonic() + draw.uniform(0, 1.2 * length)
            while time.monotonic() < until:
                pass
            break
    job.kill()


def check(told: Told, reference: Told, last: int) -> None:
    """What was computed is what an unbroken run computes, from the step after the last complete checkpoint."""
    assert told.error is None, told.error
    assert not told.losses or min(told.losses) == last + 1, (sorted(told.losses), last)
    assert told.losses == {step: reference.losses[step] for step in told.losses}


def killed_and_resumed(folder: Path, *, kills: int, size: int = 1) -> int:
    """Returns how many kills left a checkpoint behind that was not finished."""
    steps, draw, halves = 6 * kills + 4, random.Random(kills), 0
    pace = Pace(folder / "reference", steps, size)
    for number in range(kills):
        last = complete(folder)
        job = Job(titan_job.train, flags(folder, steps, draw.choice(MODES)), size)
        kill(job, pace, draw, moment="save" if number % 2 == 0 else "step")
        for told, reference in zip(job.finish(), pace.reference, strict=True):
            check(told, reference, last)
        halves += unfinished(folder)
    last = complete(folder)
    assert 0 < last < steps, "the kills came too early or too late to say anything"
    for told, reference in zip(titan_job.run(flags(folder, steps, "disabled"), size=size), pace.reference, strict=True):
        check(told, reference, last)
        assert max(told.losses) == steps
        assert told.answer == reference.answer, "the weights at the end differ"
    return halves


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, kills=20) > 0, "no kill met a checkpoint half written"


@pytest.mark.slow
def test_eight_kills_of_two_ranks(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, kills=8, size=2) > 0, "no kill met a checkpoint half written"

"""How a trainer's actor samples with an engine on its thread: one prompt of token ids, one answer."""

import math
from collections.abc import Sequence as Ids

from whorl.engine.sampling_params import SamplingParams
from whorl.engine.sequence import Sequence
from whorl.serve.engine_thread import EngineThread


async def sampled(engine: EngineThread, prompt_ids: Ids[int], params: SamplingParams) -> Sequence:
    """Return the sequence when it has ended. Cancelling this aborts it. Raises the errors of `EngineThread.submit`."""
    job = await engine.submit([prompt_ids], [params])
    try:
        async for _ in job.outputs(math.inf):
            pass
    finally:
        engine.close(job)
    return job.sequences[0]


def policy_versions(seq: Sequence | None, current: str) -> tuple[int, int]:
    """Return the versions of the weights that sampled the first and the last token; current: where there is none.

    Trainers whose versions are numbers name the weights by them.
    """
    versions = [current] if seq is None or not seq.weight_versions else [each for each, _ in seq.weight_versions]
    return int(versions[0]), int(versions[-1])

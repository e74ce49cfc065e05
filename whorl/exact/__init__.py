"""A trainer that computes the engine's bits: stock models of transformers, and the proof that both sides agree.

`install(model)` replaces what computes other bits than the engine; `certify` compares log-probabilities of both sides.
"""

from .certificate import Certificate as Certificate
from .certificate import Distribution as Distribution
from .certificate import NotExactError as NotExactError
from .certificate import Scores as Scores
from .certificate import certify as certify
from .trainer import install as install
from .trainer import sequence_logprobs as sequence_logprobs
from .trainer import token_logprobs as token_logprobs

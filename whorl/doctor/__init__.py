"""The doctor finds mistakes in a rotary configuration before the launch. Only `checklist` needs torch.

`check` reads configurations, launch flags, logs and traces; `check_pair` compares a trainer with its rollout; `guard`
checks a live model; `checklist` runs a live model through ten cases. Every check is one function in
`whorl/doctor/checks`, and its findings carry a code; docs/doctor.md describes every code.
"""

from whorl.doctor.checkup import check
from whorl.doctor.compare import check_pair
from whorl.doctor.live_model import GuardError, check_npu_mrope, guard
from whorl.doctor.report import Finding, Report, RotaryPath
from whorl.doctor.settings import BadInput
from whorl.doctor.ten_cases import Checklist, checklist

__all__ = [
    "BadInput",
    "Checklist",
    "Finding",
    "GuardError",
    "Report",
    "RotaryPath",
    "check",
    "check_npu_mrope",
    "check_pair",
    "checklist",
    "guard",
]

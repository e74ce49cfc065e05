"""Why a rotary configuration goes wrong, said before it runs. Works without torch.

`check` reads configurations, launch flags, logs and traces; `guard` looks at a live model, `checklist` tries it out. A
check is one function in `whorl/doctor/checks`; every code is described in docs/doctor.md.
"""

from whorl.doctor.checkup import check
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
    "checklist",
    "guard",
]

"""Stop a CI pipeline before a wrong rotary configuration reaches a cluster: exit code 1 when the doctor finds errors.

    python examples/doctor_in_ci.py examples/qwen3_vl_fixed examples/qwen3_30b_mindspeed

It needs neither torch nor an accelerator. The command line has the same exit codes: `whorl doctor PATH`.
"""

import sys

from whorl.doctor import BadInput, check


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__)
        return 2
    worst = 0
    for path in paths:
        try:
            report = check(path)
        except BadInput as error:
            print(f"{path}: {error}")
            worst = 2
            continue
        print(f"{path}: {'wrong' if report.failed else 'fine'} ({report.framework}, {report.model})")
        for finding in report.findings:
            if finding.severity != "note":
                print(f"  {finding.severity} {finding.code} in {finding.where}")
                print(f"    found {finding.found}, expected {finding.expected}")
                print("".join(f"    fix: {fix}\n" for fix in finding.fix), end="")
        worst = max(worst, report.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

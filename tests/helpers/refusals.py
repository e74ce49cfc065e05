"""How commands refuse."""

from click.testing import Result


def check_refused(done: Result, message: str) -> None:
    """Asked wrongly: nothing on standard output, one line that says why."""
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("whorl: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1

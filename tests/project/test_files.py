"""Output files are whole or absent, have the umask's mode, and fail with one line."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from whorl.files import CannotWrite, check_output_file, is_partial, output_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_new_file_has_the_umasks_mode_whoever_wrote_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with output_file(tmp_path / "a.safetensors") as file:
            save_file({"w": torch.zeros(3)}, file)  # makes files of mode 0600
        with output_file(tmp_path / "b.json") as file:
            file.write_text("{}")
    finally:
        os.umask(before)
    assert [mode(path) for path in sorted(tmp_path.iterdir())] == [0o666 & ~umask] * 2


def test_until_the_block_ends_the_old_file_is_there_and_after_an_error_still(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    target.chmod(0o640)
    with pytest.raises(KeyboardInterrupt), output_file(target) as file:  # noqa: PT012 both in one block
        file.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert target.read_text() == "old"
    with output_file(target) as file:
        file.write_text("new")
        assert (target.read_text(), file.parent, file.suffix) == ("old", tmp_path, ".json")
    assert (target.read_text(), mode(target)) == ("new", 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_before_its_end_is_known_by_its_name(tmp_path: Path) -> None:
    for name in ("model.json", "SHA256SUMS", "a.tar.gz"):
        with output_file(tmp_path / name) as partial:
            assert is_partial(partial)
        assert not is_partial(tmp_path / name)


def test_a_link_stays_and_a_device_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with output_file(tmp_path / "link") as file:
        file.write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "x"
    with output_file(Path("/dev/null")) as file:
        file.write_text("x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path / "absent" / "a.json", "No such file or directory"),
        (tmp_path / "file" / "a.json", "Not a directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(CannotWrite) as error, output_file(path):
            pytest.fail("began")
        assert str(error.value) == f"{path}: cannot be written: {why}"
        with pytest.raises(CannotWrite, match=why):
            check_output_file(path)
    with (
        pytest.raises(CannotWrite, match="full: cannot be written: No space left"),
        output_file(Path("/dev/full")) as f,
    ):
        f.write_text("x")


def test_an_error_of_a_library_in_rust_is_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="Not a directory"), output_file(tmp_path / "a.safetensors") as file:
        save_file({"w": torch.zeros(3)}, file / "below")
    with pytest.raises(ValueError, match="own"), output_file(tmp_path / "b"):
        raise ValueError("own")
    assert not list(tmp_path.iterdir())


def test_the_check_leaves_nothing(tmp_path: Path) -> None:
    check_output_file(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())

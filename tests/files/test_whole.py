"""Files written whole: links, pipes, loops of links; errors of reading."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from einlinear.errors import EinlinearError
from einlinear.files.whole import checked_reading, write_whole

posix = pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")


@posix
def test_a_link_stays_a_link_to_the_new_file(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to("old")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "old").read_bytes() == b"new"


@posix
def test_a_pipe_is_written_to_by_its_own_name():
    """As for /dev/stdout, which is a link to a name of no file."""
    reader, writer = os.pipe()
    name = f"/dev/fd/{writer}"
    try:
        if not os.path.exists(name):
            pytest.skip("this system has no /dev/fd")
        write_whole(Path(name), b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)
        os.close(writer)


@posix
def test_a_loop_of_links_is_an_error_of_ours(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(EinlinearError, match="cannot write"):
        write_whole(tmp_path / "a", b"anything")


def test_an_error_in_the_middle_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise OSError("no space left")

    with pytest.raises(EinlinearError, match="no space left"):
        write_whole(path, chunks())
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "error", [ValueError("no table"), PermissionError(13, "Permission denied")]
)
def test_errors_of_reading_name_the_file(error):
    with pytest.raises(EinlinearError) as raised:
        with checked_reading(Path("a.csv"), rule="a rule", fix="a fix"):
            raise error
    said = error.strerror if isinstance(error, OSError) else str(error)
    assert (raised.value.what, raised.value.rule) == (f"cannot read a.csv: {said}", "a rule")
    assert raised.value.__cause__ is error


def test_errors_that_are_not_of_reading_stay():
    ours = EinlinearError(what="a", rule="b", fix="c")
    for error, kinds in ((ours, (OSError, ValueError)), (ValueError("d"), (OSError,))):
        with pytest.raises(type(error)) as raised:
            with checked_reading(Path("a.csv"), rule="", fix="", errors=kinds):
                raise error
        assert raised.value is error


@posix
def test_processes_that_write_one_file_do_not_mix(tmp_path):
    """As a worker that outlives a killed command, and the command that was started again."""
    path = tmp_path / "file"
    code = (
        "import sys; from pathlib import Path; from einlinear.files.whole import write_whole\n"
        "for _ in range(150): write_whole(Path(sys.argv[1]), iter([sys.argv[2].encode()] * 500))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), c * 97]) for c in "abc"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            found = path.read_bytes()
            assert len(found) == 97 * 500
            assert len(set(found)) == 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@posix
def test_a_file_that_another_process_keeps_writing_is_left_to_it(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr("einlinear.files.whole._SECONDS_TO_WAIT", 0.1)
    with (tmp_path / "file.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"half")
        with pytest.raises(EinlinearError, match="another process"):
            write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file.part").read_bytes() == b"half"
    assert not (tmp_path / "file").exists()

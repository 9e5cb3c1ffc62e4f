"""The cache directory, and writing that leaves a whole file or none."""

from pathlib import Path

import pytest

from hf_ddtree.files import user_cache, write_then_rename


def test_user_cache_follows_xdg_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "hf_ddtree"


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_user_cache_is_in_the_home_directory_otherwise(value, tmp_path, monkeypatch):
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_cache() == tmp_path / ".cache" / "hf_ddtree"


def write_folder(text: str):
    """Return a function that writes a folder with one file."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(text)

    return write


def test_write_then_rename_makes_missing_parents_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "new" / "costs.json"
    write_then_rename(path, lambda unfinished: unfinished.write_text("text"))
    assert path.read_text() == "text"
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert list(path.parent.iterdir()) == [path]


def test_write_then_rename_writes_beside_the_path(tmp_path):
    """A rename is atomic within one file system only."""
    path = tmp_path / "file"

    def write(unfinished):
        assert unfinished != path and not path.exists()
        assert unfinished.is_relative_to(tmp_path)
        unfinished.touch()

    write_then_rename(path, write)
    assert path.exists()


def test_write_then_rename_replaces_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    write_then_rename(path, lambda unfinished: unfinished.write_text("new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_write_then_rename_keeps_an_existing_folder(tmp_path):
    path = tmp_path / "model"
    write_folder("first")(path)
    write_then_rename(path, write_folder("second"))
    assert (path / "weights").read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_write_then_rename_of_two_at_once_keeps_the_first(tmp_path):
    folder = tmp_path / "model"

    def write_while_another_finishes(unfinished):
        write_then_rename(folder, write_folder("first"))
        write_folder("second")(unfinished)

    write_then_rename(folder, write_while_another_finishes)
    assert (folder / "weights").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError], ids=["interrupted", "disk full"])
@pytest.mark.parametrize("existing", [None, "old"])
def test_write_then_rename_that_fails_half_way_changes_nothing(existing, failure, tmp_path):
    path = tmp_path / "file"
    if existing is not None:
        path.write_text(existing)

    def write(unfinished):
        unfinished.write_text("hal")
        raise failure

    with pytest.raises(failure):
        write_then_rename(path, write)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if existing is None else [existing])


def test_write_then_rename_reports_a_rename_that_fails(tmp_path):
    """A folder cannot replace a file, and nothing is silently dropped."""
    path = tmp_path / "model"
    path.write_text("a file")
    with pytest.raises(OSError):
        write_then_rename(path, write_folder("a folder"))
    assert path.read_text() == "a file" and list(tmp_path.iterdir()) == [path]

"""Files on the user's disk: the cache directory of this package, and writing that cannot leave half a file."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory


def user_cache() -> Path:
    """Return this package's folder in the user's cache directory. The folder may not exist yet.

    Raises:
        RuntimeError: if `$XDG_CACHE_HOME` is not set and there is no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_ddtree"


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with an unfinished path beside `path`, then rename: `path` appears complete or not at all.

    A file that exists is replaced. A folder that exists is kept: of several processes that write the same folder the
    first one wins, and the others drop their own result.

    Args:
        path: the final path of the file or folder. Missing parent folders are created.
        write: creates a file or a folder at the path that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder, path.name)
        write(unfinished)
        try:
            os.replace(unfinished, path)
        except OSError:
            if not path.is_dir():
                raise

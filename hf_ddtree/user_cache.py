"""Where files of this package are kept between runs."""

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder in the user's cache directory; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_ddtree"

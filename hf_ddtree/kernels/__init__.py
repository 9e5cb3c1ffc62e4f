"""The Triton kernel of tree attention and its reference in PyTorch.

In a checkout and in an editable install, the modules of this package are in the folder kernels/ of the repository. A
wheel has them in this folder.
"""

from pathlib import Path

if not Path(__file__).with_name("reference.py").is_file():
    __path__ = [str(Path(__file__).parents[2] / "kernels")]

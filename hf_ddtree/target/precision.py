"""The precision in which a forward computes. The dtype of the weights does not say it, for example under autocast."""

import torch
from torch.overrides import TorchFunctionMode


class PrecisionRecorder(TorchFunctionMode):
    """Records, inside the context, the dtypes that PyTorch's functions return in this thread."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    @property
    def is_low(self) -> bool:
        """Whether a result had fewer bits of precision than float32."""
        return any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in self.dtypes)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of PyTorch, and record the dtypes of its result."""
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, list | tuple) else [result]:
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                self.dtypes.add(item.dtype)
        return result

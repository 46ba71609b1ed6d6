"""Count where the host would wait for a GPU; it works on the CPU too, since it intercepts calls."""

from __future__ import annotations

import traceback
from contextlib import ExitStack

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Methods that read a number, a Boolean or an array from a tensor.
READS = {
    "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "cpu", "numpy", "__array__",
}  # fmt: skip
# Operations whose output size depends on the values, and torch's internal read of one number.
DATA_DEPENDENT = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")


class HostWaits:
    """Count waits inside a `with` block: `num` of them, and `where` each happened."""

    def __init__(self) -> None:
        self.where: list[str] = []

    @property
    def num(self) -> int:
        return len(self.where)

    def add(self, what: str) -> None:
        frames = [f"{f.filename.rsplit('/', 2)[-1]}:{f.lineno}" for f in traceback.extract_stack()[:-2]]
        self.where.append(f"{what} at {' < '.join(reversed(frames[-8:]))}")

    def __enter__(self) -> HostWaits:
        self._stack = ExitStack()
        self._stack.enter_context(_Reads(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Reads(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        # `torch.tensor(values, device="cuda")` copies from unpinned memory, so it waits like a read.
        copies = func in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None
        if copies and (isinstance(args[0], torch.Tensor) or args[0] == []):
            copies = False  # already a tensor, or empty
        if name in READS or copies:
            self.waits.add(name)
            with torch._C.DisableTorchFunctionSubclass():
                return _quietly(func, args, kwargs)
        return func(*args, **(kwargs or {}))


_quiet = False


def _quietly(func, args, kwargs):
    """Call without counting operations: a read also runs operations inside torch and must count once."""
    global _quiet
    _quiet, before = True, _quiet
    try:
        return func(*args, **(kwargs or {}))
    finally:
        _quiet = before


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if not _quiet and (name in DATA_DEPENDENT or by_mask):
            self.waits.add(name)
        return func(*args, **(kwargs or {}))

"""A device that tests can have anywhere: its tensors lie on the host, and every wait of the host for it is counted.

Tensors of the stand-in say that they lie on the device `meta`. What CUDA waits for: numbers that the host reads, shapes
that depend on numbers, and copies that are not asked for with `non_blocking`, to the device, too.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import foretell
from foretell.model.block.decoder import Decoder

STAND_IN = torch.device("meta")
_SOURCE = foretell.__path__[0]
_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "bincount"}
_READS |= {"_unique2", "unique_dim", "unique_consecutive", "_unique", "allclose", "histc"}
"""Operations whose result the host waits for: it is a number, or its shape depends on numbers."""
_COPIES = {"to", "_to_copy", "copy_", "cpu"}


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in."""

    host: torch.Tensor
    """Its numbers, which nothing but the stand-in itself may read."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                dtype=host.dtype,
                device=STAND_IN,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
            )

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("tensors of the stand-in are used inside stand_in_device() only")

    def tolist(self) -> Any:
        """As on a device: a copy to the host."""
        return self.cpu().tolist()


@dataclass
class Waits:
    """Where the host waited for the device, as `operation file:line`, in order."""

    at: list[str] = field(default_factory=list)

    def add(self, operation: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(_SOURCE)]
        where = f"{frames[-1].filename.removeprefix(_SOURCE + '/')}:{frames[-1].lineno}" if frames else "test"
        self.at.append(f"{operation} {where}")


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = Waits()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, tensors = func.overloadpacket.__name__, [a for a in tree_leaves((args, kwargs)) if _is_tensor(a)]
        on_device = [isinstance(t, DeviceTensor) for t in tensors]
        target = kwargs.get("device")
        if name == "to":
            target = next((a for a in args[1:] if isinstance(a, torch.device)), target)
        makes_device = any(on_device) if target is None else torch.device(target) == STAND_IN
        if name == "copy_":
            makes_device = on_device[0]
        self._count(name, args, kwargs, tensors, on_device, makes_device)
        out = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if name.endswith("_") and not name.startswith("_"):
            return args[0]
        if name in ("to", "_to_copy"):
            if on_device[0] == makes_device:
                return tensors[0] if out is _host(tensors[0]) else DeviceTensor(out) if makes_device else out
            out = out.clone()  # A copy to another place shares no memory.
        return tree_map(lambda x: DeviceTensor(x) if _is_tensor(x) else x, out) if makes_device else out

    def _count(
        self, name: str, args: Any, kwargs: Any, tensors: Any, on_device: list[bool], makes_device: bool
    ) -> None:
        if not any(on_device) and not makes_device:
            return
        if name in _COPIES:
            waits = not kwargs.get("non_blocking", False) and not any(a is True for a in args[1:])
            source = on_device[-1]
            if source != makes_device and waits:
                self.waits.add("upload" if makes_device else "read")
        elif name in _READS and any(on_device):
            self.waits.add(name)
        elif name in ("index", "index_put", "index_put_") and on_device[0]:
            for index in (i for i in args[1] if i is not None):
                if index.dtype == torch.bool:
                    self.waits.add("boolean index")
                if not isinstance(index, DeviceTensor):
                    self.waits.add("host index")
            values = args[2] if len(args) > 2 else args[0]
            if not isinstance(values, DeviceTensor) and values.dim():
                raise RuntimeError("values of an assignment lie on the host")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and any(on_device):
            self.waits.add(name)
        elif any(on_device):
            mixed = [t for t, yes in zip(tensors, on_device, strict=True) if not yes and t.dim()]
            if mixed:
                raise RuntimeError(f"{name} of tensors on the device and on the host")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _host(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.host
    return torch.device("cpu") if isinstance(x, torch.device) and x == STAND_IN else x


@contextmanager
def stand_in_device() -> Iterator[Waits]:
    """Let `STAND_IN` be a device; what the host waits for."""
    mode = _Mode()
    with mode:
        yield mode.waits


def moved(decoder: Decoder) -> Decoder:
    """A decoder on the stand-in; the one on the host must not be used any more."""
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.to(STAND_IN), requires_grad=False))
    return decoder.first_layers(decoder.config.layers)

"""An emulated GPU: tensors that compute on the CPU, say they are elsewhere, refuse CPU tensors.

It shows a mix of devices as CUDA does, and nothing of a GPU's kernels, memory or speed. A process
can have it only once and for good, so a process of its own imports it, before anything of ours.
"""

import safetensors.torch
import torch
import torch.utils.checkpoint
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

NAME = "npu"
backend_registration._setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")
MIXES = "to _to_copy copy_ index index_put_ _index_put_impl_".split()  # as on CUDA


class EmulatedTensor(torch.Tensor):
    """A tensor on the emulated device, around the CPU tensor that holds its numbers."""

    @staticmethod
    def __new__(cls, inner):
        layout = inner.shape, inner.stride(), inner.storage_offset()
        return torch.Tensor._make_wrapper_subclass(cls, *layout, dtype=inner.dtype, device=DEVICE)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"emulated({self.inner})"

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):  # whoever saves tensors compares their storages
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return emulated(func, *args, **(kwargs or {}))


def unwrapped(x):
    if isinstance(x, EmulatedTensor):
        return x.inner
    return CPU if isinstance(x, torch.device) else x


def emulated(func, *args, **kwargs):
    """An operation of the device: on the CPU, with its results put back on the device."""
    name, everything = func.overloadpacket.__name__, list(tree_iter((args, kwargs)))
    for x in everything:
        # Numbers without a dimension may come from the CPU.
        on_cpu = isinstance(x, torch.Tensor) and not isinstance(x, EmulatedTensor) and x.dim()
        if on_cpu and name not in MIXES:
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on cpu, of shape {tuple(x.shape)}")
    kwargs.pop("pin_memory", None)
    result = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if name == "_local_scalar_dense" or (name in ("to", "_to_copy") and CPU in everything):
        return result
    if name == "copy_" and not isinstance(args[0], EmulatedTensor):
        return args[0]
    of_inner = {id(x.inner): x for x in everything if isinstance(x, EmulatedTensor)}

    def wrapped(x):
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in of_inner:
            return of_inner[id(x)]
        # A view of a parameter in inference mode (a convolution's) must be as the parameter is.
        with torch.inference_mode(False):
            return EmulatedTensor(x)

    return tree_map(wrapped, result)


class _Helped(torch.overrides.TorchFunctionMode):
    """What PyTorch cannot pass on to Python: torch.tensor on the device, lists as indices."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == NAME:
            return torch.tensor(*args, **{**kwargs, "device": CPU}).to(DEVICE)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = tuple(torch.tensor(x) if isinstance(x, list) else x for x in places)
            args = (args[0], places, *args[2:])
        return func(*args, **kwargs)


_library = torch.library.Library("_", "IMPL")
_library.fallback(emulated, "PrivateUse1")  # torch.empty and the like, which have no tensor yet
_Helped().__enter__()
# The Python backend has no streams, which a recomputation in the backward pass asks for.
torch.utils.checkpoint.checkpoint = lambda f, *args, **_: f(*args)
_load_file = safetensors.torch.load_file
safetensors.torch.load_file = lambda path, device="cpu": _load_file(path)  # PEFT copies them over

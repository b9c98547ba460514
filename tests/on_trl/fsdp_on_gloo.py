"""FSDP2 on CPU processes: accelerate shards on GPUs alone, and a test needs its collectives.

Call `install` in each process that torchrun starts, before transformers or accelerate make their
state. Parameters are DTensors then, as on GPUs.
"""

import os

SHARDING = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def install():
    """Make accelerate believe that its processes have GPUs, which talk by gloo."""
    os.environ.update(SHARDING)
    import torch
    from accelerate import state
    from accelerate.utils import DistributedType

    def use_gloo(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_GPU  # FSDP is refused for MULTI_CPU

    def stay_on_cpu(self):
        self.device = torch.device("cpu")

    state.PartialState._prepare_backend = use_gloo
    state.PartialState.set_device = stay_on_cpu

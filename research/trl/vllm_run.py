"""extras.on_trl with vLLM in the same process, on a CPU; its last line times a step.

    python research/trl/vllm_run.py --preset tiny ... -- --use_vllm ...     flags of extras.on_trl

As it starts, vLLM packs each weight for the CPU (for AMX, or oneDNN) and drops the weight itself.
TRL, which writes each step's weights into the engine, then ends with "'Parameter' object has no
attribute 'weight_loader'". Unpacked, the engine multiplies by what TRL writes, as on a GPU.
"""

import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import distributed
from extras import on_trl


def keep_unpacked() -> None:
    """Make vLLM multiply by its weights as they are; call it before the engine starts."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    _custom_ops._supports_onednn = False


class TimedLoop(on_trl.Loop):
    """Prints the median of the processor seconds of a step, from its beginning to its end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_step_begin(args, state, control)
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_step_end(args, state, control)
        self.seconds.append(time.process_time() - self.began)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.run.world.main and self.seconds:
            median = statistics.median(self.seconds)
            print(f"a step took {median:.2f} processor seconds (median)")


if __name__ == "__main__":
    if "--use_vllm" in sys.argv:
        keep_unpacked()
    on_trl.Loop = TimedLoop
    distributed.run_and_exit(on_trl.main)

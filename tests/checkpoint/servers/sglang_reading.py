"""What SGLang's own code makes of a `config.json`: the window of each layer, and the layers of its short pool.

The interpreter of `make test-servers` runs this file. SGLang wants a GPU to compute, but its classes can be built
without one, and without memory. What it imports on the way and no class needs here is replaced by stand-ins.
"""

import importlib
import os
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

STAND_INS = {"torchvision", "torchaudio", "IPython", "gguf", "sgl_kernel"}

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class StandIns(MetaPathFinder, Loader):
    """Modules that have whatever is asked of them."""

    def find_spec(self, fullname, path, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in STAND_INS else None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module):
        pass


# Before there is a stand-in for torchvision, of which transformers asks the version.
importlib.import_module("transformers.models.auto.processing_auto")
sys.meta_path.insert(0, StandIns())
warnings.simplefilter("ignore")

import torch  # noqa: E402
from line_answers import answer_lines  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402


def read(folder: str, disable: bool) -> dict:
    """The `class` that runs an export, and of each layer the window, in keys before the query's own (-1: none).

    `disable`: `--disable-hybrid-swa-memory`. `short`: the layers of the short pool; None: there is one pool.
    """
    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="intel_amx",
        disable_hybrid_swa_memory=disable,
    )
    config = ModelConfig.from_server_args(args)
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(args, role="test", hf_config=config.hf_config, ranks=ranks)
    if not parallel_state.model_parallel_is_initialized():
        address = f"file://{os.path.abspath(sys.argv[1])}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel()
        initialize_dp_attention(config)
    runs, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    with torch.device("meta"):
        model = runs(config.hf_config)
    # The class that runs models of transformers keeps them apart.
    attention = [*model.modules(), *getattr(model, "attention_instances", {}).values()]
    layers = {one.layer_id: one.sliding_window_size for one in attention if isinstance(one, RadixAttention)}
    windows = [-1 if window is None else window for _, window in sorted(layers.items())]
    resolved = runtime_context.get_server_args()
    pools = config.is_hybrid_swa and not resolved.disable_hybrid_swa_memory
    return {"class": runs.__name__, "windows": windows, "short": config.swa_attention_layer_ids if pools else None}


if __name__ == "__main__":
    answer_lines(read)

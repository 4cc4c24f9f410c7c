"""vLLM's models with the pattern in place of their attention."""

import re
from collections.abc import Iterable, Iterator

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from swa_jax_vllm.layer import PatternAttention
from swa_jax_vllm.pattern import Pattern

Weights = Iterable[tuple[str, torch.Tensor]]  # by their names in the checkpoint
PROJECTION = re.compile(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(\w+)$")


class _WithPattern:
    """A model whose layers call `self_attn.attn` with rotated queries and keys: there the pattern comes in.

    KV heads, with their queries, are put into the pattern's order as weights are read.
    """

    orders: list[torch.Tensor] | None = None  # of each layer, int [K]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        pattern = Pattern.read(config.swa_pattern, layers, heads)
        ranks = get_tensor_model_parallel_world_size()
        if any(pattern.full_kv_heads):
            if vllm_config.lora_config is not None:
                raise NotImplementedError("swa-jax-vllm: single full KV heads with LoRA adapters")
            self.orders = [torch.tensor(pattern.order(layer, heads, ranks)) for layer in range(layers)]
        known = get_current_vllm_config().compilation_config.static_forward_context
        for number in range(self.model.start_layer, self.model.end_layer):
            attention = self.model.layers[number].self_attn
            del known[attention.attn.layer_name]
            attention.attn = PatternAttention(attention, pattern, number, vllm_config)

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(weights if self.orders is None else _in_order(weights, self.orders))


def _in_order(weights: Weights, orders: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with the KV heads of each layer in its order (int [K]): outputs of q, k and v, inputs of o."""
    for name, tensor in weights:
        if found := PROJECTION.search(name):
            layer, projection, what = found.groups()
            if what not in ("weight", "bias"):
                raise NotImplementedError(f"swa-jax-vllm: single full KV heads with quantised weights: {name}")
            if (projection, what) != ("o", "bias"):
                axis, order = int(projection == "o"), orders[int(layer)]
                tensor = tensor.unflatten(axis, (len(order), -1)).index_select(axis, order).flatten(axis, axis + 1)
        yield name, tensor


class SwaJaxLlamaForCausalLM(_WithPattern, LlamaForCausalLM):
    pass


class SwaJaxMistralForCausalLM(_WithPattern, MistralForCausalLM):
    pass


class SwaJaxQwen2ForCausalLM(_WithPattern, Qwen2ForCausalLM):
    pass


class SwaJaxQwen3ForCausalLM(_WithPattern, Qwen3ForCausalLM):
    pass


class SwaJaxGemma3ForCausalLM(_WithPattern, Gemma3ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        if vllm_config.model_config.dtype == torch.float16:  # vLLM refuses it by the name of the model, which is ours
            raise ValueError("Gemma 3 overflows in float16: serve it with --dtype bfloat16 or float32")
        super().__init__(vllm_config=vllm_config, prefix=prefix)

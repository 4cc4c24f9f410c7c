"""vLLM's models with the pattern in place of their attention."""

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from swa_jax_vllm.layer import PatternAttention
from swa_jax_vllm.pattern import Pattern


class _WithPattern:
    """A model whose layers call `self_attn.attn` with rotated queries and keys: there the pattern comes in."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        pattern = Pattern.read(config.swa_pattern, config.num_hidden_layers, config.num_key_value_heads)
        known = get_current_vllm_config().compilation_config.static_forward_context
        for number in range(self.model.start_layer, self.model.end_layer):
            attention = self.model.layers[number].self_attn
            del known[attention.attn.layer_name]
            attention.attn = PatternAttention(attention, pattern, number, vllm_config)


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

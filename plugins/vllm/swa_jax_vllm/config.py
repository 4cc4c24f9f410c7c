"""`config.json` of an export: a `model_type` of our own, a known family's keys, and the pattern under one key."""

from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from swa_jax_vllm.pattern import Pattern
from swa_jax_vllm.versions import check_version

PREFIX = "swa_jax_"
NO_WINDOW = 2**30  # longer than any sequence


def _with_pattern(base: type) -> type:
    """The configuration of a family with `swa_pattern` in it."""

    class Config(base):
        model_type = PREFIX + base.model_type
        architecture = f"SwaJax{base.__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"

        def __init__(self, swa_pattern=None, **keys):
            super().__init__(**keys)
            self.swa_pattern = swa_pattern
            # Windows are the pattern's. `layer_types` stay: Gemma 3 finds by them how a layer rotates.
            self.sliding_window = None
            if swa_pattern is None:
                return  # transformers makes one without keys to find out which differ from the defaults
            check_version()
            if Pattern.read(swa_pattern, self.num_hidden_layers, self.num_key_value_heads).full_attention_decode:
                # vLLM then says where each prompt ends: `CommonAttentionMetadata.rswa_prefix_lens`.
                self.rswa_window = NO_WINDOW

    Config.__name__ = Config.__qualname__ = f"SwaJax{base.__name__}"
    return Config


CONFIGS = tuple(map(_with_pattern, (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig)))
globals().update({config.__name__: config for config in CONFIGS})  # by these names they are pickled

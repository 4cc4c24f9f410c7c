"""A plug-in for vLLM: sink tokens, full-attention decode and single full KV heads, as swa-jax exports them."""

from swa_jax_vllm.versions import may_run


def register() -> None:
    """Make the models known. vLLM calls this in each of its processes; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from swa_jax_vllm.config import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        ModelRegistry.register_model(config.architecture, f"swa_jax_vllm.models:{config.architecture}")
    if may_run():
        from swa_jax_vllm import cache  # noqa: F401  (makes its kinds of caches known)

"""cuDNN on GPUs: which calls it takes, what JAX is asked for, and what the backward pass finds saved.

No GPU is needed: JAX's own attention in XLA, which takes the same arguments, stands in for cuDNN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import AttentionSpec, attention, cudnn, dispatch
from pallas_kernels.dispatch import dispatched
from swa_jax.model.remat import rematerialised

from .suite import Call, with_gradients
from .test_dispatch import H200, request
from .tolerances import assert_both_close

GPU = dataclasses.replace(H200, cudnn=True)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(cudnn, "installed", lambda: True)


@pytest.mark.parametrize(
    "call",
    [
        Call(AttentionSpec()),
        Call(AttentionSpec(window=1)),
        Call(AttentionSpec(window=7)),
        Call(AttentionSpec(window=500)),
        Call(AttentionSpec(window=7, scale=0.4), ("logit_scales",), kv_heads=1),
    ],
    ids=["full", "own-key", "window", "longer-than-the-row", "scales"],
)
def test_jax_is_asked_for_what_the_spec_says(on_gpu, monkeypatch, call):
    monkeypatch.setattr(cudnn, "_BACKEND", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", ("float32",))

    def run(implementation):
        attend = with_gradients(lambda learned: attention(**learned, spec=call.spec, implementation=implementation))
        return attend(call.draw()[0])

    assert_both_close(run("cudnn"), run("reference"), call.dtype)


def test_a_gpu_takes_cudnn_for_what_it_serves_and_triton_for_the_rest():
    window = AttentionSpec(300)
    for served in (
        request(device=GPU),
        request(AttentionSpec(), device=GPU),
        request(window, "logit_scales", device=GPU, dtype="float16", head_dim=256),
    ):
        assert dispatched(served) == ("cudnn", (), None, None)
    for lacks, other in {
        "routed_attention": request(op="routed_attention", device=GPU),
        "decode_attention": request(op="decode_attention", device=GPU),
        "q is float32": request(device=GPU, dtype="float32"),
        "head_dim is 100": request(device=GPU, head_dim=100),
        "up to 128": request(device=dataclasses.replace(GPU, capability=80), head_dim=256),
        "must be equal": request(device=GPU, q_length=7),
        "without sink tokens": request(AttentionSpec(300, 4), device=GPU),
        "without a softcap": request(AttentionSpec(300, logit_softcap=30.0), device=GPU),
        "causal softmax": request(AttentionSpec(300, activation="sigmoid"), device=GPU),
        "causal": request(AttentionSpec(300, causal=False), device=GPU),
        "q_segment_ids, sink_logits": request(window, "sink_logits", "q_segment_ids", device=GPU),
        "return_lse": request(window, "return_lse", device=GPU),
        "no NVIDIA GPU": request(device=H200),
    }.items():
        found = dispatched(other)
        assert (found.implementation, found.fallback) == ("triton", None), lacks
        with pytest.raises(NotImplementedError, match=f"implementation 'cudnn' cannot take this call: .*{lacks}"):
            dispatched(dataclasses.replace(other, implementation="cudnn"))


def test_the_log_sum_exp_is_asked_of_another(on_gpu):
    q = jnp.ones((1, 16, 2, 16), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="return_lse"):
        attention(q, q, q, AttentionSpec(4), return_lse=True, implementation="cudnn")


def test_a_cpu_refuses_it_by_name():
    q = jnp.ones((1, 16, 2, 16), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="this process has no NVIDIA GPU"):
        attention(q, q, q, AttentionSpec(4), implementation="cudnn")


@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("layer", 2), ("attention", 1), ("projections", 1)])
def test_rematerialised_layers_keep_what_cudnn_needs(on_gpu, monkeypatch, remat, times):
    """The primitive's name is JAX's own: if it changes, the forward pass would run twice without a word."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    q = jnp.ones((1, 64, 2, 16), jnp.bfloat16)

    def layer(q):
        q = jnp.sin(q)  # not saved, unless everything is
        return jnp.cos(attention(q, q, q, AttentionSpec(8)))

    jaxpr = str(jax.jit(jax.grad(lambda q: rematerialised(layer, remat)(q).sum())).trace(q).jaxpr)
    assert jaxpr.count(cudnn.FORWARD) == times
    assert jaxpr.count("sliding_window_length=8") == times + 1  # JAX counts the query's own key here, as we do

"""gpt-oss' mixture in numpy with the roundings of transformers' eager code: after every step, to the model's dtype.

What `FusedMoE` keeps in float32 from product to product, eager PyTorch rounds thirteen times: logits, weights, both
products and their biases, the five steps of the activation, the weighting and every sum. In bfloat16 its error is
therefore about twice ours, and only this form can say whether it is what these roundings cost.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxattn.quant import mx
from parity.judge import Yardstick

ALPHA = 1.702


def yardsticks(model: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, Yardstick]:
    """Path -> the eager form of each mixture, and its truth.

    Args:
        model: `GptOssForCausalLM`.
        inputs: path -> tokens [T, M] of the module.
    """
    paths = {f"model.layers.{i}.mlp": layer.mlp for i, layer in enumerate(model.model.layers)}
    return {
        path: Yardstick("the eager form", *(mixture(mlp, inputs[path], wide) for wide in (False, True)))
        for path, mlp in paths.items()
        if path in inputs
    }


def mixture(mlp: Any, x: np.ndarray, wide: bool) -> np.ndarray:
    """The tokens [T, M] after the mixture; `wide` rounds nothing.

    Source: transformers 5.24, models/gpt_oss/modeling_gpt_oss.py, `GptOssExperts.forward` and `GptOssTopKRouter`.
    """
    work = np.float64 if wide else np.float32

    def r(y: np.ndarray) -> np.ndarray:
        return y if wide else y.astype(ml_dtypes.bfloat16).astype(work)

    def bias(name: str) -> np.ndarray:
        return np.asarray(getattr(mlp, name)[...]).astype(work)

    w13, w2 = (
        np.asarray(mx.dequantize(getattr(mlp, name)[...], getattr(mlp, f"{name}_scale")[...])).astype(work)
        for name in ("w13", "w2")
    )
    x, limit, k = x.astype(work), mlp.config.limit, mlp.config.top_k
    logits = r(x @ bias("gate").T + bias("gate_bias"))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    top = np.take_along_axis(logits, ids, -1)
    e = np.exp(top - top.max(-1, keepdims=True))
    weights, out = r(e / e.sum(-1, keepdims=True)), np.zeros_like(x)
    for expert in range(mlp.config.experts):
        tokens, slots = np.nonzero(ids == expert)
        joined = r(r(x[tokens] @ w13[expert].T) + bias("w13_bias")[expert])
        gate, up = np.minimum(joined[:, ::2], limit), np.clip(joined[:, 1::2], -limit, limit)
        glu = r(gate * r(1 / (1 + np.exp(-r(gate * work(ALPHA))))))
        y = r(r(r(r(up + 1) * glu) @ w2[expert].T) + bias("w2_bias")[expert])
        out[tokens] = r(out[tokens] + r(y * weights[tokens, slots][:, None]))
    return out

"""The number that attention scores are multiplied with before the softmax, and YaRN's magnitudes."""

import math
from typing import Any

import numpy as np

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism

_OP = "softmax_scale"


def softmax_scale(
    head_dim: int,
    *,
    yarn_factor: float = 1.0,
    mscale_all_dim: float = 0.0,
    indexer_heads: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> float:
    r"""`head_dim^-1/2`, times YaRN's squared magnitude, times `indexer_heads^-1/2`.

        scale = D^-0.5 * m^2 [* H^-0.5],   m = 0.1 * mscale_all_dim * log(yarn_factor) + 1   (1 for yarn_factor <= 1)

    A score q.k of independent components of mean 0 and variance 1 has variance D. Unscaled, a softmax over it is nearly
    one-hot from D = 128 on; with D^-1/2 the scores have variance 1, whatever D. YaRN stretches the context and makes
    the softmax sharper again by m^2, once a factor m for q and once for k.

    | model | call | value |
    |---|---|---|
    | DeepSeek-V2, V3 (without YaRN) | `softmax_scale(192)` | 0.0721688 |
    | DeepSeek-V2, factor 40, mscale 0.707 | `softmax_scale(192, yarn_factor=40, mscale_all_dim=0.707)` | 0.1147214 |
    | DeepSeek-V3, YaRN factor 40, mscale 1 | `softmax_scale(192, yarn_factor=40, mscale_all_dim=1)` | 0.1352338 |
    | DeepSeek-V4, mscale 0 whatever the factor | `softmax_scale(512, yarn_factor=16)` | 0.0441942 |
    | DeepSeek-V3.2 and V4 indexer, folded into the head weights | `softmax_scale(128, indexer_heads=64)` | 0.0110485 |

    Args:
        head_dim: width of q and k as the heads are defined: 192 (128 + 64) for V2 and V3 in both their paths, not the
            width 576 of the latent.
        yarn_factor: by how much YaRN stretches the context; 1 = no YaRN.
        mscale_all_dim: the checkpoint's number of that name; 0 = no sharpening (V4).
        indexer_heads: heads of a sparse-attention indexer, whose scores are summed over heads.
        implementation: None or "reference", there is no kernel.
        config: None, for the same reason.

    Returns:
        A Python float.

    Raises:
        TypeError: an argument is no Python number; ValueError: head_dim, indexer_heads or yarn_factor is not positive.

    Source: https://arxiv.org/abs/1706.03762 section 3.2.1 footnote 4; https://arxiv.org/abs/2309.00071 section 3.4;
    DeepSeek-V2 https://arxiv.org/abs/2405.04434; vLLM 0.26.0 `model_executor/models/deepseek_v2.py`.
    """
    args = prepare(head_dim, yarn_factor=yarn_factor, mscale_all_dim=mscale_all_dim, indexer_heads=indexer_heads)
    return _mechanism.run(MECHANISM, args, implementation, config)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """`0.1 * mscale * log(factor) + 1`, and 1 for factors up to 1; https://arxiv.org/abs/2309.00071, equation 22.

    Args:
        factor: by how much the context is stretched.
        mscale: weight of the correction; 0 switches it off.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_magnitude(
    factor: float, *, mscale: float = 1.0, mscale_all_dim: float | None = None, attention_factor: float = 1.0
) -> float:
    """What YaRN multiplies cos and sin with.

    Args:
        factor: by how much the context is stretched.
        mscale: the checkpoint's number of that name; DeepSeek-V4 has 0.
        mscale_all_dim: DeepSeek's: `yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)`, which is 1 for
            V3 (both 1) and V4 (both 0). None = plain YaRN, without a denominator: 1.2773 at factor 16.
        attention_factor: a further factor of the checkpoint.
    """
    below = 1.0 if mscale_all_dim is None else yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, mscale) / below * attention_factor


def prepare(head_dim, *, yarn_factor=1.0, mscale_all_dim=0.0, indexer_heads=None) -> Args:
    """Validate the arguments of `softmax_scale`; raises as it does."""
    _checks.check_count(_OP, head_dim=head_dim, **({} if indexer_heads is None else {"indexer_heads": indexer_heads}))
    _checks.check_positive(_OP, yarn_factor=yarn_factor)
    return {
        "head_dim": int(head_dim),
        "yarn_factor": float(yarn_factor),
        "mscale_all_dim": float(mscale_all_dim),
        "indexer_heads": None if indexer_heads is None else int(indexer_heads),
    }


def _reference(head_dim, *, yarn_factor, mscale_all_dim, indexer_heads):
    scale = head_dim**-0.5 * yarn_mscale(yarn_factor, mscale_all_dim) ** 2
    return scale if indexer_heads is None else scale * indexer_heads**-0.5


def _case(name: str, head_dim: int, **options) -> Case:
    def make(rng: np.random.Generator) -> Args:
        del rng
        return {"head_dim": head_dim, **options}

    return Case(name=name, make=make, tags=frozenset({"smoke"}))


MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/1706.03762, section 3.2.1; https://arxiv.org/abs/2309.00071, section 3.4",
    op=softmax_scale,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("scale",),
    kernels={},
    cases=(
        _case("D128", 128),
        _case("V3", 192, yarn_factor=40.0, mscale_all_dim=1.0),
        _case("V4", 512, yarn_factor=16.0),
        _case("indexer", 128, indexer_heads=64),
    ),
    cost=lambda **_: (0, 0),
    support=(("any head dim", {"head_dim": 128}),),
)

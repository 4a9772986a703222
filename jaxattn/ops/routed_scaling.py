"""Where the factor of the routed experts goes: into the weights, on the output, or as a divisor of the rest."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism
from jaxattn.quant import primitives as p

_OP = "routed_scaling"
PLACEMENTS = ("weights", "output", "shared")

type Placement = Literal["weights", "output", "shared"]


def routed_scaling(
    routed: Float[Array, "T M"],
    shared: Float[Array, "T M"] | None = None,
    *,
    factor: float,
    placement: Placement,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "T M"]:
    """Sum of routed and shared experts under `routed_scaling_factor` f, in float32, rounded once.

        weights   o = shared + routed          the router has multiplied its weights with f (V3.2, V4)
        output    o = shared + f * routed      (V2, V3)
        shared    o = shared / f + routed      f times smaller; the decoder makes up for it, see `decoder_factor`

    float16 ends at 65504: `f * routed` (f is 16 in V2) overflows where `shared / f + routed` does not.

    Args:
        routed: what the routed experts gave.
        shared: what the shared experts gave, None = there are none.
        factor: f.
        placement: see above.
        implementation: None or "reference"; XLA fuses it into its neighbours.
        config: None.

    Raises:
        TypeError: dtypes; ValueError: shapes or options.

    Source: vLLM 0.26.0 `fused_moe/runner/moe_runner.py`, `models/deepseek_v2.py`.
    """
    return _mechanism.run(
        MECHANISM, prepare(routed, shared, factor=factor, placement=placement), implementation, config
    )


def default_placement(dtype: Any, shared: bool) -> Placement:
    """What vLLM does for V2 and V3: float16 with shared experts divides them, everything else scales the output."""
    return "shared" if shared and jnp.dtype(dtype) == jnp.float16 else "output"


def decoder_factor(factor: float, placement: Placement) -> float:
    """What a decoder multiplies with so that placement "shared" gives the same logits as "output"; 1 for the others.

    1/f: the attention output of every layer, the output of dense MLP layers, and the residual in front of layer 0.
    Then the residual stream is 1/f times the usual one, and RMSNorm removes the factor (its epsilon counts f^2 times as
    much).
    """
    check(_OP, factor, placement)
    return 1 / float(factor) if placement == "shared" else 1.0


def fused_shared_weight(factor: float, placement: Placement) -> float:
    """Routing weight of a shared expert that runs as one more slot of the routed kernel: 1/f if the sum is scaled."""
    check(_OP, factor, placement)
    return 1.0 if placement == "weights" else 1 / float(factor)


def check(op: str, factor: Any, placement: str) -> None:
    """Raise `TypeError` or `ValueError` for options that are none."""
    if factor is None:
        raise TypeError(f"{op}: factor is compiled in and must be a Python number, got None")
    _checks.check_positive(op, factor=factor)
    if placement not in PLACEMENTS:
        raise ValueError(f"{op}: placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")


def prepare(routed, shared=None, *, factor, placement) -> Args:
    """Validate the arguments of `routed_scaling`; raises as it does."""
    _checks.check_shapes(_OP, routed=(routed, "T M"), **({} if shared is None else {"shared": (shared, "T M")}))
    dtype = _checks.check_dtype(_OP, "routed", routed, _checks.FLOATS)
    if shared is not None:
        _checks.check_dtype(_OP, "shared", shared, (dtype,))
    check(_OP, factor, placement)
    return {"routed": routed, "shared": shared, "factor": float(factor), "placement": placement}


def _reference(routed, shared, *, factor, placement):
    o = p.wide(routed)
    if placement == "output":
        o = o * factor
    if shared is not None:
        o = o + p.wide(shared) / (factor if placement == "shared" else 1.0)
    return o.astype(routed.dtype)


def _outputs(**_):
    return ("o",)


def _cost(*, routed, shared, **_):
    """Two operations an element; read and written once."""
    T, M = routed.shape
    return 2 * T * M, jnp.dtype(routed.dtype).itemsize * T * M * (2 + (shared is not None))


def make_inputs(
    rng: np.random.Generator, T: int, M: int, placement: str, *, dtype: str = "bfloat16", shared: bool = True
) -> Args:
    """Random arguments of `routed_scaling`, f = 2.5."""
    args: Args = {"routed": jnp.asarray(rng.standard_normal((T, M)), dtype), "factor": 2.5, "placement": placement}
    return args | ({"shared": jnp.asarray(rng.standard_normal((T, M)), dtype)} if shared else {})


def _case(name: str, T: int, M: int, placement: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, T, M, placement, **options), tags=frozenset({"smoke"}))


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 fused_moe/runner/moe_runner.py, models/deepseek_v2.py",
    op=routed_scaling,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={},
    cases=(
        _case("weights-T5-M64", 5, 64, "weights"),
        _case("output-T5-M64-fp32", 5, 64, "output", dtype="float32"),
        _case("shared-T5-M64-fp16", 5, 64, "shared", dtype="float16"),
        _case("output-T3-M32-no-shared", 3, 32, "output", shared=False),
    ),
    cost=_cost,
    support=tuple(
        (
            placement,
            {"routed": jax.ShapeDtypeStruct((16, 128), jnp.bfloat16), "factor": 2.5, "placement": placement},
        )
        for placement in PLACEMENTS
    ),
)

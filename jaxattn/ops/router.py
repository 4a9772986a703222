"""Routing of tokens to experts: every scoring, grouped and biased top-k, hash routing."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import router as mosaic

_OP = "router"
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
_FROM = 20.0
"""From here on softplus(x) is x."""
_STEPS = 4096.0
"""Multiples of its inverse up to 512 add up in float32 without rounding."""

type Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


def router(
    logits: Float[Array, "T E"],
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    scaling: float = 1.0,
    bias: Float[Array, " E"] | None = None,
    num_groups: int = 1,
    kept_groups: int = 1,
    tokens: Int32[Array, " T"] | None = None,
    table: Int32[Array, "V A"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "T A"], Int32[Array, "T A"]]:
    r"""The A = `top_k` experts of every token and their weights.

        score  = softmax(x) | sigmoid(x) | sqrt(softplus(x))        over the E logits x of a token, float32
        choice = score + bias                                       selects; weights never see the bias
        group  = sum of its two best choices (with a bias) | its best choice (without)
        ids    = the A largest choices within the `kept_groups` best groups, descending; ties to the lowest id;
                 without a bias, scores too small for a normal number follow by their logits
        weight = score[ids] / sum(score[ids]) * scaling             no division without `renormalize`

    With `table` the ids are `table[tokens]` instead (hash routing of DeepSeek-V4's first layers).

    Args:
        logits: float32 (float64: reference only), see `gate_logits`. NaN counts as the lowest finite number, infinities
            as the largest, so that one bad logit never spoils the others.
        top_k: A, distinct experts of a token.
        scoring: of the logits.
        renormalize: divide by the sum of the A scores; a sum of 0 (all underflowed) leaves weights of 0.
        scaling: `routed_scaling_factor` in the weights; see `routed_scaling` for other places.
        bias: `e_score_correction_bias`, float32.
        num_groups: experts come in so many groups of E / num_groups.
        kept_groups: groups that a token may choose from.
        tokens: token ids for `table`, from 0 to V - 1.
        table: experts of every token id (`tid2eid`); with A = `top_k` columns.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `weights` in the dtype of the logits and `ids` in int32.

    Raises:
        TypeError: dtypes; ValueError: shapes, or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: https://arxiv.org/abs/2412.19437, equations 12 to 16; vLLM 0.26.0 `fused_moe/router`, whose `sqrtsoftplus`
    evaluates `log(1 + exp(x))`, 0 below x of about -17 where this gives `exp(x / 2)`.
    """
    args = prepare(
        logits,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        scaling=scaling,
        bias=bias,
        num_groups=num_groups,
        kept_groups=kept_groups,
        tokens=tokens,
        table=table,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def gate_logits(
    x: Float[Array, "T M"], w: Float[Array, "E M"], bias: Float[Array, " E"] | None = None
) -> Float[Array, "T E"]:
    """Router logits `x @ w.T + bias`: products of the inputs' dtype, summed and returned in float32, never rounded.

    Source: vLLM 0.26.0 `fused_moe/router/gate_linear.py`. Logits in bfloat16 would tie close experts.
    """
    _checks.check_shapes("gate_logits", x=(x, "T M"), w=(w, "E M"), **({} if bias is None else {"bias": (bias, "E")}))
    out = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    dtype = jnp.promote_types(x.dtype, w.dtype)
    y = jnp.einsum("tm,em->te", x.astype(dtype), w.astype(dtype), precision="highest", preferred_element_type=out)
    return y if bias is None else y + bias.astype(out)


def prepare(
    logits,
    *,
    top_k,
    scoring="softmax",
    renormalize=True,
    scaling=1.0,
    bias=None,
    num_groups=1,
    kept_groups=1,
    tokens=None,
    table=None,
) -> Args:
    """Validate and complete the arguments of `router`; raises as it does."""
    dims = _checks.check_shapes(_OP, logits=(logits, "T E"), **({} if bias is None else {"bias": (bias, "E")}))
    wide = _checks.check_dtype(_OP, "logits", logits, ("float32", _checks.F64), "compute them with gate_logits")
    if bias is not None:
        _checks.check_dtype(_OP, "bias", bias, (wide,))
    _checks.check_count(_OP, top_k=top_k, num_groups=num_groups, kept_groups=kept_groups)
    _checks.check_positive(_OP, scaling=scaling)
    if scoring not in SCORINGS:
        raise ValueError(f"{_OP}: scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    E = dims["E"]
    if E % num_groups:
        raise ValueError(f"{_OP}: num_groups must divide the number of experts, got {num_groups=} and E={E}")
    if kept_groups > num_groups:
        raise ValueError(f"{_OP}: kept_groups must be at most num_groups, got {kept_groups=} and {num_groups=}")
    eligible = kept_groups * (E // num_groups)
    if top_k > eligible:
        raise ValueError(f"{_OP}: top_k must be at most the {eligible} experts of the kept groups, got {top_k=}")
    if (table is None) != (tokens is None):
        raise ValueError(f"{_OP}: table and tokens belong together; give both or neither")
    if table is not None:
        _checks.check_shapes(_OP, logits=(logits, "T E"), tokens=(tokens, "T"), table=(table, "V A"))
        for name, x in (("tokens", tokens), ("table", table)):
            _checks.check_dtype(_OP, name, x, ("int32",))
        if table.shape[1] != top_k:
            raise ValueError(f"{_OP}: table must have top_k={top_k} columns, got {table.shape[1]}")
        if bias is not None or num_groups > 1:
            raise ValueError(f"{_OP}: a table chooses the experts; leave bias and num_groups out")
    return {
        "logits": logits,
        "top_k": int(top_k),
        "scoring": scoring,
        "renormalize": bool(renormalize),
        "scaling": float(scaling),
        "bias": bias,
        "num_groups": int(num_groups),
        "kept_groups": int(kept_groups),
        "tokens": tokens,
        "table": table,
    }


def _scores(x, scoring, exact):
    """float32 (or float64) scores; finite for every input. `exact`: their common divisor is rounded but once."""
    if scoring == "softmax":
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True, initial=jnp.finfo(x.dtype).min))
        return p.divide(e, _total(e) if exact else jnp.sum(e, -1, keepdims=True))
    if scoring == "sigmoid":
        return jax.nn.sigmoid(x)
    return jnp.sqrt(jnp.where(x > _FROM, x, jnp.log1p(jnp.exp(jnp.minimum(x, _FROM)))))


def _total(e):
    """Sum of numbers up to 1, rounded once: whole steps add up exactly in any order, and what remains is small."""
    whole = jnp.floor(e * _STEPS) * (1 / _STEPS)
    return jnp.sum(whole, -1, keepdims=True) + jnp.sum(e - whole, -1, keepdims=True)


def _choice(scores, x, scoring):
    """Scores to choose by without a bias: below the smallest normal number, where CPUs have 0, the logits decide."""
    rest = x - jnp.max(x, -1, keepdims=True, initial=jnp.finfo(x.dtype).min) if scoring == "softmax" else x
    return jnp.where(scores < jnp.finfo(x.dtype).tiny, _finite(rest), scores)


def _finite(x):
    limits = jnp.finfo(x.dtype)
    return jnp.where(jnp.isnan(x), limits.min, jnp.clip(x, limits.min, limits.max))


def _top(x, count):
    """Indices of the `count` largest along the last axis, descending, ties to the lowest; -0 equals +0."""
    return jnp.argsort(-x, axis=-1, stable=True)[..., :count].astype(jnp.int32)


def _reference(logits, *, top_k, scoring, renormalize, scaling, bias, num_groups, kept_groups, tokens, table):
    """The formula of the docstring."""
    T, E = logits.shape
    logits = _finite(logits)
    scores = _scores(logits, scoring, exact=not renormalize)
    if table is not None:
        ids = table[tokens]
    else:
        choice = _choice(scores, logits, scoring) if bias is None else _finite(scores + bias)
        if num_groups > 1:
            parts = choice.reshape(T, num_groups, E // num_groups)
            best = jax.lax.top_k(parts, min(2, E // num_groups) if bias is not None else 1)[0]
            kept = _top(jnp.sum(best, -1), kept_groups)
            mask = jnp.zeros((T, num_groups), bool).at[jnp.arange(T)[:, None], kept].set(True)
            choice = jnp.where(mask[..., None], parts, -jnp.inf).reshape(T, E)
        ids = _top(choice, top_k)
    weights = jnp.take_along_axis(scores, ids, -1)
    if renormalize:
        total = jnp.sum(weights, -1, keepdims=True)
        weights = p.divide(weights, jnp.where(total > 0, total, 1))
    return weights * jnp.asarray(scaling, weights.dtype), ids


def _outputs(**_):
    return ("weights", "ids")


def _cost(*, logits, top_k, **_):
    """A few operations a logit; logits read, weights and ids written once."""
    T, E = logits.shape
    return 8 * T * E, 4 * T * E + 8 * T * top_k


def make_inputs(
    rng: np.random.Generator,
    T: int,
    E: int,
    *,
    spread: float = 1.0,
    bias: float | None = None,
    vocab: int = 0,
    **options,
) -> Args:
    """Random arguments of `router`.

    Args:
        rng: source of randomness.
        T: tokens.
        E: experts.
        spread: standard deviation of the logits; the first row also holds 30, -30, 100 and 20.
        bias: add one of this mean, with a standard deviation of 0.1.
        vocab: route by a table of so many token ids.
        **options: passed on to the op.
    """
    logits = (spread * rng.standard_normal((T, E))).astype(np.float32)
    if spread > 1 and T and E >= 4:
        logits[0, :4] = 30, -30, 100, 20
    args: Args = {"logits": jnp.asarray(logits)}
    if bias is not None:
        args["bias"] = jnp.asarray(0.1 * rng.standard_normal(E) + bias, jnp.float32)
    if vocab:
        table = np.stack([rng.permutation(E)[: options["top_k"]] for _ in range(vocab)])
        args |= {"table": jnp.asarray(table, jnp.int32), "tokens": jnp.asarray(rng.integers(0, vocab, T), jnp.int32)}
    return args | options


def _case(name: str, T: int, E: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, T, E, **options), tags=frozenset(tags or ("smoke",)))


_V3: dict[str, Any] = {"scoring": "sigmoid", "num_groups": 8, "kept_groups": 4, "top_k": 8, "scaling": 2.5}
_V4: dict[str, Any] = {"scoring": "sqrtsoftplus", "top_k": 6, "scaling": 1.5}

_CASES = (
    _case("V4-T9-E256", 9, 256, spread=3.0, bias=0.0, **_V4),
    _case("V3-T9-E256", 9, 256, bias=0.0, **_V3),
    _case("softmax-T7-E64", 7, 64, top_k=4),
    _case("softmax-plain-T7-E64-k1", 7, 64, top_k=1, renormalize=False),
    _case("V4-T5-E384-bias8", 5, 384, spread=3.0, bias=8.08, **_V4),
    _case("V4-hash-T6-E128", 6, 128, spread=3.0, vocab=11, **_V4),
    _case("V2-T6-E160-max-of-groups", 6, 160, num_groups=8, kept_groups=3, top_k=6, scaling=16.0, renormalize=False),
    _case("sigmoid-T5-E32-k8", 5, 32, scoring="sigmoid", top_k=8),
    _case("T4-E8-all", 4, 8, top_k=8),
    _case("sqrtsoftplus-T5-E40-k6", 5, 40, spread=3.0, bias=0.0, **_V4),
    _case("V4-T8192-E256", 8192, 256, "full", "bench", spread=3.0, bias=0.0, **_V4),
    _case("V3-T8192-E256", 8192, 256, "full", "bench", bias=0.0, **_V3),
)


def _struct(E: int = 256, bias: bool = True, **options) -> Args:
    args: Args = {"logits": jax.ShapeDtypeStruct((64, E), jnp.float32)}
    return args | ({"bias": jax.ShapeDtypeStruct((E,), jnp.float32)} if bias else {}) | options


_HASH = {
    "tokens": jax.ShapeDtypeStruct((64,), jnp.int32),
    "table": jax.ShapeDtypeStruct((1000, 6), jnp.int32),
}

_SUPPORT = (
    ("softmax, E 64, k 8", _struct(64, False, top_k=8)),
    ("softmax, E 8, k 2", _struct(8, False, top_k=2)),
    ("softmax, E 160, groups 3 of 8", _struct(160, False, num_groups=8, kept_groups=3, top_k=6)),
    ("softmax, E 160, not renormalized", _struct(160, False, top_k=6, renormalize=False)),
    ("sigmoid with bias, E 256, groups 4 of 8", _struct(**_V3)),
    ("sqrtsoftplus with bias, E 256", _struct(**_V4)),
    ("sqrtsoftplus with bias, E 384", _struct(384, **_V4)),
    ("sqrtsoftplus by table, E 256", _struct(256, False, **_HASH, **_V4)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2412.19437, equations 12 to 16; vLLM 0.26.0 fused_moe/router",
    op=router,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.router,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("moe/router_*",),
    support=_SUPPORT,
)

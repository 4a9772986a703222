"""What every kernel of every mechanism keeps, on the mechanism's own cases.

Kernels are interpreted on a CPU and compiled where there is a GPU; cases tagged `full` run on a GPU only.
Tolerances and their derivation: `parity.tolerances`, rule `contract`.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _checks, _mechanism
from jaxattn.registry import MECHANISMS
from pallas_kernels import _mosaic
from parity import cases, execution, triangle

CASES = [
    pytest.param(m, case, kernel, id=f"{m.name}-{case.name}-{kernel}")
    for m in MECHANISMS
    for kernel in m.kernels
    for case in m.cases
    if case.tags & {"smoke", "full"}
]
KERNELS = [pytest.param(m, kernel, id=f"{m.name}-{kernel}") for m in MECHANISMS for kernel in m.kernels]
SUPPORT = [
    pytest.param(m, kernel, label, shapes, id=f"{m.name}-{kernel}-{label}")
    for m in MECHANISMS
    for kernel in m.kernels
    for label, shapes in m.support
]
EMPTY = {
    "paged_attention": {
        "no-requests": lambda args: {
            "page_table": args["page_table"][:0],
            "lengths": args["lengths"][:0],
            "query_start": args["query_start"][:1],
        },
        "no-tokens": lambda args: {"q": args["q"][:0], "query_start": 0 * args["query_start"]},
        "nothing": lambda args: {
            "q": args["q"][:0],
            "page_table": args["page_table"][:0],
            "lengths": args["lengths"][:0],
            "query_start": args["query_start"][:1],
        },
    },
    "cascade_attention": {
        "no-requests": lambda args: {
            "page_table": args["page_table"][:0],
            "lengths": args["lengths"][:0],
            "query_start": args["query_start"][:1],
        },
        "no-tokens": lambda args: {"q": args["q"][:0], "query_start": 0 * args["query_start"]},
    },
    "attention": {
        "no-tokens": lambda args: {"q": args["q"][:0], "query_start": 0 * args["query_start"], "causal": False},
        "no-keys": lambda args: {name: args[name][:0] for name in ("k", "v")} | {"key_start": 0 * args["query_start"]},
        "nothing": lambda args: (
            {name: args[name][:0] for name in ("q", "k", "v")} | {"query_start": args["query_start"][:1]}
        ),
    },
    "cache_write": {
        "no-tokens": lambda args: {
            **{name: args[name][:0] for name in ("key", "value", "slots")},
            **{name: jnp.zeros_like(args[name]) for name in ("k_pages", "v_pages")},
        },
    },
    "merge_states": {
        "no-tokens": lambda args: {name: x[:0] for name, x in args.items()},
        "no-heads": lambda args: {name: x[:, :0] for name, x in args.items()},
    },
    "combine_partials": {
        "no-sequences": lambda args: {name: args[name][:, :0] for name in ("o", "lse")},
        "empty-ranks": lambda args: {"lse": jnp.full_like(args["lse"], -jnp.inf)},
    },
    "window_cache": {"no-requests": lambda args: {name: args[name][:0] for name in ("computed", "new")}},
    "softmax_scale": {},
    "quantize_fp8": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "quantize_int8": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "quantize_mx": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "hadamard_transform": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "rms_norm_quant": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "silu_mul_quant": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "router": {"no-tokens": lambda args: {"logits": args["logits"][:0]}},
    "routed_scaling": {"no-tokens": lambda args: {name: args[name][:0] for name in ("routed", "shared")}},
    "align_block_size": {"no-tokens": lambda args: {"topk_ids": args["topk_ids"][:0]}},
    "permute": {"no-tokens": lambda args: {name: args[name][:0] for name in ("x", "topk_ids")}},
    "unpermute": {
        "no-tokens": lambda args: {name: args[name][:0] for name in ("positions", "weights")},
        "no-rows": lambda args: {"y": args["y"][:0], "positions": 0 * args["positions"] - 1},
    },
    "gated_activation": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "experts": {
        "no-tokens": lambda args: {name: args[name][:0] for name in ("x", "weights", "ids")},
        "foreign": lambda args: {"ids": 0 * args["ids"] - 1, "weights": jnp.nan * args["weights"]},
    },
    "megamoe_staged": {"no-tokens": lambda args: {name: args[name][:0] for name in ("x", "weights", "ids")}},
    "eplb": {"no-layers": lambda args: {"load": args["load"][:0]}},
    "weight_only_matmul": {"no-rows": lambda args: {"x": args["x"][:0]}},
    "turboquant_write": {
        "no-tokens": lambda args: {
            **{name: args[name][:0] for name in ("key", "value", "slots")},
            "pages": jnp.zeros_like(args["pages"]),
        },
    },
    "turboquant_attention": {
        "no-requests": lambda args: {
            "page_table": args["page_table"][:0],
            "lengths": args["lengths"][:0],
            "query_start": args["query_start"][:1],
        },
        "no-tokens": lambda args: {"q": args["q"][:0], "query_start": 0 * args["query_start"]},
    },
    "scaled_matmul": {
        "no-rows": lambda args: {name: args[name][:0] for name in ("a", "a_scale")},
        "no-outputs": lambda args: {name: args[name][:0] for name in ("b", "b_scale", "bias")},
    },
    "grouped_matmul": {
        "no-rows": lambda args: {
            **{name: args[name][:0] for name in ("a", "a_scale")},
            "offsets": 0 * args["offsets"],
        },
        "no-groups": lambda args: {
            **{name: args[name][:0] for name in ("b", "b_scale")},
            "offsets": args["offsets"][:1],
        },
        "rows-of-no-group": lambda args: {"offsets": 0 * args["offsets"]},
    },
    "rope": {"no-tokens": lambda args: {name: args[name][:0] for name in ("x", "positions")}},
    "mla": {
        "no-requests": lambda args: {
            "page_table": args["page_table"][:0],
            "lengths": args["lengths"][:0],
            "query_start": args["query_start"][:1],
        },
        "no-tokens": lambda args: {"q": args["q"][:0], "query_start": 0 * args["query_start"]},
    },
    "sparse_mla": {
        "no-tokens": lambda args: {name: args[name][:0] for name in ("q", "indices", "counts")},
        "no-entries": lambda args: {"indices": args["indices"][:, :0], "return_lse": False},
    },
    "sparse_indices": {"no-rows": lambda args: {"topk": args["topk"][:0], "query_start": 0 * args["query_start"]}},
    "latent_cache_write": {
        "no-tokens": lambda args: {
            **{name: args[name][:0] for name in ("latent", "rotary", "slots")},
            "cache": jnp.zeros_like(args["cache"]),
        },
    },
    "latent_cache_gather": {
        "no-requests": lambda args: {name: args[name][:0] for name in ("page_table", "lengths", "gathered")},
        "no-rows": lambda args: {"gathered": 0 * args["gathered"]},
    },
    "compressor": {
        "no-tokens": lambda args: {
            **{name: args[name][:0] for name in ("kv", "score", "positions", "request", "cache_slots")},
            **{name: jnp.zeros_like(args[name]) for name in ("cache", "state")},
        },
    },
    "indexer_q": {"no-tokens": lambda args: {name: args[name][:0] for name in ("q", "weights", "positions")}},
    "indexer": {"no-tokens": lambda args: {name: args[name][:0] for name in ("q", "weights", "starts", "ends")}},
    "indexer_topk": {"no-tokens": lambda args: {name: args[name][:0] for name in ("logits", "starts", "ends")}},
    "q_kv_rms_norm": {"no-tokens": lambda args: {name: args[name][:0] for name in ("q", "kv")}},
    "qnorm_rope_kv_insert": {
        "no-tokens": lambda args: {
            **{name: args[name][:0] for name in ("q", "kv", "positions", "slots")},
            "cache": jnp.zeros_like(args["cache"]),
        },
    },
    "inv_rope_fp8_quant": {"no-tokens": lambda args: {name: args[name][:0] for name in ("o", "positions")}},
    "grouped_projection": {"no-tokens": lambda args: {name: args[name][:0] for name in ("x", "x_scale")}},
    "mhc_pre": {"no-tokens": lambda args: {"residual": args["residual"][:0]}},
    "mhc_post": {"no-tokens": lambda args: {name: x[:0] for name, x in args.items()}},
    "mhc_head": {"no-tokens": lambda args: {"residual": args["residual"][:0]}},
    "mtp": {"no-tokens": lambda args: {name: args[name][:0] for name in ("embedding", "hidden", "positions")}},
}
"""Mechanism -> how each of its batches can be empty: changes of a case's arguments; zeros (lse -inf) must come out."""
EMPTY_CASES = [pytest.param(m, how, id=f"{m.name}-{how}") for m in MECHANISMS for how in EMPTY[m.name]]


def here():
    """Where kernels run: on this GPU, else interpreted."""
    return _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext()


def supported(mechanism, kernel, args):
    """Skip with the kernel's own sentence unless it supports the arguments; call it inside `here()`."""
    if reason := mechanism.kernels[kernel].why_not(**mechanism.prepare(**args)):
        pytest.skip(f"{kernel}: {reason}")


def first(mechanism, kernel):
    """The first smoke case that the kernel supports."""
    for case in mechanism.cases:
        args = case.make(np.random.default_rng(0))
        if "smoke" in case.tags and mechanism.kernels[kernel].why_not(**mechanism.prepare(**args)) is None:
            return args
    pytest.skip(f"{kernel} supports no smoke case of {mechanism.name}")


def outputs(mechanism, args, out):
    out = out if isinstance(out, tuple) else (out,)
    return dict(zip(mechanism.outputs(**mechanism.prepare(**args)), out, strict=True))


def split(args):
    """Arrays and static options."""
    arrays = {name: x for name, x in args.items() if _checks.is_array(x)}
    return arrays, {name: x for name, x in args.items() if name not in arrays}


@pytest.mark.parametrize(("mechanism", "case", "kernel"), CASES)
def test_forward(mechanism, case, kernel, rng):
    if "full" in case.tags and (reason := _mosaic.why_not_here()):
        pytest.skip(f"full size: {reason}")
    if case.tags == {"bench"}:
        pytest.skip("timed only: the reference would take too long")
    args = case.make(rng)
    with here():
        supported(mechanism, kernel, args)
        got = execution.call(mechanism, args, kernel)
    truth, same = (execution.reference(mechanism, args, wide=wide) for wide in (True, False))
    arrays, static = split(args)
    with here():
        shapes = jax.eval_shape(lambda a: mechanism.op(**a, **static, implementation=kernel), arrays)
    for name, shape in outputs(mechanism, args, shapes).items():
        x = got[name]
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype) == (same[name].shape, same[name].dtype), name
        fresh = x.astype(np.float64)
        if name in args and args[name].shape == x.shape:  # written in place: the poison that was there stays
            fresh = np.where(np.isnan(np.asarray(args[name], np.float64)), 0, fresh)
        assert not np.isnan(fresh).any(), f"{name}: NaN came out"
        assert np.isfinite(fresh).all() or name in ("lse", "max_logits", "logits"), f"{name}: infinite values came out"
        spec = cases.find(mechanism.name).outputs[name]
        sides = {"reference": same[name], "kernel": x}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.kernels], ids=lambda m: m.name)
def test_a_float32_case_exists(mechanism):
    smoke = (case.make(np.random.default_rng(0)) for case in mechanism.cases if "smoke" in case.tags)
    dtypes = [{_checks.dtype_name(x) for x in split(args)[0].values()} for args in smoke]
    if not any("float" in name for d in dtypes for name in d):
        pytest.skip(f"{mechanism.name} takes integers only")
    assert any("float32" in d and not d & {"bfloat16", "float16"} for d in dtypes), "16-bit cases hide small errors"


@pytest.mark.optimized
@pytest.mark.parametrize(("mechanism", "kernel"), KERNELS)
def test_twice_is_once_and_jit_is_eager_to_the_bit(mechanism, kernel):
    with here():
        args = first(mechanism, kernel)
        arrays, static = split(args)

        def op(arrays):
            return mechanism.op(**arrays, **static, implementation=kernel)

        jitted = jax.jit(op)
        runs = {"once": jitted(arrays), "twice": jitted(arrays), "eager": op(arrays)}
        runs = {name: outputs(mechanism, args, out) for name, out in runs.items()}
    for name in ("twice", "eager"):
        for output, x in runs["once"].items():
            a, b = (np.asarray(y).view(np.uint8) for y in (x, runs[name][output]))
            np.testing.assert_array_equal(a, b, err_msg=f"{output}: {name}")


@pytest.mark.parametrize(("mechanism", "how"), EMPTY_CASES)
def test_empty_batches(mechanism, how):
    base = mechanism.cases[0].make(np.random.default_rng(0))
    args = base | EMPTY[mechanism.name][how](base)
    prepared = mechanism.prepare(**args)
    with here():
        for implementation in (_mechanism.REFERENCE, None, *mechanism.kernels):
            if implementation in mechanism.kernels and mechanism.kernels[implementation].why_not(**prepared):
                with pytest.raises(
                    NotImplementedError, match=f"implementation='{implementation}' cannot run this call"
                ):
                    mechanism.op(**args, implementation=implementation)
                continue
            for name, x in execution.call(mechanism, args, implementation).items():
                assert (x == (-np.inf if name == "lse" else 0)).all(), f"{implementation}: {name}"


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("mechanism", "kernel"), KERNELS)
def test_a_gradient_that_nobody_wrote_raises(mechanism, kernel, jit):
    if mechanism.grads:
        pytest.skip(f"{mechanism.name} has gradients")
    with here():
        arrays, static = split(first(mechanism, kernel))
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        if not floats:
            pytest.skip("there is nothing to differentiate by")

        def loss(floats):
            out = mechanism.op(**(arrays | floats), **static, implementation=kernel)
            return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(out))

        grad = jax.grad(loss)
        with pytest.raises(NotImplementedError, match=f"{mechanism.name}: the {kernel} kernel is inference only"):
            (jax.jit(grad) if jit else grad)(floats)


@pytest.mark.parametrize(("mechanism", "kernel", "label", "shapes"), SUPPORT)
def test_a_kernel_refuses_with_its_sentence(mechanism, kernel, label, shapes):
    with here(), jax.enable_x64(True):  # else a float64 shape is silently another one
        reason = mechanism.kernels[kernel].why_not(**mechanism.prepare(**shapes))
        if reason is None:
            assert _mechanism.choose(mechanism, mechanism.prepare(**shapes), kernel) == kernel
            return
        arrays, static = split(shapes)
        with pytest.raises(NotImplementedError) as raised:
            jax.eval_shape(lambda a: mechanism.op(**a, **static, implementation=kernel), arrays)
    expected = f"{mechanism.name}: implementation='{kernel}' cannot run this call: {reason}"
    assert str(raised.value) == expected


@pytest.mark.parametrize(("mechanism", "kernel"), KERNELS)
def test_without_a_gpu_an_explicit_request_raises_and_none_takes_the_reference(mechanism, kernel):
    sentence = _mosaic.why_not_here()
    if sentence is None:
        pytest.skip("there is a GPU")
    args = first(mechanism, kernel)
    with pytest.raises(NotImplementedError) as raised:
        mechanism.op(**args, implementation=kernel)
    assert sentence in str(raised.value)
    assert _mechanism.choose(mechanism, mechanism.prepare(**args), None) == _mechanism.REFERENCE

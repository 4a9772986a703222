"""What paged attention promises beyond the contract: limits, invariances, hand-written numbers.

The reference is tested always, the kernel interpreted (or compiled, where there is a GPU) on the cheapest form.
"""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import paged_attention
from jaxattn.ops._paged_attention_cases import make_inputs
from jaxattn.ops.paged_attention import MECHANISM
from pallas_kernels import _aot, _mosaic
from pallas_kernels import paged_attention as mosaic
from pallas_kernels.paged_attention import decode, tiled

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])
D, PAGE = 64, 16


def run(implementation, args, **options):
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(paged_attention(**args, implementation=implementation, **options))
    return jax.tree.map(np.asarray, out)


def bits(x):
    return np.asarray(x).view(np.uint8)


def requests(query_lengths, lengths, *, H=1, K=1, value, q=0.0, key=None, dtype="bfloat16", **options):
    """Arguments whose page b holds request b (at most 16 keys); the rest of the pool is NaN.

    Without `q` every visible key has the same weight. `value(b, j, head)` and `key(b, j)` give the first columns.
    """
    pages = len(lengths)
    pool = np.full((2, pages, PAGE, K, D), np.nan, np.float32)
    for b, length in enumerate(lengths):
        pool[:, b, :length] = 0
        for j in range(length):
            for head in range(K):
                v = np.atleast_1d(value(b, j, head))
                pool[1, b, j, head, : len(v)] = v
            pool[0, b, j, :, 0] = 0 if key is None else key(b, j)
    tokens = sum(query_lengths)
    queries = np.zeros((tokens, H, D), np.float32)
    queries[..., 0] = q
    return {
        "q": jnp.asarray(queries, dtype),
        "k_pages": jnp.asarray(pool[0], dtype),
        "v_pages": jnp.asarray(pool[1], dtype),
        "page_table": jnp.arange(pages, dtype=jnp.int32)[:, None],
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.asarray(np.concatenate([[0], np.cumsum(query_lengths)]), jnp.int32),
        **options,
    }


def one_hot(_, j, __):
    """Value of key j: its columns show who was attended to."""
    return np.eye(PAGE)[j]


def seen(o):
    """Row -> the keys with a weight, for values from `one_hot` and one head."""
    return [np.flatnonzero(row[0, :PAGE]).tolist() for row in np.asarray(o, np.float32)]


# ---------------------------------------------------------------- numbers by hand
@implementations
def test_two_queries_and_three_keys_by_hand(implementation):
    """Weights 1, 2, 4 (scores 0, ln 2, 2 ln 2), values 3, 6, 12: (3 + 12) / 3 = 5 and (3 + 12 + 48) / 7 = 9."""
    args = requests((2,), (3,), q=1.0, key=lambda _, j: j, value=lambda _, j, __: 3 * 2**j, scale=math.log(2))
    o, lse = run(implementation, args, return_lse=True)
    assert o[:, 0, 0].tolist() == [5, 9]
    assert not o[..., 1:].any()
    np.testing.assert_array_max_ulp(lse[:, 0], np.log(np.float32([3, 7])), 2)
    # a sink of logit 0 is a fourth weight of 1 without a value: 15 / 4 and 63 / 8
    o, with_sink = run(implementation, args, return_lse=True, sinks=jnp.zeros(1))
    assert o[:, 0, 0].tolist() == [3.75, 7.875]
    np.testing.assert_array_equal(bits(with_sink), bits(lse))


@implementations
def test_bc01_a_query_without_keys_gives_zero(implementation):
    """Four queries of three keys: the first stands before all of them, the last sees them all."""
    args = requests((4,), (3,), value=lambda _, j, __: 4 * j + np.arange(4))
    o, lse = run(implementation, args, return_lse=True)
    assert not o[0].any()
    assert lse[0] == -np.inf
    assert o[3, 0, :4].tolist() == [4, 5, 6, 7]
    np.testing.assert_array_max_ulp(lse[3, 0], np.log(np.float32(3)), 2)


@implementations
@pytest.mark.parametrize("masked", [-8.0, 5.0, math.nan])
def test_bc07_the_soft_cap_does_not_bring_masked_keys_back(implementation, masked):
    args = requests((2,), (2,), q=5.0, key=lambda _, j: (1.0, masked)[j], value=lambda _, j, __: (1.0, 0.0)[j])
    o = run(implementation, args, softcap=1.0, scale=1.0)
    assert o[0, 0, 0] == 1


# ---------------------------------------------------------------- sinks
@implementations
def test_bc11_sinks_at_their_limits(implementation, rng):
    """Heads 0 to 3 of make_inputs have sinks -inf, 0, 5 and +inf; the last request has no key."""
    args = make_inputs(rng, (1, 3, 2), (20, 5, 0), H=4, K=1, sinks=True, return_lse=True)
    args["sinks"] = jnp.asarray([-jnp.inf, 0.3, 5, jnp.inf], jnp.float32)
    o, lse = run(implementation, args)
    plain, plain_lse = run(implementation, args | {"sinks": None})
    # XLA compiles the reference with and without sinks to two programs, whose logarithms may differ in the last bit
    np.testing.assert_array_max_ulp(lse, plain_lse, 1 if implementation == "reference" else 0)
    np.testing.assert_array_equal(bits(o[:, 0]), bits(plain[:, 0]))
    assert not o[:, 3].any()
    assert o[:4, 1].any(-1).all()
    assert (np.abs(np.float32(o[:4, 1:3])).sum(-1) < np.abs(np.float32(plain[:4, 1:3])).sum(-1)).all()
    assert not o[4:].any()
    assert (lse[4:] == -np.inf).all()


# ---------------------------------------------------------------- windows
@implementations
def test_bc13_the_window_holds_the_token_itself(implementation):
    args = requests((6, 3), (6, 3), value=one_hot)
    counts = [len(keys) for keys in seen(run(implementation, args, window=4))]
    assert counts == [1, 2, 3, 4, 4, 4, 1, 2, 3]


@implementations
def test_bc13_a_window_as_long_as_the_request_changes_no_bit(implementation, rng):
    args = make_inputs(rng, (1, 9), (40, 21), H=2, K=1, return_lse=True)
    plain = run(implementation, args)
    for a, b in zip(run(implementation, args, window=40), plain, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@implementations
def test_bc15_the_window_is_anchored_at_the_newest_token(implementation):
    args = requests((2,), (7,), value=one_hot)
    assert seen(run(implementation, args, window=3)) == [[3, 4, 5], [4, 5, 6]]


@implementations
def test_a_window_looks_both_ways_without_causality(implementation):
    args = requests((3,), (6,), value=one_hot)
    assert seen(run(implementation, args, window=2, causal=False)) == [[2, 3, 4], [3, 4, 5], [4, 5]]


# ---------------------------------------------------------------- batches and pages
@implementations
def test_bc19_each_request_has_its_own_prefix(implementation):
    """The longest query and the longest request are equal, as in a prefill without a prefix; request 1 has one."""
    args = requests((8, 2), (8, 6), value=one_hot)
    rows = seen(run(implementation, args))
    assert rows == [list(range(n)) for n in (1, 2, 3, 4, 5, 6, 7, 8, 5, 6)]


@implementations
@pytest.mark.parametrize(("H", "K"), [(12, 2), (10, 2), (7, 1), (48, 2)])
def test_bc61_each_head_reads_its_own_kv_head(implementation, H, K):
    args = requests((1,), (2,), H=H, K=K, value=lambda _, __, head: head + 1)
    o = run(implementation, args)
    assert (o[:, :, 0] == np.repeat(np.arange(K) + 1, H // K)).all()


def test_bc65_permuted_axes_are_an_error():
    """Heads and tokens, or heads and slots, exchanged: legal sizes, wrong meaning."""
    args = requests((32,), (16,), H=4, K=2, value=one_hot) | {"lengths": jnp.array([32])}
    args |= {"page_table": jnp.zeros((1, 2), jnp.int32)}
    paged_attention(**args, checked=True, implementation="reference")
    swapped = jnp.swapaxes(args["q"], 0, 1)
    with pytest.raises(ValueError, match="query_start must rise from 0 to at most 4 "):
        paged_attention(**args | {"q": swapped}, checked=True)
    pools = {name: jnp.swapaxes(args[name], 1, 2) for name in ("k_pages", "v_pages")}
    with pytest.raises(ValueError, match=r"query heads must be a multiple of kv heads, got H=4 .* and K=16"):
        paged_attention(**args | pools)


@implementations
def test_the_order_of_pages_changes_no_bit(implementation, rng):
    args = make_inputs(rng, (1, 20), (50, 33), H=2, K=1, return_lse=True)
    pool = args["k_pages"].shape[0]
    order = rng.permutation(pool)  # new page i is the old page order[i]
    table = np.asarray(args["page_table"])
    new = np.append(np.argsort(order), 2**31 - 1)[np.minimum(table, pool)]
    moved = {name: args[name][order] for name in ("k_pages", "v_pages")} | {"page_table": jnp.asarray(new, jnp.int32)}
    for a, b in zip(run(implementation, args | moved), run(implementation, args), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_bc67_a_row_does_not_depend_on_its_neighbours(rng):
    """A kernel's row alone, in a chunk of 64 tokens, and among other requests: the same bits.

    The reference makes no such promise: its products have the batch's shape. For decoding see the tests of its own.
    """
    chunk = make_inputs(rng, (64,), (70,), H=2, K=1, sinks=True, return_lse=True)
    alone = chunk | {"q": chunk["q"][-1:], "query_start": jnp.array([0, 1])}
    ones = jnp.ones((3, 2, D), chunk["q"].dtype)
    several = chunk | {
        "q": jnp.concatenate([ones, chunk["q"][-1:], ones[:1]]),
        "query_start": jnp.array([0, 3, 4, 5]),
        "lengths": jnp.array([17, 70, 1]),
        "page_table": jnp.repeat(chunk["page_table"], 3, axis=0),
    }
    config = tiled.Config()
    single = run("mosaic", alone, config=config)
    for out, row in ((run("mosaic", chunk, config=config), -1), (run("mosaic", several, config=config), 3)):
        for a, b in zip(out, single, strict=True):
            np.testing.assert_array_equal(bits(a[row]), bits(b[0]))


def test_a_request_without_queries_is_not_touched(rng):
    """Its table is out of range and its pages are NaN: nothing of it may be read."""
    args = make_inputs(rng, (2, 0, 1), (9, 30, 5), H=2, K=1, return_lse=True)
    broken = args | {"page_table": args["page_table"].at[1].set(2**31 - 1), "lengths": jnp.array([9, 2**31 - 1, 5])}
    for a, b in zip(run("mosaic", broken), run("mosaic", args), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_new_lengths_do_not_compile_again(rng):
    args = make_inputs(rng, (2, 1), (9, 5), H=2, K=1)
    static = {"q": args.pop("q")}
    traces = []

    @jax.jit
    def step(args):
        traces.append(1)
        return paged_attention(**args, **static, implementation="reference")

    step(args)
    step(args | {"lengths": jnp.array([7, 6]), "query_start": jnp.array([0, 1, 3])})
    assert len(traces) == 1


# ---------------------------------------------------------------- far away, and configurations
@pytest.mark.aot
@pytest.mark.parametrize("config", [tiled.Config(), decode.Config(num_shares=33)], ids=["tiled", "decode"])
def test_bc17_pages_are_addressed_by_the_copy_engine(config, tmp_path, monkeypatch):
    """No offset into this pool fits 32 bits: only TMA, which scales page numbers in 64 bits, may touch it."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    args = dict(next(shapes for label, shapes in MECHANISM.support if label == "bfloat16, D 128, page 64"))
    pool = jax.ShapeDtypeStruct((150_000, *args["k_pages"].shape[1:]), jnp.bfloat16)
    assert math.prod(pool.shape) > 2**32
    args |= {"k_pages": pool, "v_pages": pool}
    _aot.compile_h200(lambda args: paged_attention(**args, implementation="mosaic", config=config), args)
    (ptx,) = (path.read_text() for path in tmp_path.glob("*.ptx") if "combine" not in path.name)
    assert "cp.async.bulk.tensor" in ptx
    assert set(re.findall(r"ld\.global\S*", ptx)) <= {"ld.global.b32", "ld.global.u32"}, "only table entries"


@pytest.mark.gpu
def test_bc17_the_last_page_of_a_large_pool():
    shape = (2**31 // (PAGE * 8 * 128) + 2, PAGE, 8, 128)
    value = jnp.arange(8 * 128, dtype=jnp.bfloat16).reshape(8, 128) % 64
    o = jax.jit(
        lambda k, v: paged_attention(
            jnp.ones((1, 8, 128), jnp.bfloat16),
            k,
            v.at[-1, 0].set(value),
            jnp.array([[shape[0] - 1]]),
            jnp.array([1]),
            jnp.array([0, 1]),
            implementation="mosaic",
        ),
        donate_argnums=1,
    )(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    np.testing.assert_array_equal(o[0], value)


def shapes(dtype="bfloat16", D=128, cache=None):
    pool = jax.ShapeDtypeStruct((8, 16, 2, D), jnp.dtype(cache or dtype))
    return MECHANISM.prepare(
        q=jax.ShapeDtypeStruct((4, 8, D), jnp.dtype(dtype)),
        k_pages=pool,
        v_pages=pool,
        page_table=jax.ShapeDtypeStruct((2, 4), jnp.int32),
        lengths=jax.ShapeDtypeStruct((2,), jnp.int32),
        query_start=jax.ShapeDtypeStruct((3,), jnp.int32),
    )


@pytest.mark.parametrize("D", mosaic.HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", None), ("float16", mosaic.FP8), ("float32", None)])
def test_the_default_is_among_the_configurations(dtype, cache, D):
    args = shapes(dtype, D, cache)
    legal = list(mosaic.configs(**args))
    assert mosaic.default_config(**args) in legal
    assert len(set(legal)) == len(legal)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("kernel", "dtype", "cache"),
    [
        (tiled, "bfloat16", None),
        (tiled, "float32", None),
        (decode, "bfloat16", None),
        (decode, "bfloat16", mosaic.FP8),
        (decode, "float16", mosaic.FP8),
    ],
)
def test_the_largest_configuration_compiles(kernel, dtype, cache):
    """Fails at compile time if the estimate of shared memory is below what the kernel takes."""
    args = shapes(dtype, 128, cache)
    config = max(kernel.configs(**args), key=lambda c: c.block_kv * c.num_stages)
    arrays = {name: x for name, x in args.items() if hasattr(x, "shape")}
    static = {name: x for name, x in args.items() if name not in arrays}
    _aot.compile_h200(lambda arrays: mosaic.paged_attention(config=config, **arrays, **static), arrays)


def test_configurations_that_cannot_be():
    with pytest.raises(ValueError, match=r"^block_kv must be 16, 32, 64 or 128, got 48$"):
        tiled.Config(block_kv=48)
    with pytest.raises(ValueError, match=r"^num_stages must lie between 1 and 8, got 0$"):
        tiled.Config(num_stages=0)


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        (
            {},
            {"block_kv": 16},
            "block_kv=16 is for float32 with head dim 256 only, got bfloat16 with 128; use 32 or more",
        ),
        (
            {"dtype": "float32"},
            {"block_kv": 64},
            "block_kv must be at most 32 for float32 on float32 of 128, got 64",
        ),
        (
            {},
            {"block_kv": 128, "num_stages": 4},
            "block_kv=128, num_stages=4 needs 295936 bytes of shared memory, more than 232448; use smaller values",
        ),
    ],
)
def test_configurations_that_do_not_fit(args, config, message):
    with pytest.raises(ValueError, match=f"^paged_attention: {re.escape(message)}$"):
        mosaic.paged_attention(config=tiled.Config(**config), **shapes(**args))

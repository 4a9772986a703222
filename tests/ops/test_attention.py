"""What attention of packed and contiguous sequences promises beyond the contract, and its errors.

The reference is tested always, the kernel interpreted (or compiled, where there is a GPU) on the cheapest form.
"""

import contextlib
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxattn import attention, explain, paged_attention
from jaxattn.ops._attention_cases import make_inputs
from jaxattn.ops.attention import MECHANISM, check_starts
from pallas_kernels import _aot, _mosaic
from pallas_kernels import attention as mosaic
from parity import cases, execution, triangle

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])
D = 64


def run(implementation, args: dict[str, Any], **options) -> Any:
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(attention(**args, implementation=implementation, **options))
    return jax.tree.map(np.asarray, out)


def bits(x):
    return np.asarray(x).view(np.uint8)


def sequences(queries, keys, value, *, q=0.0, key=None, **options):
    """Arguments with one head; without `q` every visible key has the same weight.

    `value(b, j)` gives the first columns of V, `key(b, j)` that of K, `q` that of every query.
    """
    starts: Any = [np.concatenate([[0], np.cumsum(n)]) for n in (queries, keys)]
    arrays = [np.zeros((x[-1], 1, D), np.float32) for x in (starts[0], starts[1], starts[1])]
    arrays[0][..., 0] = q
    for b, n in enumerate(keys):
        for j in range(n):
            arrays[1][starts[1][b] + j, 0, 0] = 0 if key is None else key(b, j)
            v = np.atleast_1d(value(b, j))
            arrays[2][starts[1][b] + j, 0, : len(v)] = v
    starts = {name: jnp.asarray(x, jnp.int32) for name, x in zip(("query_start", "key_start"), starts, strict=True)}
    return {name: jnp.asarray(x, "bfloat16") for name, x in zip("qkv", arrays, strict=True)} | starts | options


def one_hot(_, j):
    """Value of key j: its columns show who was attended to."""
    return np.eye(16)[j]


def seen(o):
    """Row -> the keys with a weight, for values from `one_hot`."""
    return [np.flatnonzero(row[0, :16]).tolist() for row in np.asarray(o, np.float32)]


# ---------------------------------------------------------------- numbers by hand
@implementations
def test_two_queries_and_three_keys_by_hand(implementation):
    """Weights 1, 2, 4 (scores 0, ln 2, 2 ln 2), values 3, 6, 12: (3 + 12) / 3 = 5 and (3 + 12 + 48) / 7 = 9."""
    args = sequences((2,), (3,), lambda _, j: 3 * 2**j, q=1.0, key=lambda _, j: j, scale=math.log(2))
    o, lse = run(implementation, args, return_lse=True)
    assert o[:, 0, 0].tolist() == [5, 9]
    assert not o[..., 1:].any()
    np.testing.assert_array_max_ulp(lse[:, 0], np.log(np.array([3, 7], np.float32)), 2)
    # a sink of logit 0 is a fourth weight of 1 without a value: 15 / 4 and 63 / 8
    o, with_sink = run(implementation, args, return_lse=True, sinks=jnp.zeros(1))
    assert o[:, 0, 0].tolist() == [3.75, 7.875]
    np.testing.assert_array_equal(bits(with_sink), bits(lse))


@implementations
def test_bc01_a_query_without_keys_gives_zero(implementation):
    args = sequences((4,), (3,), lambda _, j: 4 * j + np.arange(4))
    o, lse = run(implementation, args, return_lse=True)
    assert not o[0].any()
    assert lse[0] == -np.inf
    assert o[3, 0, :4].tolist() == [4, 5, 6, 7]
    np.testing.assert_array_max_ulp(lse[3, 0], np.log(np.float32(3)), 2)


@implementations
@pytest.mark.parametrize("masked", [-8.0, 5.0, math.nan])
def test_bc07_the_soft_cap_does_not_bring_masked_keys_back(implementation, masked):
    args = sequences((2,), (2,), lambda _, j: (1.0, 0.0)[j], q=5.0, key=lambda _, j: (1.0, masked)[j])
    o = run(implementation, args, softcap=1.0, scale=1.0)
    assert o[0, 0, 0] == 1


@implementations
def test_bc11_sinks_at_their_limits(implementation, rng):
    args = make_inputs(rng, (1, 3, 2), (20, 5, 0), H=4, K=1, return_lse=True)
    sinks = jnp.asarray([-jnp.inf, 0.3, 5, jnp.inf], jnp.float32)
    o, lse = run(implementation, args, sinks=sinks)
    plain, plain_lse = run(implementation, args)
    # XLA compiles the reference with and without sinks to two programs, whose logarithms may differ in the last bit
    np.testing.assert_array_max_ulp(lse, plain_lse, 1 if implementation == "reference" else 0)
    np.testing.assert_array_equal(bits(o[:, 0]), bits(plain[:, 0]))
    assert not o[:, 3].any()
    assert (np.abs(np.float32(o[:4, 1:3])).sum(-1) < np.abs(np.float32(plain[:4, 1:3])).sum(-1)).all()
    assert not o[4:].any()
    assert (lse[4:] == -np.inf).all()


# ---------------------------------------------------------------- masks
@implementations
def test_bc13_the_window_holds_the_token_itself(implementation):
    args = sequences((6, 3), (6, 3), one_hot)
    assert [len(keys) for keys in seen(run(implementation, args, window=4))] == [1, 2, 3, 4, 4, 4, 1, 2, 3]


@implementations
def test_bc15_the_window_is_anchored_at_the_newest_token(implementation):
    assert seen(run(implementation, sequences((2,), (7,), one_hot), window=3)) == [[3, 4, 5], [4, 5, 6]]


@implementations
def test_a_window_looks_both_ways_without_causality(implementation):
    args = sequences((3,), (6,), one_hot)
    assert seen(run(implementation, args, window=2, causal=False)) == [[2, 3, 4], [3, 4, 5], [4, 5]]


@implementations
def test_every_sequence_sees_its_own_keys_only(implementation):
    args = sequences((2, 0, 3), (4, 2, 3), lambda b, j: np.eye(16)[4 * b + j])
    assert seen(run(implementation, args, causal=False)) == [[0, 1, 2, 3]] * 2 + [[8, 9, 10]] * 3


@implementations
def test_a_nan_stays_in_its_sequence(implementation, rng):
    args = make_inputs(rng, (5, 6), H=1, K=1, return_lse=True)
    clean = run(implementation, args)
    for name in ("q", "k", "v"):
        args[name] = args[name].at[7].set(jnp.nan)
    for a, b in zip(run(implementation, args), clean, strict=True):
        np.testing.assert_array_equal(bits(a[:5]), bits(b[:5]))
        assert np.isnan(a[7].astype(np.float32)).all()


# ---------------------------------------------------------------- invariances
@implementations
def test_a_batch_is_its_packed_sequences(implementation, rng):
    args = make_inputs(rng, (9, 9), (12, 12), H=2, K=1, batch=True, return_lse=True)
    packed = {name: args[name].reshape(-1, *args[name].shape[2:]) for name in ("q", "k", "v")}
    starts = {"query_start": jnp.arange(3, dtype=jnp.int32) * 9, "key_start": jnp.arange(3, dtype=jnp.int32) * 12}
    for a, b in zip(run(implementation, args), run(implementation, args | packed | starts), strict=True):
        np.testing.assert_array_equal(bits(a.reshape(b.shape)), bits(b))


def test_a_sequence_alone_has_the_bits_it_has_in_company(rng):
    """At another row, behind another sequence, its tiles are cut in the same places; XLA sums the reference anyhow."""
    args = make_inputs(rng, (13, 70), H=2, K=1, return_lse=True)
    alone = {name: args[name][13:] for name in ("q", "k", "v")} | {"query_start": jnp.asarray([0, 70], jnp.int32)}
    for a, b in zip(run("mosaic", args), run("mosaic", args | alone), strict=True):
        np.testing.assert_array_equal(bits(a[13:]), bits(b))


@implementations
def test_keys_in_pages_give_the_same(implementation, rng):
    """To a rounding of P: the kernel of a paged cache may walk over other blocks."""
    args = make_inputs(rng, (20,), (48,), H=2, K=1, dtype="float32" if implementation == "reference" else "bfloat16")
    pages: dict[str, Any] = {f"{name}_pages": args[name].reshape(3, 16, *args[name].shape[1:]) for name in ("k", "v")}
    pages |= {"page_table": jnp.arange(3, dtype=jnp.int32)[None], "lengths": jnp.asarray([48], jnp.int32)}
    want: Any = paged_attention(args["q"], query_start=args["query_start"], implementation="reference", **pages)
    truth = execution.reference(MECHANISM, args, wide=True)["o"]
    sides = {"reference": np.asarray(want), "kernel": run(implementation, args)}
    verdict = triangle.edge(cases.find("attention").outputs["o"], "reference_vs_kernel", truth, sides, details=False)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    "config",
    [
        mosaic.Config(consumers=1, block_kv=64),
        mosaic.Config(block_g=4, block_kv=64, num_stages=3),
        mosaic.Config(consumers=3, block_kv=64),
        mosaic.Config(block_g=16, share_o=True),
    ],
    ids=lambda c: f"{c.consumers}-{c.block_g}-{c.block_kv}",
)
def test_every_way_to_cut_tiles_gives_the_same(config, rng):
    heads = min(16, 2 * config.block_g)  # two groups of heads, or all in one
    args = make_inputs(rng, (5, 70), (9, 140), H=heads, K=1, sinks=True, window=100, return_lse=True)
    check(args, config)


def check(args, config):
    """The contract of o and lse."""
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    got: dict[str, Any] = dict(zip(("o", "lse"), run("mosaic", args, config=config), strict=True))
    for name, spec in cases.find("attention").outputs.items():
        sides = {"reference": same[name], "kernel": got[name]}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


# ---------------------------------------------------------------- maxima that lag
BLOCK = 64
LAGGING = mosaic.Config(consumers=1, block_g=4, block_kv=BLOCK)


def rising(rng, step, dtype="bfloat16", **options):
    """Four sequences whose scores rise by `step` powers of two a block of keys, in the order blocks are walked in.

    Heads differ in the factor of that step, queries in its sign; two queries see no key, sequences may have no query.
    """
    queries, keys = (20, 5, 0, 9), (200, 3, 70, 64)
    args = make_inputs(rng, queries, keys, H=4, K=1, D=D, dtype=dtype, return_lse=True)
    end = np.repeat(np.cumsum(keys), keys)
    q, k = np.zeros((sum(queries), 4, D), np.float32), np.zeros((sum(keys), 1, D), np.float32)
    q[..., 0] = np.where(np.arange(sum(queries)) % 5 == 4, -1, 1)[:, None] * np.array([1, 0.5, 2, 0], np.float32)
    k[:, 0, 0] = (end - 1 - np.arange(sum(keys))) // BLOCK
    k[:, 0, 1:] = rng.standard_normal((sum(keys), D - 1)) / 8
    q[..., 1:] = rng.standard_normal((sum(queries), 4, D - 1)) / 8
    v = rng.standard_normal((sum(keys), 1, D)) * (1 if dtype == "bfloat16" else 3e4)
    arrays = {"q": q, "k": k, "v": np.clip(v, -65504, 65504)}
    return args | {name: jnp.asarray(x, dtype) for name, x in arrays.items()} | {"scale": step * math.log(2)} | options


@pytest.mark.parametrize(
    ("step", "dtype"), [(7.99, "float16"), (8.01, "float16"), (3.99, "bfloat16"), (300.0, "bfloat16")]
)
def test_maxima_that_rise_with_every_block(step, dtype, rng):
    """By a little less or more than o is rescaled for, and until weights vanish; sinks without and with all weight."""
    sinks = jnp.asarray([-jnp.inf, 3.0, jnp.inf, 0.0], jnp.float32)
    check(rising(rng, step, dtype, sinks=sinks), LAGGING)


@pytest.mark.parametrize("options", [{"window": 70}, {"softcap": 9.0, "causal": False}], ids=["window", "softcap"])
def test_maxima_that_rise_behind_a_mask(options, rng):
    check(rising(rng, 7.99, **options), LAGGING)


def test_a_row_does_not_depend_on_its_tile(rng):
    """Neighbours whose maxima rise elsewhere, or nowhere, make a warp rescale o at other blocks."""
    args = rising(rng, 7.99)
    kept = np.arange(args["q"].shape[0]) % 7 == 3
    q = jnp.where(jnp.asarray(kept)[:, None, None], args["q"], -3 * args["q"])
    new, old = (run("mosaic", a, config=LAGGING) for a in (args | {"q": q}, args))
    for a, b in zip(new, old, strict=True):
        np.testing.assert_array_equal(bits(a[kept]), bits(b[kept]))


def test_an_order_of_sequences_changes_no_bit(rng):
    """Each with its own maxima, at other rows and in other thread blocks."""
    args = rising(rng, 8.01)
    starts = [np.asarray(args[name]) for name in ("query_start", "key_start")]
    order = [3, 0, 2, 1]
    of_q, of_k = (np.concatenate([np.arange(s[b], s[b + 1]) for b in order]) for s in starts)
    q_start, k_start = (jnp.asarray(np.cumsum([0, *np.diff(s)[order]]), jnp.int32) for s in starts)
    moved = {"q": args["q"][of_q], "k": args["k"][of_k], "v": args["v"][of_k]}
    moved |= {"query_start": q_start, "key_start": k_start}
    new, old = (run("mosaic", a, config=LAGGING) for a in (args | moved, args))
    for a, b in zip(new, old, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b[of_q]))


def test_the_reference_has_gradients(rng):
    args = make_inputs(rng, (5, 6), (7, 6), H=2, K=1, D=8, dtype="float32", sinks=True, window=4)
    args["sinks"] = jnp.asarray([0.3, -1.0])

    def loss(arrays):
        o: Any = attention(**(args | arrays), implementation="reference")
        return jnp.sum(jnp.sin(o))

    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(args[name], jnp.float64) for name in ("q", "k", "v", "sinks")}
        arrays["k"], arrays["v"] = (jnp.nan_to_num(arrays[name]) for name in ("k", "v"))
        check_grads(loss, (arrays,), order=1, modes=["rev"])


# ---------------------------------------------------------------- configurations
SHAPES = dict(MECHANISM.support)["bfloat16, D 128"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumers": 4}, "consumers must be 1, 2 or 3, got 4"),
        ({"block_kv": 72}, "block_kv must be a multiple of 16 from 64 to 192, got 72"),
        ({"num_stages": 0}, "num_stages must lie between 1 and 8, got 0"),
        (
            {"block_g": 3},
            "block_g must cut the tile's 128 rows in parts of 8, 16, 32 or a multiple of 64, got 3",
        ),
    ],
)
def test_a_config_that_is_always_wrong(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.Config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_g": 8}, "attention: block_g must divide the 4 query heads of a KV head, got 8"),
        (
            {"block_kv": 192},
            "attention: block_kv=192 with 2 consumers does not fit the registers for values of 128",
        ),
        (
            {"num_stages": 4},
            "attention: block_kv=128, num_stages=4 needs 329728 bytes of shared memory, more than 232448; use smaller "
            "values",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_shapes(options, message):
    config = dataclasses.replace(mosaic.Config(), **options)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.attention(config=config, **MECHANISM.prepare(**SHAPES))


def one_by_one(q, start):
    """A launch that hands out its tiles by a counter."""
    prepared = MECHANISM.prepare(q=q, k=q, v=q, query_start=start)
    return mosaic.attention(config=mosaic.Config(dynamic=True, block_kv=64), **prepared)


IN_COMPANY = {
    "vmap": jax.vmap(one_by_one, in_axes=(0, None)),
    "vmap-of-starts": lambda q, start: jax.vmap(one_by_one, in_axes=(None, 0))(q[0], jnp.stack([start, start])),
    "scan": lambda q, start: jax.lax.map(lambda q: one_by_one(q, start), q),
    "cond": lambda q, start: jax.lax.cond(start[0] > 0, lambda: q[0], lambda: one_by_one(q[0], start)),
}


@pytest.mark.aot
@pytest.mark.parametrize("way", IN_COMPANY)
def test_a_counter_of_tiles_compiles_within_other_programs(way):
    """Interpreted there is none."""
    q = jax.ShapeDtypeStruct((2, 64, 2, D), jnp.bfloat16)
    _aot.compile_h200(IN_COMPANY[way], q, jax.ShapeDtypeStruct((2,), jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["vmap", "scan"])
def test_a_counter_of_tiles_changes_no_bit(way, rng):
    q = jnp.asarray(rng.standard_normal((2, 4096, 2, D)), jnp.bfloat16)
    start = jnp.asarray([0, 4096], jnp.int32)
    prepared = [MECHANISM.prepare(q=one, k=one, v=one, query_start=start) for one in q]
    want: list[Any] = [mosaic.attention(config=mosaic.Config(block_kv=64), **args) for args in prepared]
    np.testing.assert_array_equal(bits(jax.jit(IN_COMPANY[way])(q, start)), bits(jnp.stack(want)))


@pytest.mark.parametrize(("S", "K", "dynamic"), [(8192, 32, True), (8192, 8, True), (1024, 8, False)])
def test_long_causal_work_is_handed_out_one_by_one(S, K, dynamic):
    shapes = {
        name: jax.ShapeDtypeStruct((1, S, heads, 128), jnp.bfloat16)
        for name, heads in zip("qkv", (32, K, K), strict=True)
    }
    assert mosaic.default_config(**MECHANISM.prepare(**shapes)).dynamic == dynamic
    assert not mosaic.default_config(**MECHANISM.prepare(**shapes, causal=False)).dynamic


def test_configs_are_legal_and_hold_the_default():
    for _, shapes in MECHANISM.support:
        prepared = MECHANISM.prepare(**shapes)
        if mosaic.why_not(**prepared) is None:
            assert mosaic.default_config(**prepared) in list(mosaic.configs(**prepared))


# ---------------------------------------------------------------- errors
N, S, H, K, B = 5, 7, 4, 2, 2


def call(**changes):
    args: dict[str, Any] = {
        "q": jnp.ones((N, H, D)),
        "k": jnp.ones((S, K, D)),
        "v": jnp.ones((S, K, 2 * D)),
        "query_start": jnp.array([0, 1, 5]),
        "key_start": jnp.array([0, 3, 7]),
    }
    return attention(**args | changes)


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


FLOATS = "bfloat16 or float16 or float32 or float64"
ERRORS = {
    "q-rank": ({"q": zeros(N, H * D)}, ValueError, "q must have 3 dimensions [N H D], got shape (5, 256)"),
    "k-D": (
        {"k": zeros(S, K, 32)},
        ValueError,
        "k must be [S K D] with D=64 (from q), got shape (7, 2, 32)",
    ),
    "v-S": (
        {"v": zeros(6, K, D)},
        ValueError,
        "v must be [S K Dv] with S=7 (from k), got shape (6, 2, 64)",
    ),
    "v-heads": (
        {"v": zeros(S, 1, D)},
        ValueError,
        "v must be [S K Dv] with K=2 (from k), got shape (7, 1, 64)",
    ),
    "start-B": (
        {"key_start": jnp.array([0, 7])},
        ValueError,
        "key_start must be [B+1] with B=2 (from query_start), got shape (2,)",
    ),
    "sinks-H": ({"sinks": zeros(K)}, ValueError, "sinks must be [H] with H=4 (from q), got shape (2,)"),
    "heads": (
        {"q": zeros(N, 7, D)},
        ValueError,
        "query heads must be a multiple of kv heads, got H=7 (q) and K=2 (k)",
    ),
    "no-width": (
        {"v": zeros(S, K, 0)},
        ValueError,
        "head dims must be at least 1, got D=64 (q, k) and Dv=0 (v)",
    ),
    "no-starts": (
        {"query_start": None, "key_start": None},
        ValueError,
        "packed q [N H D] needs query_start, got shape (5, 4, 64) alone; give query_start, or a batch [B T H D]",
    ),
    "keys-only": (
        {"query_start": None},
        ValueError,
        "key_start belongs to packed sequences and needs query_start; give both or none",
    ),
    "no-array": ({"k": [1.0]}, TypeError, "k must be an array [S K D], got list"),
    "q-dtype": ({"q": zeros(N, H, D, dtype="int32")}, TypeError, f"q must have dtype {FLOATS}, got int32"),
    "v-dtype": (
        {"v": zeros(S, K, D, dtype="bfloat16")},
        TypeError,
        "v must have dtype float32, got bfloat16; q, k and v need one dtype; cast them",
    ),
    "start-dtype": (
        {"query_start": zeros(B + 1)},
        TypeError,
        "query_start must have dtype int32, got float32",
    ),
    "window": (
        {"window": 0},
        ValueError,
        "window must be at least 1, got 0",
    ),
    "scale": ({"scale": -1.0}, ValueError, "scale must be positive and finite or None, got -1.0"),
    "checked-rows": (
        {"checked": True, "query_start": jnp.array([0, 1, 6])},
        ValueError,
        "query_start must rise from 0 to at most 5 (rows of q), got [0, 1, 6]",
    ),
    "checked-keys": (
        {"checked": True, "key_start": jnp.array([0, 4, 3])},
        ValueError,
        "key_start must rise from 0 to at most 7 (rows of k), got [0, 4, 3]",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, kind, message):
    with pytest.raises(kind, match=f"^{re.escape('attention: ' + message)}$"):
        call(**changes)


def test_checked_under_jit():
    starts = jnp.array([0, 1, 5]), jnp.array([0, 3, 7])
    check_starts(*starts, tokens=N, keys=S)
    message = (
        "attention: checked=True reads query_start and key_start and needs concrete arrays; check them before jit with "
        "jaxattn.ops.attention.check_starts"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(lambda start: call(query_start=start, checked=True))(starts[0])


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ("bfloat16, D 80", "the head dim D must be 64, 128, 192 or 256, got 80"),
        ("bfloat16, D 128, Dv 512", "the head dim Dv must be 64, 128, 192 or 256, got 512"),
        ("float32, D 128", "q must be bfloat16 or float16, got float32"),
    ],
)
def test_why_not(label, sentence):
    assert explain("attention", on_target=True, **dict(MECHANISM.support)[label]).reasons["mosaic"] == sentence

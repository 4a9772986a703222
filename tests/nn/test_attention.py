"""What the Flax modules promise beyond the op: projections, cache writes, Flax transformations."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxattn import explain
from jaxattn.nn import KVPages, PagedAttention, PagedBatch, PagedKVCache
from pallas_kernels import _mosaic
from parity import judge, tolerances

ROOT = Path(__file__).resolve().parents[2]
M, H, K, D, PAGE, POOL, WIDTH = 40, 6, 2, 16, 16, 9, 4
TABLE = np.array([[5, 2, 7, 0], [8, 1, 3, 6]], np.int32)


def rotary(x, positions):
    """Rotate halves; enough to notice a wrong position."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angle = positions[:, None, None].astype(wide) * 10 ** -jnp.arange(half, dtype=wide)
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return turned.astype(x.dtype)


OPTIONS = {
    "plain": {},
    "gpt-oss": {"use_bias": True, "sinks": True, "window": 11, "rotary": rotary},
    "softcap": {"softcap": 1.5, "scale": 0.4},
}


def build(rng, dtype="float32", *, head_dim=D, implementation="reference", **options) -> PagedAttention:
    """A layer with random biases and sinks."""
    layer = PagedAttention(
        M, H, K, head_dim, dtype=dtype, precision="highest", implementation=implementation, rngs=nnx.Rngs(1), **options
    )
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if (bias := getattr(layer, name).bias) is not None:
            bias[...] = jnp.asarray(rng.standard_normal(bias.shape), dtype)
    if layer.sinks is not None:
        layer.sinks[...] = jnp.asarray(rng.standard_normal(H), jnp.float32)
    return layer


def pool(dtype="float32", head_dim=D, fill=0.0, **options) -> PagedKVCache:
    cache = PagedKVCache(POOL, PAGE, K, head_dim, dtype, **options)
    for pages in (cache.k, cache.v):
        pages[...] = jnp.full(pages.shape, fill, dtype)
    return cache


def tokens(rng, lengths, dtype="float32") -> list[np.ndarray]:
    return [np.asarray(jnp.asarray(rng.standard_normal((n, M)), dtype)) for n in lengths]


@nnx.jit
def step(layer, x, cache, batch):
    return layer(x, cache, batch)


def play(layer, cache, prompts, schedule, *, padding=0, run=step) -> np.ndarray:
    """Feed each request's tokens in chunks, `schedule` = tokens per request and step; outputs, request by request."""
    done = [0] * len(prompts)
    out = [[] for _ in prompts]
    for counts in schedule:
        rows = [p[d : d + n] for p, d, n in zip(prompts, done, counts, strict=True)]
        x = np.concatenate([*rows, np.full((padding, M), np.nan, prompts[0].dtype)])
        done = [d + n for d, n in zip(done, counts, strict=True)]
        start = np.concatenate([[0], np.cumsum(counts)])
        batch = tables(done, start, len(x))
        y = np.asarray(run(layer, jnp.asarray(x), cache, batch))
        for b, ys in enumerate(np.split(y[: start[-1]], start[1:-1])):
            out[b].append(ys)
    assert done == [len(p) for p in prompts]
    return np.concatenate([y for ys in out for y in ys])


def tables(lengths, start, rows) -> PagedBatch:
    """The batch of `TABLE`'s requests, with wild numbers in entries that nobody may read."""
    table = TABLE.copy()
    for b, n in enumerate(lengths):
        table[b, -(-n // PAGE) :] = 2**31 - 1
    return PagedBatch.from_lengths(
        jnp.asarray(table), jnp.asarray(lengths, jnp.int32), jnp.asarray(start, jnp.int32), tokens=rows, page=PAGE
    )


def weights(layer, dtype) -> dict:
    """The layer's parameters under Hugging Face's names, in its layout."""
    out = {} if layer.sinks is None else {"sinks": layer.sinks[...]}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(layer, name)
        out[f"{name}.weight"] = linear.kernel[...].T
        if linear.bias is not None:
            out[f"{name}.bias"] = linear.bias[...]
    return {name: jnp.asarray(np.asarray(x), dtype) for name, x in out.items()}


def dense(w, prompts, *, scale=None, window=None, softcap=None, rotary=None, **_):
    """Each request by itself, without pages or packing, in the dtype of its inputs."""
    out = []
    for x in prompts:
        n = len(x)

        def linear(name, x):
            return jnp.matmul(x, w[f"{name}.weight"].T, precision="highest") + w.get(f"{name}.bias", 0)

        q, k, v = (linear(f"{c}_proj", x).reshape(n, -1, D) for c in "qkv")
        position = jnp.arange(n)
        if rotary:
            q, k = rotary(q, position), rotary(k, position)
        k, v = (jnp.repeat(y, H // K, 1) for y in (k, v))
        s = jnp.einsum("thd,shd->hts", q, k, precision="highest") * (D**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * jnp.tanh(s / softcap)
        age = position[:, None] - position
        s = jnp.where((age >= 0) & (age < (window or n)), s, -jnp.inf)
        sink = w["sinks"] if "sinks" in w else jnp.full(H, -jnp.inf, s.dtype)
        p = jax.nn.softmax(jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (H, n, 1))], -1), -1)[..., :-1]
        o = jnp.einsum("hts,shd->thd", p, v, precision="highest").reshape(n, H * D)
        out.append(linear("o_proj", o))
    return jnp.concatenate(out)


def truth_of(layer, prompts, options) -> np.ndarray:
    with jax.enable_x64(True):
        wide = [jnp.asarray(p.astype(np.float64)) for p in prompts]
        return np.asarray(jax.jit(lambda w, xs: dense(w, xs, **options))(weights(layer, jnp.float64), wide))


def composed(layer, prompts, dtype, options) -> np.ndarray:
    """The same by hand: projections that round once, the cache filled with numpy, one call of the op's reference."""
    from jaxattn import paged_attention

    w = weights(layer, dtype)
    x = jnp.asarray(np.concatenate(prompts))
    lengths = [len(p) for p in prompts]
    batch = tables(lengths, np.concatenate([[0], np.cumsum(lengths)]), len(x))

    def linear(name, x):
        y = jnp.matmul(x, w[f"{name}.weight"].T, precision="highest", preferred_element_type=jnp.float32)
        return (y + w.get(f"{name}.bias", 0)).astype(dtype)

    q, k, v = (linear(f"{c}_proj", x).reshape(len(x), -1, D) for c in "qkv")
    if options.get("rotary"):
        position = jnp.concatenate([jnp.arange(n) for n in lengths])
        q, k = rotary(q, position), rotary(k, position)
    pools = []
    for y in (k, v):
        pages = np.zeros((POOL, PAGE, K, D), y.dtype)
        row = 0
        for b, n in enumerate(lengths):
            for i in range(n):
                pages[TABLE[b, i // PAGE], i % PAGE] = np.asarray(y[row])
                row += 1
        pools.append(jnp.asarray(pages))
    o = paged_attention(
        q,
        *pools,
        batch.page_table,
        batch.lengths,
        batch.query_start,
        sinks=w.get("sinks"),
        scale=options.get("scale"),
        window=options.get("window"),
        softcap=options.get("softcap"),
        implementation="reference",
    )
    return np.asarray(linear("o_proj", o.reshape(len(x), H * D)))


def agree(truth, subject, peer, rule="default"):
    axes, rank = (("token", "feature"), 1) if truth.ndim == 2 else (None, 0)
    verdict = judge.judge(
        tolerances.find(rule),
        truth=truth,
        subject=np.asarray(subject),
        peer=np.asarray(peer),
        axes=axes,
        slice_rank=rank,
    )
    assert verdict.passed, verdict.reason


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("dtype", "name"),
    (
        ("float32", "plain"),
        ("float32", "gpt-oss"),
        ("float32", "softcap"),
        ("bfloat16", "gpt-oss"),
        ("float16", "softcap"),
    ),
)
def test_prefill_is_projections_around_the_op(rng, dtype, name):
    options = OPTIONS[name]
    layer, prompts = build(rng, dtype, **options), tokens(rng, (37, 5), dtype)
    y = play(layer, pool(dtype), prompts, [(37, 5)])
    assert y.dtype == jnp.dtype(dtype)
    agree(truth_of(layer, prompts, options), y, composed(layer, prompts, dtype, options))


@pytest.mark.parametrize(
    ("dtype", "schedule"),
    (
        pytest.param("float32", [(34, 4), (1, 1), (1, 0), (1, 1)], id="float32-prefill-then-decode"),
        pytest.param("bfloat16", [(35, 4), (1, 1), (1, 1)], id="bfloat16-prefill-then-decode"),
        pytest.param("float32", [(16, 3), (17, 0), (4, 3)], id="float32-chunks"),
        pytest.param("float32", [(1, 1)] * 6 + [(31, 0)], id="float32-decode-then-chunk"),
    ),
)
def test_any_schedule_is_one_shot(rng, dtype, schedule):
    options = OPTIONS["gpt-oss"]
    layer, prompts = build(rng, dtype, **options), tokens(rng, (37, 6), dtype)
    once = play(layer, pool(dtype), prompts, [(37, 6)])
    y = play(layer, pool(dtype), prompts, schedule)
    agree(truth_of(layer, prompts, options), y, once)


def test_interpreted_kernel(rng):
    D64 = 64
    with _mosaic.interpret():
        layer = build(rng, "bfloat16", head_dim=D64, implementation="mosaic", sinks=True, window=11)
        prompts = tokens(rng, (18, 3), "bfloat16")
        reason = explain("paged_attention", **_op_shapes(D64)).reasons["mosaic"]
        if reason is not None:
            pytest.skip(reason)
        y = play(layer, pool("bfloat16", D64), prompts, [(17, 3), (1, 0)], run=nnx.jit(PagedAttention.__call__))
    layer.implementation = "reference"
    same = play(layer, pool("bfloat16", D64), prompts, [(17, 3), (1, 0)])
    with jax.enable_x64(True):
        wide = build(rng, "float64", head_dim=D64, sinks=True, window=11)
        nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(layer, nnx.Param)))
        truth = play(wide, pool("float64", D64), [p.astype(np.float64) for p in prompts], [(17, 3), (1, 0)])
    agree(truth, y, same, rule="contract")


def _op_shapes(head_dim):
    def array(shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pages = array((POOL, PAGE, K, head_dim))
    return {
        "q": array((20, H, head_dim)),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": array((2, WIDTH), "int32"),
        "lengths": array((2,), "int32"),
        "query_start": array((3,), "int32"),
        "sinks": array((H,), "float32"),
        "window": 11,
    }


def test_sinks_act(rng):
    layer, prompts = build(rng, use_bias=True, sinks=True), tokens(rng, (20, 3))
    plain = play(build(np.random.default_rng(0)), pool(), prompts, [(20, 3)])
    off = build(np.random.default_rng(0), sinks=True)
    off.sinks[...] = jnp.full(H, -jnp.inf)
    np.testing.assert_array_equal(bits(play(off, pool(), prompts, [(20, 3)])), bits(plain))
    layer.sinks[...] = jnp.full(H, jnp.inf)
    drowned = play(layer, pool(), prompts, [(20, 3)])
    np.testing.assert_array_equal(drowned, np.broadcast_to(np.asarray(layer.o_proj.bias[...]), drowned.shape))


@pytest.mark.optimized
def test_gradient_of_every_parameter(rng):
    options = OPTIONS["gpt-oss"]
    layer, prompts = build(rng, **options), tokens(rng, (12, 3))
    weight = rng.standard_normal((15, M)).astype(np.float32)
    batch = tables((12, 3), (0, 12, 15), 15)
    x = jnp.asarray(np.concatenate(prompts))
    state = nnx.jit(nnx.grad(lambda layer, cache: (layer(x, cache, batch) * weight).sum()))(layer, pool())

    def by_hand(dtype):
        w = weights(layer, dtype)
        parts = [jnp.asarray(p.astype(dtype)) for p in prompts]
        return jax.jit(jax.grad(lambda w: (dense(w, parts, **options) * weight.astype(dtype)).sum()))(w)

    with jax.enable_x64(True):
        truth = jax.tree.map(np.asarray, by_hand(np.float64))
    peer = by_hand(np.float32)
    got = {"sinks": state["sinks"][...]}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        got |= {f"{name}.weight": state[name]["kernel"][...].T, f"{name}.bias": state[name]["bias"][...]}
    assert got.keys() == truth.keys()
    for name in got:
        verdict = judge.judge(
            tolerances.find("contract"),
            truth=truth[name],
            subject=np.asarray(got[name]),
            peer=np.asarray(peer[name]),
        )
        assert verdict.passed, (name, verdict.reason)


# ---------------------------------------------------------------- the cache
def test_poison_does_not_leak(rng):
    layer, prompts = build(rng, **OPTIONS["gpt-oss"]), tokens(rng, (35, 3))
    schedule = [(33, 1), (2, 2)]
    clean = play(layer, pool(), prompts, schedule, padding=3)
    poisoned = play(layer, pool(fill=np.nan), prompts, schedule, padding=3)
    assert np.isfinite(poisoned).all()
    np.testing.assert_array_equal(bits(poisoned), bits(clean))


def test_padding_gives_the_output_bias(rng):
    layer = build(rng, use_bias=True)
    x = np.full((6, M), np.nan, np.float32)
    x[:3] = tokens(rng, (3,))[0]
    y = step(layer, jnp.asarray(x), pool(), tables((2, 1), (0, 2, 3), 6))
    np.testing.assert_array_equal(y[3:], np.broadcast_to(np.asarray(layer.o_proj.bias[...]), (3, M)))


def test_float8_cache_is_a_cache_of_what_it_decodes_to(rng):
    """Prefill through float8, then decode through it and through a bfloat16 copy of it, the new token aside."""
    layer, (prompt, other) = build(rng, "bfloat16"), tokens(rng, (20, 4), "bfloat16")
    cache = pool("float8_e4m3fn", k_scale=0.02, v_scale=0.03)
    y = play(layer, cache, [prompt, other], [(19, 4), (1, 0)])
    copy = pool("bfloat16")
    for into, pages, scale in ((copy.k, cache.k, cache.k_scale), (copy.v, cache.v, cache.v_scale)):
        into[...] = (pages[...].astype(jnp.float32) * scale[...]).astype(jnp.bfloat16)
    batch = tables((20, 4), (0, 1, 1), 1)
    batch = PagedBatch(batch.page_table, batch.lengths, batch.query_start, jnp.full(1, -1, jnp.int32), batch.positions)
    again = step(layer, jnp.asarray(prompt[19:]), copy, batch)
    np.testing.assert_array_equal(bits(again[0]), bits(y[19]))


# ---------------------------------------------------------------- Flax and XLA
def test_values_do_not_recompile(rng):
    layer, cache, traces = build(rng, sinks=True), pool(), []

    @nnx.jit
    def counted(layer, x, cache, batch):
        traces.append(1)
        return layer(x, cache, batch)

    prompts = tokens(rng, (40, 9))
    play(layer, cache, prompts, [(10, 2), (7, 5), (12, 0), (11, 1), (0, 1)], run=counted)
    assert len(traces) == 2, "one for steps of 12 tokens, one for the step of 1"


def test_donated_cache_is_updated_in_place(rng):
    """No copy of a pool in the program, although 4096 pages dwarf everything else in it."""
    layer, cache = build(rng), PagedKVCache(4096, PAGE, K, D, jnp.float32)
    x, batch = jnp.asarray(tokens(rng, (3,))[0]), tables((20, 2), (0, 2, 3), 3)
    cache_bytes = 2 * cache.k[...].nbytes
    kept = nnx.jit(PagedAttention.__call__).lower(layer, x, cache, batch).compile()
    donated = nnx.jit(PagedAttention.__call__, donate_argnums=(0, 2)).lower(layer, x, cache, batch).compile()
    assert kept.memory_analysis().alias_size_in_bytes == 0
    parameters = sum(p.nbytes for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    memory = donated.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes + parameters
    assert memory.temp_size_in_bytes < cache_bytes / 100
    pool_copy = rf"= f32\[4096,{PAGE},{K},{D}\]\S* copy\("
    assert re.search(pool_copy, kept.as_text())
    assert not re.search(pool_copy, donated.as_text())


def test_donation_deletes_the_old_pool_and_keeps_the_module_usable(rng):
    layer, cache = build(rng), pool()
    old = cache.k[...]
    prompts = tokens(rng, (20, 3))
    run = nnx.jit(PagedAttention.__call__, donate_argnums=(0, 2))
    y = play(layer, cache, prompts, [(19, 3), (1, 0)], run=run)
    assert old.is_deleted()
    np.testing.assert_array_equal(bits(y), bits(play(layer, pool(), prompts, [(19, 3), (1, 0)])))


def test_split_merge_and_eval_shape(rng):
    layer, cache = build(rng, **OPTIONS["gpt-oss"]), pool()
    x, batch = jnp.asarray(tokens(rng, (7,))[0]), tables((5, 2), (0, 5, 7), 7)
    graph, parameters, pages = nnx.split((layer, cache), nnx.Param, KVPages)

    @jax.jit
    def pure(parameters, pages):
        layer, cache = nnx.merge(graph, parameters, pages)
        y = layer(x, cache, batch)
        return y, nnx.state(cache, KVPages)

    y, after = pure(parameters, pages)
    assert not np.asarray(cache.k[...]).any()
    expected = step(layer, x, cache, batch)
    np.testing.assert_array_equal(bits(y), bits(expected))
    np.testing.assert_array_equal(bits(after["k"][...]), bits(cache.k[...]))
    abstract = nnx.eval_shape(lambda: PagedAttention(M, H, K, D, sinks=True, rngs=nnx.Rngs(0)))
    assert abstract.q_proj.kernel.shape == (M, H * D)
    assert abstract.sinks.dtype == jnp.float32
    out = nnx.eval_shape(step, layer, x, cache, batch)
    assert (out.shape, out.dtype) == (y.shape, y.dtype)


class Layer(nnx.Module):
    """A layer that owns its cache, as Linen's variable collections want it."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = PagedAttention(
            M, H, K, D, sinks=True, window=11, dtype="float32", precision="highest", rngs=rngs
        )
        self.cache = PagedKVCache(POOL, PAGE, K, D, jnp.float32)

    def __call__(self, x, batch):
        return self.attention(x, self.cache, batch)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        return nnx.bridge.ToLinen(Layer, name="layer")(x, batch)


def test_linen_bridge(rng):
    model, prompts = LinenModel(), tokens(rng, (20, 3))
    x = [np.concatenate([p[:-1] for p in prompts]), np.concatenate([p[-1:] for p in prompts])]
    batches = [tables((19, 2), (0, 19, 21), 21), tables((20, 3), (0, 1, 2), 2)]
    variables = model.init(jax.random.key(0), jnp.asarray(x[0]), batches[0])
    assert set(variables) == {"params", "kv_pages"}
    assert not np.asarray(variables["kv_pages"]["layer"]["cache"]["k"]).any()
    apply = jax.jit(lambda v, x, batch: model.apply(v, x, batch, mutable="kv_pages"))
    outputs = []
    for x_step, batch in zip(x, batches, strict=True):
        y, updated = apply(variables, jnp.asarray(x_step), batch)
        variables = {**variables, **updated}
        outputs.append(y)

    layer = build(rng, sinks=True, window=11)
    state = variables["params"]["layer"]["attention"]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(layer, name).kernel[...] = state[name]["kernel"]
    layer.sinks[...] = state["sinks"]
    cache = pool()
    for y, x_step, batch in zip(outputs, x, batches, strict=True):
        np.testing.assert_array_equal(bits(y), bits(step(layer, jnp.asarray(x_step), cache, batch)))
    np.testing.assert_array_equal(bits(variables["kv_pages"]["layer"]["cache"]["k"]), bits(cache.k[...]))


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache

mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
data = np.load(sys.argv[1])
layer = PagedAttention({M}, {H}, {K}, {D}, sinks=True, dtype="float32", precision="highest", rngs=nnx.Rngs(1))
cache = PagedKVCache({POOL}, {PAGE}, {K}, {D}, jnp.float32)
def put(variable, *spec):
    variable[...] = jax.device_put(variable[...], NamedSharding(mesh, P(*spec)))
for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
    put(linear.kernel, None, "heads")
put(layer.o_proj.kernel, "heads", None)
put(layer.sinks, "heads")
put(cache.k, None, None, "heads", None)
put(cache.v, None, None, "heads", None)
batch = PagedBatch(*(jnp.asarray(data[n]) for n in ("page_table", "lengths", "query_start", "slots", "positions")))
step = nnx.jit(PagedAttention.__call__, donate_argnums=(0, 2))
text = step.lower(layer, jnp.asarray(data["x"]), cache, batch).compile().as_text()
assert "all-gather" not in text, "a sharded pool was gathered"
y = step(layer, jnp.asarray(data["x"]), cache, batch)
assert cache.k[...].sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "heads", None)), 4)
np.savez(sys.argv[2], y=y, k=cache.k[...])
"""


def test_heads_sharded_over_two_devices(rng, tmp_path):
    layer, prompts = build(rng, sinks=True), tokens(rng, (20, 3))
    layer.sinks[...] = jnp.zeros(H)
    batch, cache = tables((20, 3), (0, 20, 23), 23), pool()
    x = jnp.asarray(np.concatenate(prompts))
    y = step(layer, x, cache, batch)
    fields = {n: getattr(batch, n) for n in ("page_table", "lengths", "query_start", "slots", "positions")}
    np.savez(tmp_path / "in.npz", x=x, **fields)
    script = SHARDED.format(M=M, H=H, K=K, D=D, POOL=POOL, PAGE=PAGE)
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "in.npz", tmp_path / "out.npz"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sharded = np.load(tmp_path / "out.npz")
    agree(truth_of(layer, prompts, {}), sharded["y"], y)


# ---------------------------------------------------------------- examples
def test_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples/paged_attention.py"), run_name="__main__")
    assert capsys.readouterr().out == "prefill (25, 512)\ndecode (2, 512)\n"

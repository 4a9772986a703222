"""What attention over packed slots promises beyond the contract: dense equivalents, limits, configurations."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import explain, paged_attention, turboquant_attention
from jaxattn.ops import turboquant_attention as op
from jaxattn.ops._turboquant_cases import attention_inputs
from jaxattn.quant import turboquant
from pallas_kernels import _mosaic
from pallas_kernels import turboquant_attention as mosaic
from parity import judge, tolerances

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])


def run(implementation, **args):
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(turboquant_attention(**args, implementation=implementation))
    return jax.tree.map(np.asarray, out)


def passes(rule, truth, subject, peer):
    verdict = judge.judge(tolerances.find(rule), truth=truth, subject=subject, peer=peer, slice_rank=2)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("preset", turboquant.PRESETS)
def test_it_is_attention_over_the_dequantized_cache(preset, rng):
    """With keys rotated back, by `paged_attention`, in float64."""
    args = attention_inputs(rng, (1, 4), (40, 33), preset=preset, dtype="float32", return_lse=True)
    with jax.enable_x64(True):
        pages = jnp.where(args["pages"] == 0xFF, 0, args["pages"])  # poison, and some codes: the same for both
        wide = args | {"q": jnp.asarray(args["q"], jnp.float64), "pages": pages}
        k, v = turboquant.dequantize(pages, 64, preset, dtype="float64")
        tables = {name: wide[name] for name in ("page_table", "lengths", "query_start")}
        o, lse = paged_attention(wide["q"], k, v, **tables, return_lse=True, implementation="reference")
        got_o, got_lse = turboquant_attention(**wide, implementation="reference")
    bound = 64 * tolerances.FLOAT64
    np.testing.assert_allclose(got_o, o, rtol=0, atol=bound * np.abs(np.asarray(o)).max())
    np.testing.assert_allclose(got_lse, lse, rtol=bound, atol=0)


@implementations
def test_one_key_gives_its_value(implementation, rng):
    args = attention_inputs(rng, (1,), (1,), H=4, K=2)
    slot = args["pages"][args["page_table"][0, 0], 0]
    value = np.asarray(turboquant.read_value(slot, 64, "4bit_nc"))
    expected = np.repeat(value, 2, axis=0).astype(np.float16).astype(jnp.bfloat16)
    np.testing.assert_array_equal(run(implementation, **args)[0], expected)


@implementations
def test_a_permutation_of_pages_changes_no_bit(implementation, rng):
    args = attention_inputs(rng, (1, 3), (70, 33), K=1, H=2)
    P = args["pages"].shape[0]
    order = rng.permutation(P)
    table = np.asarray(args["page_table"])
    moved = np.where(table < P, np.argsort(order)[np.clip(table, 0, P - 1)], table)
    other = args | {"pages": args["pages"][order], "page_table": jnp.asarray(moved, jnp.int32)}
    np.testing.assert_array_equal(run(implementation, **args), run(implementation, **other))


@implementations
def test_queries_of_any_size_fit_float16(implementation, rng):
    """Scores of huge queries choose one key, those of tiny ones none."""
    args = attention_inputs(rng, (1, 1), (20, 20), H=2, K=2)
    q = args["q"] * jnp.array([1e30, 1e-30], jnp.bfloat16)[:, None, None]
    o = run(implementation, **args | {"q": q}).astype(np.float32)
    assert np.isfinite(o).all()
    slots = args["pages"][args["page_table"]].reshape(2, -1, *args["pages"].shape[2:])[:, :20]
    value = np.asarray(turboquant.read_value(slots, 64, "4bit_nc"))
    step = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(o[1], value[1].mean(0), rtol=0, atol=step * np.abs(value).max())
    chosen = np.abs(value[0] - o[0]).max(-1).min(0)
    assert (chosen <= step * np.abs(value).max()).all()


@pytest.mark.parametrize("change", [{"splits": 3}, {"rows": 16}, {"num_stages": 3}, {"warpgroups": 2}])
def test_every_way_to_cut_the_work_gives_the_same(change, rng):
    args = attention_inputs(rng, (1, 3), (200, 70), page=32, return_lse=True)
    if (
        change.get("warpgroups")
        and _mosaic.why_not_here()
        and mosaic.default_config(**op.prepare(**args)).warpgroups < 2
    ):
        pytest.skip("the interpreter needs a thread for each warpgroup")
    config = dataclasses.replace(mosaic.default_config(**op.prepare(**args)), **change)
    with jax.enable_x64(True):
        truth = run("reference", **args | {"q": jnp.asarray(args["q"], jnp.float64)})
    same, got = run("reference", **args), run("mosaic", **args, config=config)
    passes("contract", truth[0], got[0], same[0])
    passes("contract_lse", truth[1], got[1], same[1])


@implementations
def test_stored_hides_keys_and_what_they_hold(implementation, rng):
    args = attention_inputs(rng, (2, 1), (30, 40), before=False, return_lse=True)
    short = run(implementation, **args | {"stored": jnp.array([0, 7], jnp.int32)})
    assert not short[0][:2].any() and (short[1][:2] == -np.inf).all()
    cut = args | {"lengths": jnp.array([30, 7], jnp.int32)}
    np.testing.assert_array_equal(short[0][2], run(implementation, **cut)[0][2])


def test_wild_tables_read_only_the_pool(rng):
    args = attention_inputs(rng, (1, 1), (40, 20))
    wild = {"page_table": jnp.full_like(args["page_table"], -(2**31)), "lengths": jnp.array([2**31 - 1, -5], jnp.int32)}
    o = run("mosaic", **args | wild)
    assert o.shape == args["q"].shape


def test_messages_of_config():
    for given, message in (
        ({"rows": 12}, "rows must be 8, 16 or 32, got 12"),
        ({"splits": 0}, "splits must lie between 1 and 256, got 0"),
        ({"warpgroups": 5}, "warpgroups must lie between 1 and 4, got 5"),
        ({"num_stages": 9}, "num_stages must lie between 1 and 8, got 9"),
    ):
        with pytest.raises(ValueError) as raised:
            mosaic.Config(**given)
        assert str(raised.value) == message


def test_a_config_that_does_not_fit_is_named(rng):
    args = op.prepare(**attention_inputs(rng, (1,), (20,), H=32, K=8, D=128))
    for config, message in (
        (mosaic.Config(warpgroups=3), "warpgroups must divide the KV heads, got 3 and K=8"),
        (
            mosaic.Config(warpgroups=4, rows=32),
            "4 warpgroups with 2 KV heads each and 32 rows of 128 do not fit their registers; use fewer rows",
        ),
        (
            mosaic.Config(warpgroups=4, num_stages=5),
            "rows=8, num_stages=5 needs 367616 bytes of shared memory, more than 232448; use smaller values",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            mosaic.turboquant_attention(config=config, **args)
        assert str(raised.value) == f"turboquant_attention: {message}"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"preset": "x"}, ValueError, "preset must be one of k8v4, 4bit_nc, k3v4_nc, 3bit_nc, got 'x'"),
        ({"preset": "3bit_nc"}, ValueError, "slots of preset 3bit_nc with D=64 have 54 bytes, got 70"),
        ({"q": jnp.zeros((2, 3, 64))}, ValueError, "query heads must be a multiple of kv heads, got H=3 (q) and K=2"),
        ({"stored": jnp.zeros(2)}, TypeError, "stored must have dtype int32, got float32"),
        ({"stored": jnp.zeros(3, jnp.int32)}, ValueError, "stored must be [B] with B=2 (from page_table)"),
        ({"scale": -1.0}, ValueError, "scale must be positive and finite or None, got -1.0"),
    ],
)
def test_messages(change, error, message, rng):
    args = attention_inputs(rng, (1, 1), (20, 30))
    with pytest.raises(error, match=re.escape(f"turboquant_attention: {message}")):
        turboquant_attention(**args | change)


def test_explain_names_what_is_missing():
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    shapes = {
        "q": array((4, 8, 128), "float32"),
        "pages": array((9, 64, 2, 134), "uint8"),
        "page_table": array((4, 2), "int32"),
        "lengths": array((4,), "int32"),
        "query_start": array((5,), "int32"),
    }
    text = str(explain("turboquant_attention", on_target=True, preset="4bit_nc", **shapes))
    assert "q must be bfloat16 or float16, because operands are float16, got float32" in text

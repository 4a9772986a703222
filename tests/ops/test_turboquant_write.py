"""What writes of packed slots promise beyond the contract: bytes, untouched slots, no copy, large caches."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import turboquant_write
from jaxattn.ops._turboquant_cases import write_inputs
from jaxattn.quant import turboquant
from pallas_kernels import _aot, _mosaic
from pallas_kernels import turboquant_write as mosaic

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])
aot = pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")


def run(implementation, **args):
    """The cache as a numpy array; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        return np.asarray(jax.block_until_ready(turboquant_write(**args, implementation=implementation)))


def flat(pages):
    pages = np.asarray(pages)
    return pages.reshape(-1, *pages.shape[2:])


@implementations
@pytest.mark.parametrize("preset", ["k8v4", "3bit_nc"])
def test_named_slots_are_written_and_no_other_byte_changes(implementation, preset, rng):
    args = write_inputs(rng, 9, 2, 64, preset=preset, P=5, page=4, skipped=0.0)
    slots = np.array([3, -1, 19, 20, 0, 7, -7, 11, 12], np.int32)
    kept = (slots >= 0) & (slots < 20)
    new = {name: jnp.where(jnp.asarray(kept)[:, None, None], args[name], jnp.nan) for name in ("key", "value")}
    out = flat(run(implementation, **args | new | {"slots": jnp.asarray(slots)}))
    rest = np.setdiff1d(np.arange(20), slots[kept])
    np.testing.assert_array_equal(out[rest], flat(args["pages"])[rest])
    expected = turboquant.quantize(new["key"][kept], new["value"][kept], preset)
    np.testing.assert_array_equal(out[slots[kept]], expected)


@implementations
@pytest.mark.parametrize("slot", [-1, -(2**31), 4, 2**31 - 1])
def test_slots_outside_the_cache_write_nothing(implementation, slot):
    pages = jnp.full((2, 2, 1, 70), 7, jnp.uint8)
    x = jnp.ones((1, 1, 64))
    assert (run(implementation, key=x, value=x, pages=pages, slots=jnp.array([slot]), preset="4bit_nc") == 7).all()


@implementations
def test_slots_may_have_64_bits(implementation, rng):
    args = write_inputs(rng, 5, 1, 64, skipped=0.0)
    with jax.enable_x64(True):
        wide = args | {"slots": jnp.asarray(args["slots"], jnp.int64).at[0].set(2**40)}
        short = args | {"slots": args["slots"].at[0].set(-1)}
        np.testing.assert_array_equal(run(implementation, **wide), run(implementation, **short))


@pytest.mark.parametrize("tiles", [2, 4])
def test_tiles_of_one_block_give_the_same_bytes(tiles, rng):
    args = write_inputs(rng, 19, 2, 64)
    got = run("mosaic", **args, config=mosaic.Config(tiles=tiles))
    np.testing.assert_array_equal(got, run("reference", **args))


@implementations
def test_a_batch_of_caches_under_vmap(implementation, rng):
    batch = [write_inputs(rng, 5, 2, 64, preset="k3v4_nc") for _ in range(2)]
    stacked = {name: jnp.stack([args[name] for args in batch]) for name in batch[0] if name != "preset"}
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.vmap(lambda a: turboquant_write(**a, preset="k3v4_nc", implementation=implementation))(stacked)
        out = np.asarray(out)
    for i, args in enumerate(batch):
        np.testing.assert_array_equal(out[i], run("reference", **args))


@implementations
def test_outliers_are_not_silent(implementation):
    """Beyond float16 a norm or scale is infinite, which reads as a number that is not finite."""
    x = jnp.zeros((2, 1, 64), jnp.float32).at[0, 0, 3].set(1e6).at[1, 0, 3].set(jnp.nan)
    pages = jnp.zeros((1, 2, 1, 70), jnp.uint8)
    out = run(implementation, key=x, value=x, pages=pages, slots=jnp.arange(2), preset="4bit_nc")
    for y in turboquant.dequantize(jnp.asarray(out[0, :, 0]), 64, "4bit_nc"):
        assert not np.isfinite(np.asarray(y)).all(1).any()


@aot
@pytest.mark.aot
def test_a_donated_cache_is_not_copied(rng):
    args = write_inputs(rng, 8, 8, 128, P=64, page=64)
    prepared = {name: x for name, x in args.items() if name != "preset"}
    compiled = _aot.compile_h200(
        lambda pages, key, value, slots: turboquant_write(
            key, value, pages, slots, preset="4bit_nc", implementation="mosaic"
        ),
        *(jax.ShapeDtypeStruct(prepared[n].shape, prepared[n].dtype) for n in ("pages", "key", "value", "slots")),
        donate=(0,),
    )

    program = compiled.as_text()
    assert program.count(" copy(") == 0 and "alias" in program.splitlines()[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"preset": "2bit"},
            ValueError,
            "turboquant_write: preset must be one of k8v4, 4bit_nc, k3v4_nc, 3bit_nc, got '2bit'",
        ),
        (
            {"preset": "k8v4"},
            ValueError,
            "turboquant_write: slots of preset k8v4 with D=64 have 100 bytes, got 70 (last dimension of pages)",
        ),
        (
            {"pages": jnp.zeros((4, 16, 2, 70), jnp.int8)},
            TypeError,
            "turboquant_write: pages must have dtype uint8, got int8",
        ),
        (
            {"value": jnp.zeros((5, 2, 64), jnp.float16)},
            TypeError,
            "turboquant_write: value must have dtype bfloat16, got float16; key and value need one dtype; cast one of "
            "them",
        ),
        (
            {"slots": jnp.zeros(5)},
            TypeError,
            "turboquant_write: slots must have dtype int32 or int64, got float32",
        ),
        (
            {"slots": jnp.array([0, 1, 1, 2, 3]), "checked": True},
            ValueError,
            "cache_write: slots must not repeat, slots[1] and slots[2] are both 1",
        ),
    ],
)
def test_messages(change, error, message, rng):
    args = write_inputs(rng, 5, 2, 64)
    with pytest.raises(error) as raised:
        turboquant_write(**args | change)
    assert str(raised.value) == message


def test_config_messages():
    with pytest.raises(ValueError) as raised:
        mosaic.Config(tiles=3)
    assert str(raised.value) == "tiles=3 must be one of 1, 2, 4"

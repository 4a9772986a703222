"""What writes into latent caches promise: layouts byte by byte, edges of scales, skipped slots, large offsets."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import _latent_cache, indexer_keys, latent_cache_gather, latent_cache_write
from jaxattn.ops.latent_cache_write import make_inputs
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels.latent_cache_write import Config


def write_v4(x, slots, pages=2, page=64, fill=0):
    cache = jnp.full((pages, _latent_cache.v4_page_bytes(page)), fill, jnp.uint8)
    x = jnp.asarray(x)
    return np.asarray(latent_cache_write(x[:, :448], x[:, 448:], cache, jnp.asarray(slots), format="v4", page=page))


def test_page_sizes():
    assert [_latent_cache.v4_page_bytes(n) for n in (1, 2, 64)] == [1152, 1728, 37440]


def test_a_v4_row_by_hand():
    x = np.zeros((1, 512), np.float32)
    x[0, 64], x[0, 65], x[0, 448] = 448, 1, 1.5  # block 1: amax 448, exponent 0
    x[0, 128] = 449  # block 2: rounded to 448 in bfloat16
    x[0, 192] = 450  # block 3: exponent 1, code of 225
    cache = write_v4(x.astype(ml_dtypes.bfloat16), [65])[1]
    e4m3 = ml_dtypes.float8_e4m3fn
    assert cache[576 + 64 : 576 + 66].tolist() == np.array([448, 1], e4m3).view(np.uint8).tolist()
    assert cache[576 + 448 : 576 + 450].tolist() == np.array([1.5], ml_dtypes.bfloat16).view(np.uint8).tolist()
    assert cache[576 + 192] == np.array([225], e4m3).view(np.uint8)[0]
    scales = cache[64 * 576 + 8 : 64 * 576 + 16]
    assert scales.tolist() == [105, 127, 127, 128, 105, 105, 105, 0]
    assert (np.delete(cache, [*range(576, 1152), *range(36872, 36880)]) == 0).all()


def test_bc35_a_block_of_zeros_has_the_caches_floor():
    """1e-4 / 448 rounded up to a power of two: 2^-22."""
    cache = write_v4(np.zeros((1, 512), ml_dtypes.bfloat16), [0])
    assert (cache[0, 64 * 576 : 64 * 576 + 7] == 127 - 22).all()


def test_bc37_no_double_rounding():
    """400.199585 is 416 as e4m3, and 384 on a detour through 16 bits; here the op itself rounds to bfloat16 first."""
    direct = p.to_float8(jnp.float32([400.199585, 272.156555, 136.002075]))
    assert direct.astype(jnp.float32).tolist() == [416, 288, 144]


def test_bc39_scales_are_rounded_up():
    x = np.zeros((1, 512), np.float32)
    x[0, 0] = 600
    cache = jnp.asarray(write_v4(x.astype(ml_dtypes.bfloat16), [0]))
    back = latent_cache_gather(cache, jnp.array([[0]]), jnp.array([1]), rows=1, page=64)
    assert float(back[0, 0, 0]) == 576


def test_ds_mla_rows_are_padded_with_the_smallest_scale():
    zeros = jnp.zeros((1, 512), jnp.bfloat16)
    row = latent_cache_write(
        zeros, zeros[:, :64], jnp.ones((1, 1, 656), jnp.uint8), jnp.array([0]), format="fp8_ds_mla"
    )
    scales = np.asarray(row)[0, 0, 512:528].view(np.float32)
    assert (scales == np.finfo(np.float32).smallest_normal).all()
    assert (np.asarray(row)[0, 0, :512] == 0).all()


@pytest.mark.parametrize("format", ["plain", "fp8", "fp8_ds_mla", "v4"])
def test_round_trip_and_skipped_slots(format, rng):
    R = 448 if format == "v4" else 512
    x = jnp.asarray(rng.standard_normal((5, R + 64)), jnp.bfloat16)
    shape = {"v4": (3, 1728), "fp8_ds_mla": (3, 2, 656)}.get(format, (3, 2, R + 64))
    dtype = {"plain": "bfloat16", "fp8": "float8_e4m3fn"}.get(format, "uint8")
    old = jnp.asarray(rng.integers(0, 100, shape)).astype(dtype)
    more = {"format": format} | ({"page": 2} if format == "v4" else {})
    slots = jnp.array([4, -1, 0, 6, 2**31 - 1])
    new = latent_cache_write(x[:, :R], x[:, R:], old, slots, **more)
    kept = latent_cache_write(x[:, :R], x[:, R:], old, jnp.full(5, -3), **more)
    np.testing.assert_array_equal(np.asarray(kept).view(np.uint8), np.asarray(old).view(np.uint8))
    if format == "fp8":
        return
    back = latent_cache_gather(new, jnp.array([[2, 0]]), jnp.array([3]), rows=3, **more)[0]
    largest = np.abs(np.asarray(x, np.float32)).max()
    bound = 0 if format == "plain" else largest / 16
    for got, token in ((back[0], 0), (back[2], 2)):
        assert np.abs(np.asarray(got, np.float32) - np.asarray(x[token], np.float32)).max() <= bound


def test_bc17_offsets_beyond_31_bits_stay_right():
    """Pages and places in them are separate indices: the compiled scatter has no product of the two."""
    pages = 2**31 // 37440 + 2
    x = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((pages, 37440), jnp.uint8)

    def write(x, cache, slots):
        return latent_cache_write(x[:, :448], x[:, 448:], cache, slots, format="v4", page=64)

    text = str(jax.make_jaxpr(write)(x, cache, jax.ShapeDtypeStruct((1,), jnp.int32)))
    assert "reshape" not in [line for line in text.splitlines() if f"u8[{pages * 37440}]" in line]
    assert f"u8[{pages},37440]" in text
    number, place = _latent_cache.place_of(jnp.array([pages * 64 - 1]), pages, 64)
    assert (int(number[0]), int(place[0])) == (pages - 1, 63)


WRONG = {
    "format": (
        {"format": "fp4"},
        "format must be one of plain, fp8, fp8_ds_mla, v4, indexer_fp8, indexer_mxfp4, got 'fp4'",
    ),
    "page": (
        {"format": "v4"},
        "page belongs to format v4 or indexer_fp8 or indexer_mxfp4, got format v4 and page none",
    ),
    "page-plain": (
        {"page": 64},
        "page belongs to format v4 or indexer_fp8 or indexer_mxfp4, got format plain and page 64",
    ),
    "key-width": (
        {"format": "indexer_fp8", "page": 2, "cache": jnp.ones((2, 264), jnp.uint8)},
        "format indexer_fp8 stores R + Dr = 128 numbers, got 512 + 64",
    ),
    "key-bytes": (
        {"format": "indexer_mxfp4", "page": 4, "cache": jnp.ones((2, 264), jnp.uint8), "latent": jnp.ones((2, 64))},
        "a page of 4 indexer_mxfp4 rows needs at least 272 bytes, got a cache of pages of 264",
    ),
    "scale": ({"scale": 0.5}, "a scale belongs to format fp8, got format plain; leave it out"),
    "row": ({"cache": jnp.ones((2, 4, 512))}, "a row of format plain has 576 entries, got a cache [2, 4, 512]"),
    "v4-width": (
        {"format": "v4", "page": 2, "cache": jnp.ones((2, 1728), jnp.uint8)},
        "format v4 stores R, Dr = (448, 64), got 512, 64",
    ),
    "v4-bytes": (
        {"format": "v4", "page": 4, "cache": jnp.ones((2, 1728), jnp.uint8), "latent": jnp.ones((2, 448))},
        "a page of 4 v4 rows needs at least 2336 bytes, got a cache of pages of 1728",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"latent": jnp.ones((2, 512)), "rotary": jnp.ones((2, 64)), "cache": jnp.ones((2, 4, 576))}
    with pytest.raises(ValueError, match=f"^latent_cache_write: {re.escape(message)}$"):
        latent_cache_write(**args | {"slots": jnp.arange(2)} | changes)


@pytest.mark.parametrize("format", ["indexer_fp8", "indexer_mxfp4"])
def test_keys_of_the_indexer_come_back_and_slots_are_skipped(format, rng):
    x = jnp.asarray(rng.standard_normal((4, 128)), jnp.bfloat16)
    old = jnp.asarray(rng.integers(0, 100, (3, 2 * 132)), jnp.uint8)
    new = latent_cache_write(x[:, :64], x[:, 64:], old, jnp.array([5, -1, 2, 6]), format=format, page=2)
    keys, scales = indexer_keys(new, jnp.array([[2, 1]]), format=format, page=2)
    back = np.asarray(keys[0], np.float32) * np.asarray(scales)[0, :, None]
    # half a step: of a number, and of the smallest codes under a scale of amax / 224 or amax / 3 at most
    relative, absolute = (1 / 16, 2.0**-10 / 224) if format == "indexer_fp8" else (1 / 5, 1 / 12)
    for row, token in ((1, 0), (2, 2)):
        want = np.asarray(x[token], np.float32)
        bound = np.maximum(np.abs(want) * relative, np.abs(want).max() * absolute)
        assert (np.abs(back[row] - want) <= bound).all()
    np.testing.assert_array_equal(new[0], old[0])
    row = 128 if format == "indexer_fp8" else 64
    np.testing.assert_array_equal(new[2, :row], old[2, :row])


def test_a_key_in_fp8_by_hand():
    key = jnp.zeros((1, 128)).at[0, 0].set(450.0).at[0, 127].set(-2.0)
    page = np.asarray(
        latent_cache_write(
            key[:, :100], key[:, 100:], jnp.zeros((1, 264), jnp.uint8), jnp.array([1]), format="indexer_fp8", page=2
        )
    )[0]
    e4m3 = ml_dtypes.float8_e4m3fn
    assert page[128:256].view(e4m3)[[0, 127]].tolist() == [np.array(225, e4m3), -1]  # the scale is 2
    assert page[256:].view(np.float32).tolist() == [0, 2]


def test_wrong_types():
    args = {"latent": jnp.ones((2, 512)), "rotary": jnp.ones((2, 64)), "slots": jnp.arange(2)}
    with pytest.raises(
        TypeError, match="latent_cache_write: cache must have dtype uint8, got float32; format fp8_ds_mla"
    ):
        latent_cache_write(**args, cache=jnp.ones((2, 4, 656)), format="fp8_ds_mla")


def test_wrong_configurations():
    with pytest.raises(ValueError, match=r"^tokens must be 1, 2 or 4, got 3$"):
        Config(tokens=3)


@pytest.mark.parametrize("format", ["fp8_ds_mla", "v4", "fp8"])
def test_the_kernel_writes_several_tokens_a_block(format, rng):
    """Nine tokens in blocks of four; the last block has one."""
    page = {"page": 64, "P": 2} if format == "v4" else {}
    args = make_inputs(rng, 9, format=format, **page)
    with _mosaic.interpret():
        written = latent_cache_write(**args, implementation="mosaic", config=Config(tokens=4))
    np.testing.assert_array_equal(written, latent_cache_write(**args))

"""Checkpoint folders: shards, order of loading, and every way in which one can be broken."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxattn.models import Checkpoint, CheckpointError, DeepseekV4Config, Piece
from jaxattn.models.checkpoint import load
from jaxattn.nn import QuantizedLinear
from jaxattn.nn.norm import RMSNorm
from scripts import make_tiny_checkpoints

BF16 = jnp.bfloat16
DATA = Path(__file__).resolve().parents[2] / "parity" / "data" / "models"


class Stack(nnx.Module):
    """Two matrices that checkpoints hold apart, a table of its own, and a matrix that it may share."""

    def __init__(self, shared, rngs):
        self.w = nnx.Param(jnp.zeros((2, 3, 4), BF16))
        self.table = nnx.Variable(jnp.arange(5.0) ** 2)
        self.shared = shared


class Small(nnx.Module):
    """One of everything that a checkpoint can fill."""

    def __init__(self, dtype=BF16, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(6, 4, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 3, param_dtype=dtype, rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(4, dtype=dtype)
        self.quantized = QuantizedLinear(130, 4, format="fp8_block", dtype=dtype)
        self.experts = Stack(self.norm, rngs)


RULES = {
    Stack: lambda m: {
        "w": tuple(
            Piece(name=f"{e}.w.weight", shape=(4, 3), at=(e,), convert=np.transpose) for e in range(m.w.shape[0])
        )
    }
}


def tensors(rng):
    def draw(*shape, dtype=BF16):
        return rng.standard_normal(shape).astype(dtype)

    found = {"embed.weight": draw(6, 4), "norm.weight": draw(4)}
    for i in range(2):
        found |= {f"layers.{i}.weight": draw(3, 4), f"layers.{i}.bias": draw(3), f"experts.{i}.w.weight": draw(4, 3)}
    found["quantized.weight"] = draw(4, 130, dtype=jnp.float8_e4m3fn)
    found["quantized.weight_scale_inv"] = draw(1, 2, dtype=np.float32)
    return found


def write(folder, arrays, shards=1):
    (folder / "config.json").write_text(json.dumps({"model_type": "small"}))
    names = sorted(arrays)
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return
    where = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: arrays[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def opened(folder):
    return load(Small, Checkpoint.open(folder), rules=RULES, progress=False)


def same(a, b):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives_bit_by_bit(shards, tmp_path, rng):
    arrays = tensors(rng)
    write(tmp_path, arrays, shards)
    model = opened(tmp_path)
    same(model.embed.embedding[...], arrays["embed.weight"])
    for i, layer in enumerate(model.layers):
        same(layer.kernel[...], arrays[f"layers.{i}.weight"].T)
        same(layer.bias[...], arrays[f"layers.{i}.bias"])
        same(model.experts.w[i], arrays[f"experts.{i}.w.weight"].T)
    same(model.quantized.weight[...], arrays["quantized.weight"])
    same(model.quantized.weight_scale_inv[...], arrays["quantized.weight_scale_inv"])
    assert model.experts.table[...].tolist() == [0, 1, 4, 9, 16]
    assert model.experts.shared is model.norm
    same(model.norm.weight[...], arrays["norm.weight"])
    assert model.layers[0](jnp.ones((1, 4), BF16)).shape == (1, 3)


def test_narrow_numbers_may_fill_wide_variables(tmp_path, rng):
    arrays = tensors(rng)
    write(tmp_path, arrays)
    wide = load(lambda: Small(jnp.float32), Checkpoint.open(tmp_path), rules=RULES, progress=False)
    same(wide.norm.weight[...], arrays["norm.weight"].astype(np.float32))
    arrays["norm.weight"] = arrays["norm.weight"].astype(np.float32)
    write(tmp_path, arrays)
    with pytest.raises(CheckpointError, match=r"norm\.weight: dtype must be bfloat16, got float32"):
        opened(tmp_path)


def test_nothing_points_into_the_files(tmp_path, rng):
    arrays = tensors(rng)
    write(tmp_path, arrays)
    model = opened(tmp_path)
    write(tmp_path, {n: np.zeros_like(a) for n, a in arrays.items()})
    same(model.quantized.weight[...], arrays["quantized.weight"])


def test_all_problems_are_named_at_once_and_nothing_is_read(tmp_path, rng, monkeypatch):
    arrays = tensors(rng)
    del arrays["layers.1.bias"], arrays["experts.0.w.weight"]
    arrays["embed.weight"] = arrays["embed.weight"][:, :3].copy()
    arrays["quantized.weight"] = arrays["quantized.weight"].astype(BF16)
    arrays["layers.2.weight"] = np.zeros((3, 4), BF16)
    arrays["rotary.inv_freq"] = np.zeros(4, np.float32)
    write(tmp_path, arrays, 2)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr("jaxattn.models._safetensors.Stored.read", lambda self: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError) as e:
        load(Small, checkpoint, rules=RULES, ignore=("rotary.*",), progress=False)
    lines = str(e.value).splitlines()
    files = {n: t.file.name for n, t in checkpoint.tensors.items()}
    assert lines[0] == f"Small: the checkpoint {tmp_path} must hold the model's tensors, got 5 problems:"
    assert sorted(lines[1:]) == sorted(
        [
            f"  {files['embed.weight']}: embed.weight: shape must be [6, 4], got [6, 3]",
            f"  {tmp_path}: layers.1.bias: missing; must have shape [3]",
            f"  {tmp_path}: experts.0.w.weight: missing; must have shape [4, 3]",
            f"  {files['quantized.weight']}: quantized.weight: dtype must be float8_e4m3fn, got bfloat16",
            f"  {files['layers.2.weight']}: layers.2.weight: unknown; the model has no place for it",
        ]
    )


def test_many_problems_of_a_kind_are_one_line(tmp_path, rng):
    """The tensors of another model: not a line for each of ten thousand experts' matrices."""
    write(tmp_path, {f"blocks.{i}.experts.{e}.w": np.zeros((3, 4), BF16) for i in range(4) for e in range(8)}, 2)
    with pytest.raises(CheckpointError) as e:
        opened(tmp_path)
    head, hint, *rest = str(e.value).splitlines()
    assert head == f"Small: the checkpoint {tmp_path} must hold the model's tensors, got 42 problems:"
    assert hint == "  most of them are not there: config.json may be that of another checkpoint"
    assert sorted(rest) == sorted(
        [
            f"  {tmp_path}: embed.weight: missing; must have shape [6, 4]",
            f"  {tmp_path}: norm.weight: missing; must have shape [4]",
            f"  {tmp_path}: layers.0.bias: missing; must have shape [3] (1 more of layers.*.bias)",
            f"  {tmp_path}: layers.0.weight: missing; must have shape [3, 4] (1 more of layers.*.weight)",
            f"  {tmp_path}: quantized.weight: missing; must have shape [4, 130]",
            f"  {tmp_path}: quantized.weight_scale_inv: missing; must have shape [1, 2]",
            f"  {tmp_path}: experts.0.w.weight: missing; must have shape [4, 3] (1 more of experts.*.w.weight)",
            "  model-00001-of-00002.safetensors: blocks.0.experts.0.w: unknown; the model has no place for it "
            "(31 more of blocks.*.experts.*.w)",
        ]
    )


def test_a_truncated_shard_names_its_last_tensor(tmp_path, rng):
    write(tmp_path, tensors(rng), 3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    message = rf"{shard}: truncated: tensors up to \S+ need {size} bytes, the file has {size - 1}"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=rf"{shard}: truncated: the header needs \d+ bytes, the file has 40"):
        Checkpoint.open(tmp_path)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{shard}: a safetensors file must start with the size of its header"):
        Checkpoint.open(tmp_path)


def test_missing_files(tmp_path, rng):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config\.json: the file is required, found none"):
        Checkpoint.open(tmp_path)
    write(tmp_path, tensors(rng), 3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    message = r"model\.safetensors\.index\.json names model-00003-of-00003\.safetensors, which are missing; fetch them"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    message = (
        r"model\.safetensors or, for several shards, model\.safetensors\.index\.json is required; the folder has "
        r"model-00001-of-00003\.safetensors, model-00002-of-00003\.safetensors"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_index_and_shards_must_agree(tmp_path, rng):
    write(tmp_path, tensors(rng), 2)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    moved = next(n for n, f in table["weight_map"].items() if f.startswith("model-00001"))
    table["weight_map"][moved] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=f"must name the same tensors, only one of them has {moved}"):
        Checkpoint.open(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="'weight_map' must map tensors to files, got None"):
        Checkpoint.open(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="must be JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "x: dtype must be one of BOOL, .*, got 'F4'"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            r"x: shape \[2\] of float32 needs 8 bytes.* gives it 4",
        ),
        ({"dtype": "F32", "shape": [1]}, "the header must be a JSON table of tensors"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "too long: tensors up to x need"),
    ],
)
def test_broken_headers(entry, message, tmp_path):
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_the_stored_checkpoints_are_those_of_the_script(tmp_path):
    assert make_tiny_checkpoints.main([str(tmp_path)]) == 0
    for folder in tmp_path.iterdir():
        made, stored = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (folder, DATA / folder.name))
        assert made == stored
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in DATA.iterdir() if f.is_dir()}


def test_the_script_writes_deepseek_v4_if_it_is_named(tmp_path):
    """The checkpoint that the documentation tells users to try."""
    assert make_tiny_checkpoints.main([str(tmp_path), "--only", "deepseek_v4"]) == 0
    (folder,) = tmp_path.iterdir()
    checkpoint = Checkpoint.open(folder)
    config = DeepseekV4Config.from_hf(checkpoint.config)
    assert (config.ratios, config.mtp_blocks, config.linear_format) == ((1, 4, 128, 4), 1, "fp8_block")
    assert [bool(moe.vocab) for moe in config.moe] == [True, True, False, False, False]
    assert checkpoint.tensors["layers.0.ffn.experts.0.w1.weight"].dtype == "int8"

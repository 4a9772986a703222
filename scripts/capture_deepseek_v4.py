"""Write captures of transformers' DeepSeek-V4 on a tiny checkpoint: what goes in and out of every kind of module.

    python scripts/capture_deepseek_v4.py OUT [--only GLOB] [--seed 0]

The checkpoint is `parity.models.tiny_deepseek_v4` in bfloat16, read by transformers itself. The runs `float32` and
`bfloat16` are one pass over the same tokens, `float32.cached` one with a cache; of most tensors some `rows` are kept,
but of the inputs of attention, which mixes tokens. `float32.truth` and so on hold the same outputs of the same code in
float64: of the whole run for float32; of the module on the same inputs for bfloat16, where the truth is stored in
float32. transformers has no MTP block: it is composed here of its decoder layer, norms and head. Needs the `torch`
extra; runs on Python 3.11 or later.
"""

import contextlib
import dataclasses
import functools
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import _capture
import numpy as np
from _capture import CaseData, Machine, Recipes, captures

from parity.models import tiny_deepseek_v4 as tiny

try:
    import torch
    import transformers
    from capture_torch import machine, to_numpy
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling
except ImportError as e:
    sys.exit(f"capture_deepseek_v4 needs PyTorch and transformers ({e}); install them with: pip install '.[torch]'")

FAMILY, TOKENS, PROMPT, NEW, MTP_TOKENS = "deepseek_v4", 260, 37, 24, 20
ROWS = (0, 1, 3, 4, 7, 8, 15, 16, 63, 127, 128, 191, 255, 256, 259)
RECIPES = Recipes("torch")
LAYER = r"model\.layers\.\d+"
JUDGED = rf"|model\.hc_head|{LAYER}(\.(self_attn(\.compressor\.indexer(\.scorer)?)?|mlp(\.gate)?|attn_hc|ffn_hc))?"
"""Modules that are compared with a truth, the model itself among them."""
MORE = rf"{LAYER}\.(self_attn\.(q_a|kv|o_b)_proj|mlp\.shared_experts(\.\w+_proj)?)"
"""Modules that say more of the place of a fault, in float32."""


@contextlib.contextmanager
def double():
    """Makes float64 of everything that the model's code forces to float32."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


@functools.cache
def checkpoint(mtp: bool = False) -> tuple[Path, str]:
    """A directory with the checkpoint, and the sha256 of its tensors."""
    directory = Path(tempfile.mkdtemp(prefix="tiny-v4-"))
    if mtp:
        tiny.mtp_as_model(directory)
        return directory, ""
    return directory, tiny.write(directory, quantized=False)


@functools.cache
def model(dtype: str, mtp: bool = False) -> torch.nn.Module:
    """The transformers model of the checkpoint."""
    found, info = AutoModelForCausalLM.from_pretrained(
        checkpoint(mtp)[0],
        dtype=torch.float32 if dtype == "float64" else getattr(torch, dtype),
        experts_implementation="eager",
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {name: keys for name, keys in info.items() if keys}
    if wrong:
        raise RuntimeError(f"transformers did not take the checkpoint as it is: {wrong}")
    if dtype == "float64":
        found = found.double()
        with double():
            for module in found.modules():
                if isinstance(module, modeling.DeepseekV4RotaryEmbedding):
                    for kind, rope in module.rope_type.items():
                        plain = module.compute_default_rope_parameters
                        make = plain if rope == "default" else ROPE_INIT_FUNCTIONS[rope]
                        setattr(module, f"{kind}_inv_freq", make(module.config, layer_type=kind)[0])
    return found.eval()


def precision(dtype: str):
    """The context in which a model of this dtype runs."""
    torch.set_num_threads(1)  # more threads sum in another order
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    if dtype == "float64":
        stack.enter_context(double())
    return stack


@functools.cache
def run(dtype: str) -> tuple[list, dict[str, tuple], torch.Tensor]:
    """Calls of one pass over `TOKENS` tokens, arguments of every module, and the streams behind the last layer."""
    calls, arguments, m = [], {}, model(dtype)

    def keep(path):
        return lambda module, args, kwargs, out: arguments.update({path: (args, kwargs, out)})

    hooks = [x.register_forward_hook(keep(path), with_kwargs=True) for path, x in m.named_modules()]
    with captures.hook.capture(m, calls.append), precision(dtype):
        m(input_ids=torch.from_numpy(tiny.prompt(TOKENS))[None].long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls, arguments, arguments[f"model.layers.{tiny.CONFIG['num_hidden_layers'] - 1}"][2]


def wide(x):
    """float64 of every float among a module's arguments."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: wide(a) for name, a in x.items()}
    return type(x)(wide(a) for a in x) if isinstance(x, tuple) else x


def alone(path: str) -> list:
    """Calls in a module and of itself in float64, on the arguments that it has in bfloat16."""
    args, kwargs, _ = run("bfloat16")[1][path]
    kwargs, calls, m = wide(kwargs), [], model("float64").get_submodule(path)
    if "position_embeddings" in kwargs:
        kwargs["position_embeddings"] = run("float64")[1][path][1]["position_embeddings"]
    with captures.hook.capture(m, calls.append), precision("float64"):
        m(*wide(args), **kwargs)
    return [
        dataclasses.replace(c, path=whole, params={**c.params, "path": whole})
        for c in calls
        if (whole := f"{path}.{c.path}".removesuffix("."))
    ]


def rows(path: str, key: str):
    """What is kept of a tensor: some tokens, all or nothing."""
    if key == "in.input_ids" and not path:
        return None
    if path.endswith("self_attn"):
        return {"in.hidden_states": None, "out.y_0": ROWS}.get(key, ())
    inputs = ("in.hidden_states", "in.input", "in.x", "in.hidden_streams")
    return (
        ROWS if key.startswith("out.") or (key in inputs and not path.endswith(("gate", "indexer", "scorer"))) else ()
    )


def params(kernel: str, **more) -> dict:
    """Parameters of a case that is no call of a module."""
    return {"kernel": f"transformers.{kernel}", "checkpoint": checkpoint()[1], **more}


def cases(calls: list, name: str, *patterns: str, inputs: str = "") -> dict[str, CaseData]:
    """Cases of the modules that match; `inputs` matches those whose inputs are kept."""
    wanted = [c for c in calls if any(re.fullmatch(p, c.path) for p in patterns)]

    def chosen(path: str, key: str):
        return () if key.startswith("in.") and not re.fullmatch(inputs, path) else rows(path, key)

    return _capture.module_cases(wanted, name, chosen, checkpoint=checkpoint()[1])


@RECIPES.add(FAMILY, "float32")
def float32(rng):
    """One run, inputs of what has a counterpart in other implementations."""
    del rng
    given = rf"|model\.hc_head|{LAYER}(\.(self_attn|mlp))?|{MORE}"
    return cases(run("float32")[0], "float32", JUDGED, MORE, inputs=given)


@RECIPES.add(FAMILY, "float32.truth")
def float32_truth(rng):
    """The same run in float64."""
    del rng
    return cases(run("float64")[0], "float32.truth", JUDGED)


MODULES = ("attn_hc", "self_attn", "ffn_hc", "mlp")
OWN = rf"model\.hc_head|{LAYER}\.({'|'.join(MODULES)})"
INNER = rf"{LAYER}\.(self_attn\.compressor\.indexer(\.scorer)?|mlp\.gate)"


@RECIPES.add(FAMILY, "bfloat16")
def bfloat16(rng):
    """Modules with their inputs."""
    del rng
    return cases(run("bfloat16")[0], "bfloat16", OWN, INNER, inputs=OWN)


@RECIPES.add(FAMILY, "bfloat16.truth")
def bfloat16_truth(rng):
    """Each module on these inputs in float64."""
    del rng
    paths = [f"model.layers.{i}.{name}" for i in range(tiny.CONFIG["num_hidden_layers"]) for name in MODULES]
    calls = [c for path in (*paths, "model.hc_head") for c in alone(path)]
    calls = [dataclasses.replace(c, order=i, params={**c.params, "order": i}) for i, c in enumerate(calls)]
    return {name: single(data) for name, data in cases(calls, "bfloat16.truth", OWN, INNER).items()}


def single(data: CaseData) -> CaseData:
    """A case with its float64 outputs in float32."""
    outputs = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in data.outputs.items()}
    return dataclasses.replace(data, outputs=outputs)


@RECIPES.add(FAMILY, "float32.cached")
def cached(rng):
    """The whole model with its cache: a prompt, then token by token."""
    del rng
    tokens, m, start = torch.from_numpy(tiny.prompt(TOKENS))[None].long(), model("float32"), TOKENS - 12
    with precision("float32"):
        out = m(tokens[:, :start], use_cache=True, logits_to_keep=1)
        found = [out.logits]
        for i in range(start, TOKENS):
            out = m(tokens[:, i : i + 1], cache=out.cache, use_cache=True)
            found.append(out.logits)
    last = range(start - 1, TOKENS)
    whole = next(c.outputs["logits"] for c in run("float64")[0] if not c.path)
    inputs, kernel = {"tokens": tiny.prompt(TOKENS)}, params("DeepseekV4ForCausalLM", tokens=list(last))
    return {
        "float32.cached": CaseData(kernel, inputs, {"logits": to_numpy(torch.cat(found, 1)[0])}),
        "float32.truth.cached": CaseData(kernel, inputs, {"logits": whole[0, list(last)]}),
    }


@RECIPES.add(FAMILY, "float32.generate")
def generate(rng):
    """Its own greedy generation."""
    del rng
    tokens = torch.from_numpy(tiny.prompt(PROMPT))[None].long()
    with precision("float32"):
        out = model("float32").generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = {"tokens": to_numpy(out[0, PROMPT:]).astype(np.int32)}
    return CaseData(params("DeepseekV4ForCausalLM"), {"tokens": tiny.prompt(PROMPT)}, found)


def mtp(dtype: str):
    """Add the MTP block on the first tokens: embedding of the next token, streams before the head."""

    @RECIPES.add(FAMILY, f"{dtype}.mtp.0")
    def case(rng):
        del rng
        hidden, found = run(dtype)[2][:, :MTP_TOKENS], {}
        ids = torch.from_numpy(tiny.prompt(TOKENS)[1 : MTP_TOKENS + 1])[None].long()
        inputs = {"tokens": to_numpy(ids[0]).astype(np.int32), "hidden": to_numpy(hidden[0].detach())}
        for name, kind in ((f"{dtype}.mtp.0", dtype), (f"{dtype}.truth.mtp.0", "float64")):
            models = model(kind), model(kind, mtp=True)
            with precision(kind):
                streams, y = mtp_block(*models, ids, hidden if kind == dtype else wide(hidden))
            outputs = {"streams": to_numpy(streams[0].detach()), "logits": to_numpy(y[0].detach())}
            data = CaseData(params("DeepseekV4DecoderLayer"), inputs, outputs)
            found[name] = data if dtype == "float32" else single(data)
        return found


def mtp_block(main, block, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams and logits of a block composed of the pieces of transformers' models."""
    stored = {n: x for n, k, x in tiny.tensors() for n, x in tiny.encoded(n, k, x, False) if n.startswith("mtp.0.")}
    w = {n.split(".")[2]: torch.from_numpy(x.astype(np.float32)) for n, x in stored.items() if n.count(".") == 3}
    positions, inner = torch.arange(ids.shape[1])[None], block.model

    def joined(norm, projection, x):
        made = modeling.DeepseekV4RMSNorm(x.shape[-1], tiny.CONFIG["rms_norm_eps"])
        made.weight.data = w[norm].double() if x.dtype == torch.float64 else w[norm]
        return torch.nn.functional.linear(made(x), w[projection].to(x.dtype))

    e = joined("enorm", "e_proj", torch.where((positions == 0)[..., None], 0, main.model.embed_tokens(ids)))
    mask = modeling.create_sliding_window_causal_mask(
        config=block.config, inputs_embeds=e, attention_mask=None, cache=None, position_ids=positions
    )
    angles = {k: inner.rotary_emb(e, position_ids=positions, layer_type=k) for k in ("main", "compress")}
    streams = inner.layers[0](
        joined("hnorm", "h_proj", hidden) + e[:, :, None],
        position_embeddings=angles,
        position_ids=positions,
        attention_mask=mask,
        input_ids=ids,
        cache=None,
    )
    return streams, main.lm_head(inner.norm(inner.hc_head(streams)))


for _dtype in ("float32", "bfloat16"):
    mtp(_dtype)


def here() -> Machine:
    """As of the torch captures."""
    transformers.logging.set_verbosity_error()
    return machine()


if __name__ == "__main__":
    sys.exit(_capture.main(RECIPES, "scripts/capture_deepseek_v4.py", here))

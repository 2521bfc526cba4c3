"""Our models in Hugging Face's format and back: GPT-2, Llama, Qwen2, Qwen3 and Mistral.

Both directions follow one table, `tensors`, so they cannot disagree. Needs safetensors only; transformers is not
imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwise.models.config import ModelConfig
from shardwise.models.huggingface_config import config_from_huggingface, config_to_huggingface
from shardwise.models.transformer import Transformer, build

SHARD_BYTES = 5_000_000_000


class Stored(NamedTuple):
    """One tensor of a Hugging Face checkpoint: its name, our parameters stacked in it along dim 0, and whether it is
    then transposed."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Every tensor of the checkpoint of a model with this config, in the order of the model."""
    if config.family == "gpt2":
        yield from _gpt2(config)
    else:
        yield from _llama(config)
    if not config.tied:
        yield Stored("lm_head.weight", ("head.output.weight",))


def _gpt2(config: ModelConfig) -> Iterator[Stored]:
    yield Stored("transformer.wte.weight", ("embedding.tokens.weight",))
    yield Stored("transformer.wpe.weight", ("embedding.positions.weight",))
    # GPT-2's matrices are of a layer that computes x W, so they are stored (in, out), with queries, keys and values
    # side by side.
    matrices = {
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.output",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
    }
    for index in range(config.layers):
        theirs, ours = f"transformer.h.{index}.", f"blocks.{index}."
        for name, module in (("ln_1", "attention_norm"), ("ln_2", "feed_forward_norm")):
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{module}.weight",))
            yield Stored(f"{theirs}{name}.bias", (f"{ours}{module}.bias",))
        for name, modules in matrices.items():
            yield Stored(
                f"{theirs}{name}.weight", tuple(f"{ours}{module}.weight" for module in modules), transposed=True
            )
            yield Stored(f"{theirs}{name}.bias", tuple(f"{ours}{module}.bias" for module in modules))
    yield Stored("transformer.ln_f.weight", ("head.norm.weight",))
    yield Stored("transformer.ln_f.bias", ("head.norm.bias",))


def _llama(config: ModelConfig) -> Iterator[Stored]:
    linears = {
        "self_attn.q_proj": ("attention.query", config.qkv_bias),
        "self_attn.k_proj": ("attention.key", config.qkv_bias),
        "self_attn.v_proj": ("attention.value", config.qkv_bias),
        "self_attn.o_proj": ("attention.output", config.bias),
        "mlp.gate_proj": ("feed_forward.gate", config.bias),
        "mlp.up_proj": ("feed_forward.up", config.bias),
        "mlp.down_proj": ("feed_forward.down", config.bias),
    }
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
    if config.query_key_norm:
        norms |= {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
    yield Stored("model.embed_tokens.weight", ("embedding.tokens.weight",))
    for index in range(config.layers):
        theirs, ours = f"model.layers.{index}.", f"blocks.{index}."
        for name, module in norms.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{module}.weight",))
        for name, (module, bias) in linears.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{module}.weight",))
            if bias:
                yield Stored(f"{theirs}{name}.bias", (f"{ours}{module}.bias",))
    yield Stored("model.norm.weight", ("head.norm.weight",))


def _stack(stored: Stored, state: Mapping[str, Tensor]) -> Tensor:
    """Their tensor from our parameters. Where ours have no bias and theirs always do, it is zero."""
    parts = []
    for name in stored.ours:
        if name in state:
            parts.append(state[name].detach())
        else:
            weight = state[name.removesuffix("bias") + "weight"]
            parts.append(weight.new_zeros(weight.shape[0]))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (whole.t() if stored.transposed else whole).contiguous()


def _split(stored: Stored, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Our parameters from their tensor.

    Raises:
        ValueError: its shape is not what the config says.
    """
    rows = [shapes[name][0] for name in stored.ours]
    wanted = [sum(rows), *shapes[stored.ours[0]][1:]]
    if stored.transposed:
        wanted.reverse()
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"{stored.name} has shape {list(tensor.shape)} and the config asks for {wanted}; "
            "take both from the same model"
        )
    whole = tensor.t() if stored.transposed else tensor
    return zip(stored.ours, torch.split(whole, rows), strict=True)


def _checked_names(names: Mapping[str, Any] | set[str], config: ModelConfig) -> dict[str, str]:
    """Names in `tensors` -> names in the checkpoint.

    Raises:
        ValueError: a tensor is missing, or there is one that the model has no place for.
    """
    # Checkpoints of the bare model lack the prefix; older ones carry causal masks and rotary frequencies, which are not
    # weights.
    prefix = "transformer." if config.family == "gpt2" else "model."
    found = {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: name
        for name in names
        if not re.search(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$", name)
    }
    if config.tied:
        found.pop("lm_head.weight", None)
    wanted = {stored.name for stored in tensors(config)}
    for problem, left in (("lacks", wanted - found.keys()), ("has unknown", found.keys() - wanted)):
        if left:
            listed = ", ".join(sorted(left)[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise ValueError(
                f"the checkpoint {problem} {listed}; "
                f"make it fit its config.json, which says family {config.family} and {config.layers} layers"
            )
    return found


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict from that of a transformers model; takes part of its memory, copies nothing.

    Args:
        state: of the causal language model, or of the bare model below it if the embedding is tied.
        config: as from `config_from_huggingface`.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    names = _checked_names(state, config)
    embedding = "transformer.wte.weight" if config.family == "gpt2" else "model.embed_tokens.weight"
    model = build(config, len(state[names[embedding]]))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    ours: dict[str, Tensor] = {}
    for stored in tensors(config):
        ours.update(_split(stored, state[names[stored.name]], shapes))
    if config.tied:
        ours["head.output.weight"] = ours["embedding.tokens.weight"]
    return ours


def to_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of a transformers model from ours.

    Args:
        state: all parameters by name; a tied output matrix may be left out.
        config: of the model.
    """
    return {stored.name: _stack(stored, state) for stored in tensors(config)}


@torch.no_grad()
def load_pretrained(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model from a Hugging Face folder (config.json and safetensors). One tensor at a time is held twice.

    Args:
        folder: local; nothing is downloaded.
        device, dtype: of the parameters, whatever they are stored in.

    Raises:
        ValueError: something is missing, damaged, or not a model of ours.
    """
    folder = Path(folder)
    hf = _read_json(folder / "config.json")
    config = config_from_huggingface(hf)
    model = build(config, config.vocabulary, "meta", dtype).to_empty(device=device)
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    with ExitStack() as stack:
        files = {}
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}; fetch it again") from None
            files.update(dict.fromkeys(handle.keys(), handle))
        names = _checked_names(files, config)
        for stored in tensors(config):
            name = names[stored.name]
            for ours, tensor in _split(stored, files[name].get_tensor(name), shapes):
                parameters[ours].copy_(tensor)
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path} cannot be read; give a folder in Hugging Face's format") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; fetch it again")
    return content


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / name for name in _read_json(index).get("weight_map", {}).values()})
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    raise ValueError(
        f"{folder} has no model.safetensors; save the model in that format (transformers: save_pretrained)"
    )


def save_pretrained(
    model: Transformer, folder: str | Path, *, end: int | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a folder that transformers' `from_pretrained` reads: config.json and safetensors in the parameters' dtype.

    Args:
        model: on any device.
        folder: made if need be.
        end: the token id that ends a text.
        shard_bytes: the largest file, unless one tensor is larger.

    Raises:
        ValueError: no architecture of transformers is the same model, or the folder already has one.
    """
    folder = Path(folder)
    dtype = model.embedding.tokens.weight.dtype
    hf = config_to_huggingface(model.config, model.vocabulary, end=end, dtype=dtype)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} already has a config.json; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(model.named_parameters())
    shards: list[list[Stored]] = [[]]
    filled = total = 0
    for stored in tensors(model.config):
        size = _num_bytes(stored, state)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(stored)
        filled, total = filled + size, total + size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({stored.name: _stack(stored, state).cpu() for stored in shard}, folder / name, {"format": "pt"})
        weight_map.update({stored.name: name for stored in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Last, so that a folder with a config has all of it.
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def _num_bytes(stored: Stored, state: Mapping[str, Tensor]) -> int:
    return sum(state[name].nbytes for name in stored.ours if name in state)

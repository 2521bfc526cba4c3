"""Text from a checkpoint, whatever layout wrote it, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from shardwise import config as configuration
from shardwise import models
from shardwise.corpus import Tokenizer, tokenizer
from shardwise.mesh import default_device_type
from shardwise.training import storage
from shardwise.training.checkpoints import facts_of, find
from shardwise.training.ranks import Ranks
from shardwise.training.storage import CheckpointError


class Trained(NamedTuple):
    """A model, its tokenizer, and the step its parameters are of."""

    model: models.Transformer
    tokenizer: Tokenizer
    step: int


def load(run: str | Path, step: int | None = None, device: str = "auto") -> Trained:
    """The model of a run, or of one of its checkpoints, in this process.

    Args:
        run: a run folder, or a checkpoint in one.
        step: of the checkpoint; None takes the newest one that is whole.
        device: "auto" takes the accelerator that torch finds.

    Raises:
        ValueError: there is no such device, run or checkpoint, or it is damaged.
    """
    target = _device(device)
    place = Path(run)
    checkpoint = find(place, _warn, step=step)
    folder = place if (place / "config.toml").exists() else checkpoint.parent.parent
    if not (folder / "config.toml").exists():
        raise CheckpointError(f"{place} is in no run folder: there is no {folder / 'config.toml'}; name the run folder")
    config = configuration.load(folder / "config.toml")
    words = tokenizer.from_folder(folder / "tokenizer")
    dtype = torch.float64 if config.plan.precision == "fp64" else torch.float32
    model = models.build(config.model, config.model.vocabulary or words.vocabulary, dtype=dtype)
    model.to_empty(device=target)
    load_parameters(model, checkpoint)
    return Trained(model.eval(), words, int(facts_of(checkpoint)["step"]))


def _device(name: str) -> str:
    if name == "auto":
        return default_device_type()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch without it, and a machine without it
        there = dict.fromkeys(("cpu", default_device_type()))
        raise ValueError(f"device = {name}: there is none here; choose {' or '.join(there)}, or auto") from None
    return name


def load_parameters(model: torch.nn.Module, checkpoint: Path) -> None:
    """Fills the parameters, and the buffers that belong to the state, of a whole model from a checkpoint.

    Raises:
        CheckpointError: a name or shape differs.
    """
    there = storage.metadata_of(checkpoint).state_dict_metadata
    state = {}
    # A parameter that several modules share has several names, and the checkpoint one of them.
    names: dict[int, list[str]] = {}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict(keep_vars=True)}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(f"model/{name}")
    for tied in names.values():
        key = next((name for name in tied if name in there), tied[0])
        state[key] = tensors[key.removeprefix("model/")].detach()
    storage.load(state, checkpoint, Ranks(), spare=("optimizer/", "step", "rng/", "loss_scale"))


def stream(
    trained: Trained,
    prompt: str = "",
    num_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Text that continues a prompt, in pieces, as it is drawn.

    Args:
        trained: of `load`.
        prompt: what the text starts with; empty starts a new document.
        num_tokens: at most.
        temperature, top_k, top_p, seed: see `models.generate`.
    """
    model, words, _ = trained
    # A document starts after the end of another one: so it was in training.
    start = [words.end, *words.encode(prompt)]
    tokens = models.generate(
        model,
        start,
        max_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end=words.end,
    )
    return words.decode_stream(tokens)


def show(run: str | Path, prompt: str = "", num_tokens: int = 256, console: Console | None = None) -> None:
    """Prints a sample of a run as it is drawn."""
    out = (console or Console()).file
    trained = load(run, device="cpu")
    print(f"\na sample of step {trained.step}:\n{prompt}", end="", file=out, flush=True)
    for piece in stream(trained, prompt, num_tokens):
        print(piece, end="", file=out, flush=True)
    print(file=out)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)

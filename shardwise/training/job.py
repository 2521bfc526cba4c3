"""From a configuration to a trainer: data, mesh, model, in the one order every rank follows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

from shardwise import models, optimizers
from shardwise.batch import Batch
from shardwise.config import Config
from shardwise.corpus import Corpus, Loader, prepare, progress_bar
from shardwise.memory.precision import PRECISIONS
from shardwise.mesh import Mesh, default_device_type
from shardwise.parallelize import parallelize
from shardwise.training.display import count
from shardwise.training.evaluation import HeldOut
from shardwise.training.placement import Placement
from shardwise.training.run_folder import RunFolder
from shardwise.training.signals import STOP
from shardwise.training.trainer import Trainer


def build(config: Config, run: Path | None, place: Placement) -> Trainer:
    """The trainer of a configuration on this rank, with torch.distributed initialised. Collective over the job.

    Args:
        config: everything.
        run: the run folder; None takes `train.run`, or a new one.
        place: which rank this process is.

    Raises:
        ValueError: the configuration does not fit the data or the machine.
    """
    device_type = _device_type(config.train.device)
    corpus = _corpus(config, place)
    vocabulary = config.model.vocabulary or corpus.vocabulary
    place.connect(device_type, config.train.timeout)
    mesh = Mesh(config.plan, device=device_type)
    parallel = parallelize(
        models.build(config.model, vocabulary),
        config.plan,
        optimizer=optimizers.build(config.optimizer),
        mesh=mesh,
        seed=config.train.seed,
        # An infinite bound clips nothing, and still lets a step whose gradients are not finite be seen and skipped.
        clip=config.train.clip or math.inf,
        example=_example(config, corpus),
    )
    loader = _loader(config, corpus, "train", parallel.data_rank, parallel.num_data_ranks)

    def keep_tokenizer(folder: RunFolder) -> None:
        folder.tokenizer.mkdir(exist_ok=True)
        corpus.tokenizer.save(folder.tokenizer)

    return Trainer(
        parallel,
        loader,
        run=run or "",
        lr=config.optimizer.lr,
        train=config.train,
        checkpoint=config.checkpoint,
        log=config.log,
        held_out=_held_out(config, corpus, parallel.data_rank, parallel.num_data_ranks),
        flops_per_target=models.flops_per_token(config.model, vocabulary, config.data.sequence),
        dtype=PRECISIONS[config.plan.precision].compute,
        device=mesh.device(),
        prefetch=config.data.prefetch,
        about=f"{config.plan.describe()}; {count(models.count_parameters(config.model, vocabulary))} parameters",
        settings=config.model_dump(mode="json", exclude_none=True),
        facts={"data": {"fingerprint": corpus.fingerprint}},
        on_start=keep_tokenizer,
        # Where our own launcher is the parent, SIGTERM means that another rank has failed.
        stop_signals=STOP[:1] if place.launched else STOP,
    )


def _device_type(wanted: str) -> str:
    if wanted == "auto":
        return default_device_type()
    if wanted not in {"cpu", default_device_type()}:
        raise ValueError(f'train.device: {wanted!r} is not here; use "auto", or "{default_device_type()}"')
    return wanted


def _corpus(config: Config, place: Placement) -> Corpus:
    # One process of each machine reads every byte to check it.
    data = config.data if place.local_rank == 0 else config.data.model_copy(update={"checksums": False})
    with progress_bar() if place.rank == 0 else nullcontext() as progress:
        return prepare(data, vocabulary=config.model.vocabulary, progress=progress)


def _loader(config: Config, corpus: Corpus, split: str, rank: int, num_ranks: int) -> Loader:
    data = config.data
    return Loader(corpus, split, data.sequence, data.batch, rank, num_ranks, data.seed, data.document_mask)


def _held_out(config: Config, corpus: Corpus, rank: int, num_ranks: int) -> HeldOut | None:
    text = corpus.held_out
    if config.data.held_out == 0 or text.num_tokens < 2:
        return None
    return HeldOut(_loader(config, corpus, "held_out", rank, num_ranks), text.bytes_per_token, text.compression)


def _example(config: Config, corpus: Corpus) -> Batch:
    """A microbatch, for plans that depend on what one costs."""
    rows = max(1, config.data.batch // (config.plan.data_parallel * config.plan.microbatches))
    return _loader(config, corpus, "train", 0, 1).at(0, batch=rows)

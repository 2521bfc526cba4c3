"""The commands. Each reads its arguments, calls one function, and says in a line what the user can mend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from shardwise import __version__
from shardwise.pipeline_parallel import commands
from shardwise.problems import Problem, ProblemError

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.config import Config

MISTAKE = 2  # exit status of what the user can mend
FAILURE = 1

app = typer.Typer(
    help="Train large neural networks over many devices: any layout, checked against one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that win over the file, such as plan.replicate=2. A bare word is a text.",
        show_default=False,
    ),
]


def main() -> NoReturn:
    """The program. Exits with 2 for what the user can mend, told in one line each, and with 1 for what failed."""
    try:
        status = app(standalone_mode=False)
    except TyperException as error:
        if error.format_message():  # empty where the help was shown instead
            _tell(f"{error.format_message()} (shardwise --help lists commands and options)")
        status = MISTAKE
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        sys.stdout = None  # the reader has gone: there is nobody to flush to
        status = FAILURE
    except ProblemError as error:
        for problem in error.problems:
            _tell(str(problem))
        status = MISTAKE
    except FileNotFoundError as error:
        _tell(f"{error.filename}: no such file; give a path that exists")
        status = MISTAKE
    except Exception as error:
        status = _failed(error)
    sys.exit(status or 0)


def _failed(error: Exception) -> int:
    """Tells an error that was meant for the user; any other is ours, and is raised on with its traceback."""
    from shardwise.training.faults import TrainingError, fault_of

    fault = fault_of(error, rank=0)
    if fault.kind != "told":
        raise error
    _tell(str(error) if isinstance(error, TrainingError) else fault.line)
    return MISTAKE if fault.asked else FAILURE


def _tell(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


def _console() -> Console:
    """Standard output; where it is no terminal there is no edge at which to wrap."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=10_000)


def _load(path: Path, overrides: list[str] | None) -> Config:
    from shardwise import config

    if "=" in path.name and not path.exists():
        raise config.ConfigError(
            [Problem(str(path), "is not a configuration file", "give CONFIG first, then overrides")]
        )
    return config.load(path, overrides or [])


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _keys(wanted: bool) -> None:
    if wanted:
        from shardwise import keys

        keys.show(_console())
        raise typer.Exit


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    keys: Annotated[
        bool,
        typer.Option(
            "--keys", callback=_keys, is_eager=True, help="Show every key of a CONFIG with its default, and exit."
        ),
    ] = False,
) -> None:
    """Train a model. Starts the plan's ranks on this machine, or joins those of torchrun or Slurm.

    A run folder that holds a checkpoint is continued. Ctrl-C saves and stops.

    Examples:

      shardwise train examples/quickstart.toml

      shardwise train job.toml plan.replicate=4 train.run=runs/mine

      torchrun --nproc-per-node 8 --no-python shardwise train job.toml
    """
    loaded = _load(config, overrides)
    from shardwise.training import launch

    launch.train(loaded)


@app.command()
def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps to compare.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print every comparison as JSON.")] = False,
    plant: Annotated[
        str,
        typer.Option(
            metavar="FAULT", help="Put a fault into the plan's run, to see it noticed: skip-reduction or stale-weights."
        ),
    ] = "",
) -> None:
    """Compare a plan with one device: loss, every gradient and every parameter. Exits with 1 on a mismatch.

    Both sides start from the same weights and train on the same random batches, dropout off: the plan on as many
    processes as it has ranks, in float64 unless plan.precision is a lower one, and the reference in one process with
    no technique.

    Examples:

      shardwise verify examples/quickstart.toml

      shardwise verify examples/quickstart.toml plan.pipeline=2 plan.schedule=zb-h1 --json

      shardwise verify examples/quickstart.toml --plant skip-reduction
    """
    loaded = _load(config, overrides)
    from shardwise import verify_command

    report = verify_command.run(verify_command.Request(loaded, steps, plant))
    if as_json:
        print(report.to_json())
    else:
        verify_command.show(report, _console())
    if not report.agrees:
        raise typer.Exit(FAILURE)


@app.command()
def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the shards go.", show_default="a folder in data.cache, where train finds it"),
    ] = None,
) -> None:
    """Tokenize a corpus to memory-mapped shards. A finished folder is checked and kept.

    Examples:

      shardwise prepare examples/quickstart.toml

      shardwise prepare job.toml data.source=texts/ data.vocabulary=32000
    """
    loaded = _load(config, overrides)
    from shardwise import corpus

    with corpus.progress_bar() as progress:
        made = corpus.prepare(loaded.data, folder, vocabulary=loaded.model.vocabulary, progress=progress)
    for split in (made.train, made.held_out):
        typer.echo(
            f"{split.name}: {split.num_tokens:,} tokens of {split.num_bytes:,} bytes "
            f"in {split.num_documents:,} documents"
        )
    typer.echo(f"vocabulary: {made.vocabulary:,}")
    typer.echo(f"folder: {made.folder}")


@app.command()
def generate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint in one.", show_default=False)
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What the text starts with.", show_default="a new document")
    ] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="How many tokens to draw at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest tokens; 0 among all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the fewest tokens that have this probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step.", show_default="the newest")] = None,
    device: Annotated[str, typer.Option(help="auto takes the accelerator that torch finds.")] = "auto",
) -> None:
    """Stream text from a checkpoint, whatever layout wrote it.

    Examples:

      shardwise generate runs/mine --prompt "def main("

      shardwise generate runs/mine --tokens 500 --temperature 0.5 --seed 7
    """
    from shardwise.training import generate as sampling

    trained = sampling.load(run, step, device)
    print(prompt, end="", flush=True)
    for piece in sampling.stream(trained, prompt, tokens, temperature, top_k, top_p, seed):
        print(piece, end="", flush=True)
    print()


@app.command()
def doctor(
    out: Annotated[
        Path | None,
        typer.Option(help="Where the hardware file goes.", show_default="where every command looks for it"),
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure the disk of this folder.", show_default="this folder")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's content instead of tables.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, disk, and collectives between two ranks. Half a minute, on an
    otherwise idle machine.

    Writes a hardware file to ~/.cache/shardwise/hardware.json (in XDG_CACHE_HOME where that is set). Jobs look for it
    there, and make every collective in the way that was quickest; rank 0's file counts.

    Examples:

      shardwise doctor

      shardwise doctor --json --out node.json --disk /scratch
    """
    from rich.console import Console

    from shardwise.choices import hardware_file
    from shardwise.foresight import doctor as doctors

    path = out or hardware_file()
    if path.is_dir() or (out is not None and not out.parent.is_dir()):
        reason = "is a folder" if path.is_dir() else f"its folder {path.parent} does not exist"
        raise ProblemError([Problem(f"--out {path}", reason, "give a file in a folder that exists")])
    if disk is not None and not disk.is_dir():
        raise ProblemError([Problem(f"--disk {disk}", "is no folder", "give the folder whose disk is to be measured")])
    console = Console(stderr=True)
    with console.status("") as status:
        found = doctors.measure(disk or Path(), lambda what: status.update(f"measuring {what}"))
    found.save(path)
    if as_json:
        print(found.to_json())
    else:
        doctors.show(found, _console())
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


app.command("schedule")(commands.schedule)

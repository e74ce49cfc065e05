"""The commands `whorl list`, `pull`, `rm`, `show` and `ps`: the models of this machine, and what a server runs."""

from typing import Annotated

import typer

from whorl.options import Json, Model, exit_on_bad_usage, need_engine, need_torch, print_json

commands = typer.Typer()


@commands.command("list")
def list_models() -> None:
    """List the models of this machine: the default one and those of the Hugging Face cache."""
    need_engine("list")
    from . import models

    print(models.listed())


@commands.command()
def pull(model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id.")]) -> None:
    """Download a model from the Hugging Face hub, and say where it lies."""
    need_torch()
    need_engine("pull")
    with exit_on_bad_usage():
        from . import models

        print(models.pull(model))


@commands.command("rm")
def remove(model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id.")]) -> None:
    """Delete a model from the Hugging Face cache."""
    need_engine("rm")
    with exit_on_bad_usage():
        from . import models

        print(models.remove(model))


@commands.command()
def show(model: Model = None, as_json: Json = False) -> None:
    """Describe a model from its files: architecture, sizes, quantization, template, sampling."""
    need_torch()
    need_engine("show")
    with exit_on_bad_usage():
        from . import models

        about = models.shown(model)
    if as_json:
        print_json(about)
    else:
        print(models.as_table(about))


@commands.command("ps")
def running(
    url: Annotated[str, typer.Option(help="The server; WHORL_API_KEY has its key.")] = "http://127.0.0.1:8000",
) -> None:
    """Say what a server runs."""
    with exit_on_bad_usage():
        from . import models

        print(models.running(url.rstrip("/")))

"""The command tree: one thin function a command, in a module named like it."""

from __future__ import annotations

import typer

from kda2.cli import ledger, profile, records, spec, tune
from kda2.cli.ablate import ablate
from kda2.cli.audit import audit
from kda2.cli.bench import bench
from kda2.cli.capture import capture
from kda2.cli.doctor import doctor
from kda2.cli.growth import growth
from kda2.cli.plan import plan
from kda2.cli.run import run
from kda2.cli.sweep import sweep
from kda2.cli.verify import verify

app = typer.Typer(
    name="kda2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Kimi Delta Attention kernels: verify, inspect, measure. Exit codes: 0 all well; 1 a verdict or check failed; "
    "2 bad usage or input; 3 an optional package is missing; 130 stopped.",
)
app.command()(plan)
app.command()(run)
app.command()(verify)
app.command()(audit)
app.command()(sweep)
app.command()(growth)
app.command()(capture)
app.command()(bench)
app.command()(doctor)
profile.app.command()(ablate)
app.add_typer(profile.app, name="profile")
app.add_typer(ledger.app, name="ledger")
app.add_typer(tune.app, name="tune")
app.add_typer(spec.app, name="spec")
app.add_typer(records.app, name="records")

"""`thinwire plan`: will compression pay, from numbers."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.parsing import Commands, complain

if TYPE_CHECKING:
    from thinwire.plan.predict import Setting
    from thinwire.plan.sizes import Model
    from thinwire.policies.codecs import CodecTable

_DESCRIPTION = """\
Predict, without training anything, what a step would take with each method on
your hosts and links, and say which to use.
"""
_EPILOG = """\
examples:
  thinwire plan --parameters 125M --hosts 16 --ranks-per-host 8 \\
                --link 10gbit --delay 1ms --step 0.8s
  thinwire plan --layers model.safetensors --hosts 4 --link 100mbit --step 300ms
  thinwire plan --script train.py --hosts 4 --link 1gbit -- --epochs 1
  thinwire plan --workload text --hosts 4 --link 100mbit
  thinwire plan --parameters 1G --step 2s --html plan.html

Codecs are reckoned with what was measured on this machine, if you have run
thinwire bench --for-plan, or with one of the tables that --machine names.
docs/plan.md says how the figures come about and how far they can be trusted.
"""
_HOSTS, _LINK = 4, "1gbit"
_PATIENCE = 120.0
# Elements from which on a prediction takes long enough to say so, and that it can be asked of.
_LARGE, _MOST = 10**11, 10**13


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict whether compression pays",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    model = parser.add_argument_group("the model, one of")
    model.add_argument("--parameters", metavar="N", help="how many, such as 125M")
    model.add_argument(
        "--layers",
        metavar="FILE",
        type=Path,
        help="a .safetensors file, its index or a folder with one: sizes of tensors are read",
    )
    model.add_argument(
        "--script",
        metavar="FILE.py",
        type=Path,
        help="a training script: some steps are run here, alone, to see its layers and its step",
    )
    model.add_argument(
        "--workload", metavar="SPEC", help="images or text, measured here in the same way"
    )
    model.add_argument("arguments", nargs="*", help="of the script, after --")
    place = parser.add_argument_group("hosts and links")
    place.add_argument("--hosts", metavar="N", type=int, default=_HOSTS, help=f"default: {_HOSTS}")
    place.add_argument(
        "--ranks-per-host", metavar="N", type=int, default=1, help="that share its link; default: 1"
    )
    place.add_argument(
        "--link", metavar="RATE", default=_LINK, help=f"of each host; default: {_LINK}"
    )
    place.add_argument(
        "--delay", metavar="TIME", default="0ms", help="between two hosts, one way: 15ms"
    )
    place.add_argument("--racks", metavar="N", type=int, default=1, help="of equally many hosts")
    place.add_argument("--inter", metavar="RATE", help="of the link between a rack and the rest")
    place.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="of plain PyTorch: gloo's rings (measured) or trees as NCCL has them (not measured)",
    )
    how = parser.add_argument_group("training")
    how.add_argument(
        "--step", metavar="TIME", help="computing of one step, without any exchange: 0.8s"
    )
    how.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="default: ddp")
    how.add_argument("--weights", metavar="SPEC", help="of fsdp: compressor of parameters")
    how.add_argument(
        "--nodes", action="store_true", help="sum inside of hosts first (attach(nodes=...))"
    )
    how.add_argument("--optimizer", choices=("adam", "sgd"), help="for the advice")
    how.add_argument(
        "--with", dest="methods", metavar="METHODS", help="separated by ';' instead of the usual"
    )
    how.add_argument(
        "--machine",
        metavar="NAME",
        help="table of codecs: cores-1, cores-2, cores-16, gpu, here, or a file; default: here if "
        "measured, else cores-2",
    )
    how.add_argument(
        "--shared-cores",
        metavar="N",
        type=int,
        help="all ranks share so many cores, as the hosts of a lab do",
    )
    how.add_argument(
        "--price",
        metavar="DOLLARS",
        type=float,
        help="of a gigabyte that leaves a host; default: 0.02",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print a JSON document")
    output.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with sliders to play with"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.plan.document import document_of, tables_of
    from thinwire.plan.predict import METHODS, advice, predict, read_method

    try:
        table = _table(arguments)
        _check_model(arguments)
        texts = METHODS if arguments.methods is None else _words(arguments.methods)
        methods = [read_method(text) for text in texts]
        if arguments.parallel == "fsdp" and arguments.methods is None:
            methods = [each for each in methods if not each.every and not _is_joint(each)]
        setting = _setting(arguments, table)
        if arguments.html is not None:
            _write_page(arguments.html, setting, methods)
        if setting.model.parameters > _LARGE:
            print("predicting, every bucket of it ...", file=sys.stderr, flush=True)
        predictions = predict(methods, setting)
        document = document_of(predictions, setting, _asked(arguments))
    except (OSError, TypeError, ValueError) as error:
        return complain("plan", error)
    if arguments.json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return 0
    _print_wrapped(_title(setting))
    print()
    print(tables_of(predictions))
    print()
    _print_wrapped(advice(predictions, arguments.optimizer, setting))
    _print_wrapped(f"Codecs: {table.name}, {table.machine} ({table.origin}).")
    return 0


def _table(arguments: argparse.Namespace) -> "CodecTable":
    from thinwire.policies.codecs import table_of

    table = table_of(arguments.machine)
    if arguments.shared_cores is None:
        return table
    if arguments.shared_cores < 1:
        raise ValueError(f"--shared-cores must be at least 1, got {arguments.shared_cores}")
    return table.shared(arguments.hosts * arguments.ranks_per_host, arguments.shared_cores)


def _check_model(arguments: argparse.Namespace) -> None:
    """Refuse more than one model or none, and what does not go with it."""
    names = ("parameters", "layers", "script", "workload")
    given = [name for name in names if getattr(arguments, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none"
        raise ValueError(f"give one of {', '.join(f'--{n}' for n in names)}, got {found}")
    if arguments.arguments and arguments.script is None:
        raise ValueError(f"unexpected {arguments.arguments[0]!r}: only --script takes arguments")
    if arguments.script is not None and not arguments.script.is_file():
        raise ValueError(f"--script: {arguments.script} is no file")


def _model(arguments: argparse.Namespace) -> "tuple[Model, float | None]":
    """The model, and its step if that was measured."""
    from thinwire.formatting import read_count
    from thinwire.plan.sizes import UniformModel, read_layers

    if arguments.parameters is not None:
        count = read_count(arguments.parameters)
        if not 1 <= count <= _MOST:
            raise ValueError(
                f"--parameters must be at least 1 and at most {_MOST // 10**9}G, got "
                f"{arguments.parameters}"
            )
        return UniformModel(count), None
    if arguments.layers is not None:
        return read_layers(arguments.layers), None
    from thinwire.bench.profile import profile_script, profile_workload

    print("measuring a step on this machine, alone ...", file=sys.stderr, flush=True)
    if arguments.workload is not None:
        profile = profile_workload(arguments.workload)
    else:
        profile = profile_script(arguments.script, arguments.arguments, _PATIENCE)
    return profile.model, profile.seconds


def _setting(arguments: argparse.Namespace, table: "CodecTable") -> "Setting":
    """What was asked for; the model comes last, as it may have to be measured."""
    from thinwire.collectives.costs import Interconnect
    from thinwire.compressors import JointCompressor, compressor_of
    from thinwire.plan.predict import PRICE, Setting
    from thinwire.plan.words import read_rate, read_seconds

    for name in ("hosts", "ranks_per_host", "racks"):
        value = getattr(arguments, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.hosts % arguments.racks:
        raise ValueError(
            f"--racks must divide the hosts evenly, got {arguments.racks} for {arguments.hosts}"
        )
    if (arguments.inter is not None) != (arguments.racks > 1):
        raise ValueError("--racks and --inter belong together: give both or none")
    if arguments.weights is not None and arguments.parallel != "fsdp":
        raise ValueError("--weights is for --parallel fsdp")
    if arguments.nodes and arguments.parallel == "fsdp":
        raise ValueError(
            "--nodes is for --parallel ddp: gradients of fsdp are scattered, not averaged on all "
            "ranks, and attach(nodes=...) refuses them"
        )
    weights = None if arguments.weights is None else compressor_of(arguments.weights)
    if isinstance(weights, JointCompressor):
        raise ValueError(
            f"{weights} does not go with --weights: give a compressor that each rank applies by "
            "itself, such as quantize:8"
        )
    step = None if arguments.step is None else read_seconds(arguments.step)
    measures = arguments.script is not None or arguments.workload is not None
    if step == 0 or (step is None and not measures):
        raise ValueError("--step must say how long a step computes, such as 0.8s")
    if arguments.price is not None and not 0 <= arguments.price < math.inf:
        raise ValueError(f"--price must be a finite number from 0, got {arguments.price}")
    network = Interconnect(
        hosts=arguments.hosts,
        rate=read_rate(arguments.link) / 8,
        ranks_per_host=arguments.ranks_per_host,
        delay=read_seconds(arguments.delay),
        racks=arguments.racks,
        uplink=read_rate(arguments.inter) / 8 if arguments.inter else float("inf"),
        inside=table.inside,
        start=table.start,
        peer=table.peer,
        trees=arguments.backend == "nccl",
        meeting=table.meeting,
    )
    model, measured = _model(arguments)
    seconds = measured if step is None else step
    assert seconds
    return Setting(
        model,
        network,
        table,
        seconds,
        arguments.parallel,
        arguments.nodes,
        weights,
        price=PRICE if arguments.price is None else arguments.price,
    )


def _is_joint(method: Any) -> bool:
    from thinwire.compressors import JointCompressor

    return isinstance(method.compressor, JointCompressor)


def _words(text: str) -> list[str]:
    from thinwire.spec import split

    found = [part.strip() for part in split(text, ";") if part.strip()]
    if not found:
        raise ValueError("--with names no method")
    return found


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    left_out = ("run", "argv", "version", "json")
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in left_out
    }


def _title(setting: "Setting") -> str:
    from thinwire.formatting import plural, show_count, show_rate, show_seconds

    network = setting.network
    words = [
        f"{show_count(setting.model.parameters)} parameters",
        f"{plural(network.hosts, 'host')} of {plural(network.ranks_per_host, 'rank')}",
        show_rate(8 * network.rate),
        f"{show_seconds(network.delay)} one way",
        f"{show_seconds(setting.compute)} of computing",
    ]
    if network.racks > 1:
        words.insert(3, f"{network.racks} racks with {show_rate(8 * network.uplink)} between")
    return ", ".join(words)


def _print_wrapped(text: str) -> None:
    import textwrap

    from thinwire.formatting import WIDTH

    print(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _write_page(path: Path, setting: "Setting", methods: "list[Any]") -> None:
    from thinwire.report.plan_page import write_plan_page

    write_plan_page(path, setting, methods)
    print(f"wrote {path}", file=sys.stderr)

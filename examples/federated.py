"""Federated learning: ten clients with uneven data, three of which train in each round.

    python examples/federated.py
    python examples/federated.py --compressor "topk:0.03,chunk=4096|twobit"
    python examples/federated.py --out accuracy.png     needs pip install 'thinwire[plot]'
    python examples/federated.py --flower               needs pip install 'flwr[simulation]'

Tells clothes apart with a small convolutional network (both ship with thinwire), without and with
compression: accuracy against the megabytes that clients upload. The loop is federated averaging in
plain Python, with nothing but `tw.numpy.encode` and `tw.decode`. `--flower` runs the same clients
in Flower's simulation, where compression is one line on each side.
"""

# pyright: reportMissingImports=false
# Flower is only needed for --flower.
import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import thinwire as tw
from thinwire.workloads import Images

Arrays = dict[str, Tensor]
Choose = Callable[[str], str]  # a compressor for the name of an array


class Round(NamedTuple):
    """Where a training is after a round."""

    number: int
    accuracy: float  # of the server's model, in percent
    megabytes: float  # that all clients have uploaded so far


class Clients:
    """Everybody's pictures, and how a client trains. A client is a number.

    Each class is dealt out by a Dirichlet distribution: the smaller its parameter, the fewer
    clients hold most of it. So clients have pictures of few classes, and some many more than
    others.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.task = (
            options,
            Images(batch_size=16, width=options.width, hidden=options.hidden),
        )
        self.inputs, self.labels = self.task.epoch(torch.Generator())
        self.shapes = {name: array.shape for name, array in self.task.model().state_dict().items()}
        torch.manual_seed(options.seed)
        shares = torch.distributions.Dirichlet(torch.full((options.clients,), options.skew))
        self.holds: list[list[int]] = [[] for _ in range(options.clients)]
        for label in self.labels.unique():
            pictures = (self.labels == label).nonzero().flatten()
            edges = (shares.sample().cumsum(0)[:-1] * len(pictures)).long().tolist()
            for held, part in zip(self.holds, pictures.tensor_split(edges), strict=True):
                held += part.tolist()

    def train(self, client: int, number: int, arrays: Arrays) -> Arrays:
        """What a client makes of the server's model; in the second half with smaller steps."""
        model = self.task.model()
        model.load_state_dict(arrays)
        left = 1 - (number - 1) / self.options.rounds
        optimizer = torch.optim.SGD(model.parameters(), lr=self.options.lr * min(1.0, 2 * left))
        held = torch.tensor(self.holds[client])
        generator = torch.Generator().manual_seed(1000 * number + client)
        for _ in range(self.options.steps):
            chosen = held[torch.randint(len(held), (self.task.batch_size,), generator=generator)]
            optimizer.zero_grad()
            self.task.loss(model, (self.inputs[chosen], self.labels[chosen])).backward()
            optimizer.step()
        return dict(model.state_dict())

    def accuracy(self, arrays: Arrays) -> float:
        model = self.task.model()
        model.load_state_dict(arrays)
        return self.task.evaluate(model)

    def compressor(self, name: str) -> str:
        """For an array: small matrices are worth more bits, vectors are sent as they are."""
        shape = self.shapes[name]
        if len(shape) < 2 or shape.numel() < 1024:
            return "none"
        large = shape.numel() >= 10_000
        return str(self.options.compressor if large else self.options.small)


def upload(
    new: Arrays, old: Arrays, residuals: dict[str, Any], choose: Choose, decay: float
) -> dict[str, bytes]:
    """What a client sends: a frame of each array's difference to the one that it received.

    What the compressor leaves out stays with the client, in `residuals`, and is added when it takes
    part again.
    """
    frames = {}
    for name, array in new.items():
        difference = (array - old[name]).numpy()
        residual = residuals.setdefault(name, np.zeros_like(difference))
        residual *= decay
        frames[name] = tw.numpy.encode(difference, choose(name), residual=residual)
    return frames


def plain_loop(clients: Clients, choose: Choose) -> Iterator[Round]:
    """Federated averaging: each client counts by the number of its pictures."""
    options = clients.options
    arrays: Arrays = dict(clients.task.model(options.seed).state_dict())
    residuals: list[dict[str, Any]] = [{} for _ in range(options.clients)]
    sampler, uploaded = random.Random(options.seed), 0
    for number in range(1, options.rounds + 1):
        sampled = sampler.sample(range(options.clients), options.sampled)
        total = sum(len(clients.holds[client]) for client in sampled)
        means = {name: torch.zeros_like(array) for name, array in arrays.items()}
        for client in sampled:
            new = clients.train(client, number, arrays)
            frames = upload(new, arrays, residuals[client], choose, options.decay)
            uploaded += sum(map(len, frames.values()))
            for name, mean in means.items():  # strangers' frames may not claim more elements
                difference = tw.decode(frames[name], max_numel=mean.numel())
                mean.add_(difference, alpha=len(clients.holds[client]) / total)
        arrays = {name: array + means[name] for name, array in arrays.items()}
        if number % options.every == 0 or number == options.rounds:
            yield Round(number, clients.accuracy(arrays), uploaded / 1e6)


def flower_loop(clients: Clients, choose: Choose) -> Iterator[Round]:
    """The same in Flower's simulation, which samples clients by itself."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    options, found = clients.options, list[Round]()
    compression = tw.flower.Compression(
        {name: choose(name) for name in clients.shapes}.get, decay=options.decay
    )
    client_app, server_app = ClientApp(mods=[compression]), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        own = Clients(options)  # this runs in another process
        client = int(context.node_config["partition-id"])
        number = message.content["config"]["server-round"]
        new = own.train(client, number, message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"num-examples": len(own.holds[client])})
        content = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        return Message(content, reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        share = options.sampled / options.clients
        inside = FedAvg(share, 0.0, min_train_nodes=options.sampled)
        strategy = tw.flower.Compressed(inside)

        def evaluate(number: int, arrays: Any) -> None:
            if number and (number % options.every == 0 or number == options.rounds):
                accuracy = clients.accuracy(arrays.to_torch_state_dict())
                found.append(Round(number, accuracy, strategy.total.num_bytes / 1e6))

        initial = ArrayRecord(clients.task.model(options.seed).state_dict())
        strategy.start(grid, initial, num_rounds=options.rounds, evaluate_fn=evaluate)

    resources = {"client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, options.clients, backend_config=resources)
    yield from found


def draw(curves: dict[str, list[Round]], path: Path) -> None:
    """Accuracy against megabytes, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for label, rounds in curves.items():
        axes.plot([r.megabytes for r in rounds], [r.accuracy for r in rounds], "o-", label=label)
    axes.set(xscale="log", xlabel="MB uploaded by all clients", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--compressor", default="topk:0.02|onebit", help="of large matrices")
    found.add_argument("--small", default="quantize:4", help="compressor of small matrices")
    found.add_argument("--decay", type=float, default=1.0, help="of what a client left out before")
    found.add_argument("--rounds", type=int, default=120)
    found.add_argument("--clients", type=int, default=10)
    found.add_argument("--sampled", type=int, default=3, help="clients in each round")
    found.add_argument("--steps", type=int, default=10, help="of a client in a round")
    found.add_argument("--lr", type=float, default=0.1, help="learning rate of the clients")
    found.add_argument("--skew", type=float, default=0.5, help="the smaller, the more uneven")
    found.add_argument("--width", type=int, default=8, help="of the network's convolutions")
    found.add_argument("--hidden", type=int, default=256, help="units of its hidden layer")
    found.add_argument("--every", type=int, default=20, help="rounds between two tests")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--flower", action="store_true", help="in Flower's simulation")
    found.add_argument("--out", type=Path, help="draw accuracy against megabytes as a picture")
    return found


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    clients = Clients(options)
    loop = flower_loop if options.flower else plain_loop
    print("pictures of each client:", *map(len, clients.holds))
    curves: dict[str, list[Round]] = {}
    choices: dict[str, Choose] = {
        "uncompressed": lambda name: "none",
        options.compressor: clients.compressor,
    }
    for label, choose in choices.items():
        print(label)
        curves[label] = []
        for found in loop(clients, choose):
            curves[label].append(found)
            print(
                f"  round {found.number}: {found.accuracy:.1f} % right, "
                f"{found.megabytes:.3f} MB uploaded",
                flush=True,
            )
    before, after = (rounds[-1] for rounds in curves.values())
    print(
        f"{before.megabytes / after.megabytes:.0f} times fewer bytes, "
        f"{after.accuracy - before.accuracy:+.1f} points of accuracy"
    )
    if options.out:
        draw(curves, options.out)


if __name__ == "__main__":
    main()

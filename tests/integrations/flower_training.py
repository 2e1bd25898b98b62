"""Two rounds of three Flower clients, each of whose updates is known; run, a simulation.

The server writes what it has in the end where THINWIRE_OUT says.
"""

import json
import os
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import thinwire as tw

CLIENTS, ROUNDS = 3, 2
SHAPE = (32, 64)
EXAMPLES = (1, 2, 5)  # their sum is a power of two, so that all sums here are exact

client_app = ClientApp(mods=[tw.flower.Compression("topk:0.25")])
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Each client moves all weights by the same amounts in every round.

    So a client that forgets what it left out sends the same quarter of them each time.
    """
    part = int(context.node_config["partition-id"])
    weights = message.content["arrays"]["weights"].numpy()
    step = np.random.default_rng(part).permutation(weights.size).reshape(SHAPE) + 1
    weights += (step / 4096).astype(np.float32)
    content = {
        "arrays": ArrayRecord({"weights": Array(weights)}),
        "metrics": MetricRecord({"num-examples": EXAMPLES[part]}),
    }
    return Message(RecordDict(content), reply_to=message)


def strategy() -> tw.flower.Compressed:
    return tw.flower.Compressed(
        FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    )


def start(grid: Grid) -> dict[str, object]:
    """What the server has in the end."""
    server = strategy()
    initial = ArrayRecord({"weights": Array(np.zeros(SHAPE, np.float32))})
    result = server.start(grid, initial, num_rounds=ROUNDS)
    return {
        "weights": result.arrays["weights"].numpy().tolist(),
        "uploads": [str(upload) for upload in server.uploads.values()],
        "replies": server.total.compressed,
    }


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    path = Path(os.environ["THINWIRE_OUT"])
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps(start(grid)))
    partly.replace(path)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(
        server_app,
        client_app,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1}},
    )

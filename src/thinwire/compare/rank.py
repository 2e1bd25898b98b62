"""What runs on every host: python -m thinwire.compare.rank JOBS.json

Trains one job after the other and tells events. A failure ends the process: the state of the others
is unknown then, and who started this starts anew behind the job that failed.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from thinwire.compare.events import tell
from thinwire.compare.settings import START_SECONDS


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text(encoding="utf-8"))
    patience = jobs["patience"]

    def alive(more: float = 0.0) -> None:
        # In C, with a thread of its own: it fires also when torch never comes back.
        faulthandler.dump_traceback_later(patience + more, exit=True)

    alive(START_SECONDS)
    import torch
    import torch.distributed as dist

    from thinwire.compare.method import read
    from thinwire.compare.train import Training
    from thinwire.workloads import workload

    torch.set_num_threads(jobs["threads"])
    dist.init_process_group("gloo")
    task = workload(jobs["workload"])
    for job in jobs["jobs"]:
        if dist.get_rank() == 0:
            tell("begin", job=job["number"])
        training = Training(task, read(job["method"]), {**jobs, **job}, alive)
        found: dict[str, Any] = training.probe(job["probe"]) if job.get("probe") else training.run()
        tell("end", job=job["number"], rank=dist.get_rank(), found=found)
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

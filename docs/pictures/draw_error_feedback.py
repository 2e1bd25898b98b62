"""Draw the pictures of docs/explanation/error-feedback.md.

    python docs/pictures/draw_error_feedback.py

Everything in them is computed by thinwire's own compressors, from fixed seeds.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

import thinwire as tw

HERE = Path(__file__).parent
DENSE, WITH, WITHOUT = "#4d4d4d", "#0072b2", "#d55e00"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams["savefig.bbox"] = "tight"


def save(figure, name):
    figure.savefig(HERE / f"{name}.png", dpi=110, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def sums(feedback: bool, steps: int = 40) -> torch.Tensor:
    """What has arrived of each of four elements; the gradient is the same in all steps."""
    gradient = torch.tensor([1.0, 0.5, 0.25, 0.125])
    residual = torch.zeros(4)
    arrived, rows = torch.zeros(4), []
    compressor = tw.TopK(0.25)  # one of four
    for _ in range(steps):
        payload = compressor.encode(gradient, residual=residual if feedback else None)
        arrived = arrived + tw.decode(tw.pack(payload))
        rows.append(arrived)
    return torch.stack(rows)


def delayed() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 2.7), sharey=True)
    steps = torch.arange(1, 41)
    for axis, feedback in zip(axes, (False, True), strict=True):
        found = sums(feedback)
        for i, size in enumerate((1.0, 0.5, 0.25, 0.125)):
            axis.plot(steps, size * steps, color=DENSE, lw=0.8, ls=":")
            axis.step(steps, found[:, i], where="post", lw=1.4, color=WITH if feedback else WITHOUT)
            axis.text(40.5, float(size * 40), f"{size:g}", va="center", fontsize=7, color=DENSE)
        axis.set_title("with a residual" if feedback else "without", loc="left", fontsize=9)
        axis.set_xlabel("step")
    axes[0].set_ylabel("sum of what has arrived")
    save(figure, "error-feedback-delay")


def descent(mode: str, steps: int = 600, ranks: int = 4) -> list[float]:
    """How far the loss of a least-squares problem is from its least value.

    Each rank has data of its own, which asks for other parameters, and sends 5 % of its gradient.
    """
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(100, 200, generator=generator) / 20 for _ in range(ranks)]
    common = torch.randn(200, generator=generator)
    targets = [a @ (common + torch.randn(200, generator=generator)) for a in data]
    a, target = torch.cat(data), torch.cat(targets)
    least = (a @ torch.linalg.lstsq(a, target[:, None]).solution[:, 0] - target).square().sum()
    x, residuals = torch.zeros(200), [torch.zeros(200) for _ in data]
    compressor, found = tw.TopK(0.05), []
    for _ in range(steps):
        found.append(0.5 * float((a @ x - target).square().sum() - least))
        mean = torch.zeros(200)
        for own, wanted, residual in zip(data, targets, residuals, strict=True):
            gradient = own.T @ (own @ x - wanted)
            if mode != "dense":
                keep = residual if mode == "ef" else None
                gradient = tw.decode(tw.pack(compressor.encode(gradient, residual=keep)))
            mean += gradient / ranks
        x = x - 0.1 * mean
    return found


def losses() -> None:
    figure, axis = plt.subplots(figsize=(5.6, 2.9))
    for mode, colour, name in (
        ("dense", DENSE, "everything sent"),
        ("ef", WITH, "5 %, with residuals"),
        ("none", WITHOUT, "5 %, without"),
    ):
        found = descent(mode)
        axis.plot(found, color=colour, label=name, lw=1.4)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, above its least")
    axis.legend(frameon=False)
    save(figure, "error-feedback-loss")


def adam() -> None:
    """One element with a gradient of 0.1 in each step, sent every tenth step as 1."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 2.5))
    steps = 100
    for name, colour, sent in (
        ("every step", DENSE, [0.1] * steps),
        ("one step in ten", WITHOUT, [1.0 if i % 10 == 9 else 0.0 for i in range(steps)]),
    ):
        p = torch.zeros(1, requires_grad=True)
        sgd = torch.zeros(1, requires_grad=True)
        adam, plain = torch.optim.Adam([p], lr=0.01), torch.optim.SGD([sgd], lr=0.1)
        moved, plainly = [], []
        for value in sent:
            p.grad, sgd.grad = torch.tensor([value]), torch.tensor([value])
            adam.step()
            plain.step()
            moved.append(-p.item())
            plainly.append(-sgd.item())
        axes[0].plot(plainly, color=colour, lw=1.4, label=name)
        axes[1].plot(moved, color=colour, lw=1.4, label=name)
    for axis, title in zip(axes, ("SGD", "Adam"), strict=True):
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel("step")
    axes[0].set_ylabel("how far the parameter has moved")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "error-feedback-adam")


if __name__ == "__main__":
    delayed()
    losses()
    adam()

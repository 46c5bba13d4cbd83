"""Reinforcement learning as people have it: REINFORCE on a walk along a line, in plain torch. It knows nothing of us.

python examples/relay_rl.py --out out                    from the beginning
python examples/relay_rl.py --out out --from out/step-40.pt
dalsegno relay deploy/relay/any-rl.yaml                  one pod after another

Everything that the next episode depends on is in what it saves, so a run that goes on makes the same episodes. It saves
every ``--save-every`` episodes; on SIGUSR1 it saves, too, and ends. Each save appears under its name when it is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

# A walk begins in the middle of so many places, and is rewarded at the right end.
PLACES, MOST_MOVES = 11, 40


class Policy(nn.Module):
    """The logits of going left and right, from a place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(PLACES, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, place: Tensor) -> Tensor:
        found: Tensor = self.net(nn.functional.one_hot(place, PLACES).float())
        return found


def episode(policy: Policy, generator: torch.Generator) -> tuple[Tensor, float]:
    """One walk. Returns the sum of its moves' log-probabilities, and its reward."""
    place, logs = PLACES // 2, []
    for moves in range(1, MOST_MOVES + 1):
        odds = policy(torch.tensor(place)).log_softmax(-1)
        move = int(torch.multinomial(odds.exp(), 1, generator=generator))
        logs.append(odds[move])
        place += 2 * move - 1
        if place in (0, PLACES - 1):
            return torch.stack(logs).sum(), 1.0 - moves / MOST_MOVES if place else -1.0
    return torch.stack(logs).sum(), 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="REINFORCE that knows nothing of us.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", dest="begin", default="", help="a file that it has saved, or a directory of them")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--metrics", type=Path, help="a line for each episode: step and mean reward")
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds of an episode")
    flags = parser.parse_args()
    torch.manual_seed(0)
    policy, generator = Policy(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    done, mean, asked = 0, 0.0, False

    def ask(*_: Any) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, ask)
    if (begin := newest(flags.begin)) is not None:
        held = torch.load(begin, weights_only=True)
        policy.load_state_dict(held["policy"])
        optimizer.load_state_dict(held["optimizer"])
        generator.set_state(held["generator"])
        done, mean = held["step"], held["mean"]

    def save() -> None:
        flags.out.mkdir(parents=True, exist_ok=True)
        unnamed = flags.out / "save.tmp"
        held = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "generator": generator.get_state()}
        torch.save({**held, "step": done, "mean": mean}, unnamed)
        os.rename(unnamed, flags.out / f"step-{done}.pt")

    clock = common.StepClock(flags.pace)
    while done < flags.episodes:
        logs, reward = episode(policy, generator)
        optimizer.zero_grad()
        (-(reward - mean) * logs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done, mean = done + 1, 0.95 * mean + 0.05 * reward
        if flags.metrics is not None:
            with open(flags.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": done, "mean_reward": mean}) + "\n")
        clock.wait()
        ends = asked  # whoever asks from here on has to wait for the next episode, which is saved, too
        if ends or done % flags.save_every == 0 or done == flags.episodes:
            save()
        if ends:
            break


def newest(begin: str) -> Path | None:
    """The file to go on from; None: there is none."""
    path = Path(begin) if begin else None
    if path is None or path.is_file():
        return path
    found = sorted(path.rglob("step-*.pt"), key=lambda one: int(one.stem.partition("-")[2]))
    return found[-1] if found else None


if __name__ == "__main__":
    main()

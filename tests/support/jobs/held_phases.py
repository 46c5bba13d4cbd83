"""A pod that is held in the middle of a phase: see `held_pods/sitecustomize.py`, which runs in its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .pods import Pod, Run

HELD_PODS = Path(__file__).with_name("held_pods")


@dataclass
class Phase:
    """One phase, and the directory by which a test and the pod understand each other."""

    name: str
    holds: Path

    @classmethod
    def below(cls, folder: Path, name: str) -> Phase:
        """Makes the directory."""
        one = cls(name, folder / "holds")
        one.holds.mkdir()
        return one

    @property
    def environment(self) -> dict[str, str]:
        """Of the pod."""
        return {
            "PYTHONPATH": str(HELD_PODS),
            "DALSEGNO_TEST_HELD": self.name,
            "DALSEGNO_TEST_HOLDS": str(self.holds),
        }

    def arm(self) -> None:
        """From now on a process that comes there is held."""
        (self.holds / "armed").touch()

    def wait_held(self, run: Run) -> int:
        """Until one is held; returns its process id."""
        held = run.wait(lambda: [*self.holds.glob(f"{self.name}-*")], f"a process that is {self.name}")
        return int(held[0].name.rpartition("-")[2])

    def release(self) -> None:
        """Lets it go on; nobody is held from now on."""
        (self.holds / "release").touch()


def agent_of(pod: Pod) -> int:
    """The process id of a pod's agent."""
    from .local_processes import carriers, command_line

    (found,) = [pid for pid in carriers(pod.mark) if "--tell-fd" in command_line(pid)]
    return found

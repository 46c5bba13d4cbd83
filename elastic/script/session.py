"""The session as a loop of one's own uses it: what it knows, nobody passes again.

s = session("checkpoints")                                        # the directory is for runs without dlrover-run
state = s.state(model, optimizer)                                 # loaded where the run resumes
data = s.data(dataset, global_batch=16, micro_batch=4, seed=0)    # dealt to any number of ranks
for batch in s.steps(data, state, max_steps=1000, save_every=100):
    for micro in batch:
        micro.scale(loss_of(model, micro.data)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..data.batches import Batches
from ..rank.collective import Pending
from ..rank.way_in import TRAINS, way_in
from ..saving.declared import is_engine
from ..training import session as lower
from ..training.entry import open_session
from ..training.loop import steps
from ..training.staying import none_stays
from .data import DataWish, batches_of
from .state import ScriptState, Trained, Wrap, checked_beside, checked_parts
from .worlds import through_worlds

if TYPE_CHECKING:
    from .engine import Engine

# Options of the lower layer's loop that follow from the data and the state.
_KNOWN = {
    *("save", "strategy", "any_world_size", "create_directory", "order", "cut", "position", "advanced", "seed"),
}


def session(checkpoint_dir: str | Path | None = None, *, keep: int = 0, verify: bool = True) -> Session:
    """The session of this process. A second call returns the first one's, until that one is closed.

    ``with session(...) as s:`` closes it at the block's end: outside ``dlrover-run`` another one may follow.

    Under ``dlrover-run`` everything comes from the environment. Outside, the world is torchrun's or one rank. With a
    ``checkpoint_dir`` the newest sound checkpoint in it is the resume point, and SIGTERM saves before it stops. Under
    ``dlrover-run`` all signals that the agent takes for a notice to leave do that, too. DataLoader processes that start
    afterwards ignore those signals, so that they are there for the step that is saved.

    Args:
        checkpoint_dir: Only for use outside ``dlrover-run``, which gives its own. One directory that all ranks see.
        keep: Outside ``dlrover-run``: how many checkpoints to keep; 0: all.
        verify: Read the resume point's files and compare their checksums before anything is loaded. Rank 0's counts.

    Raises:
        RuntimeError: The environment is incomplete, the directory is in use or some rank cannot use it, the checkpoints
            there do not fit, or the session of this process has another directory. Or it is closed, and this is
            ``dlrover-run``.
        ValueError: The ranks were given directories that are not the same.
        OSError: The agent or the directory cannot be reached.
        BadResumePoint: The resume point is damaged; the agent was told. Exit code 84.
    """
    return open_session(Session, checkpoint_dir, keep=keep, verify=verify)


class Session(lower.BareSession):
    """Made by ``session()``. Main thread only. See ``training.session.Session`` for what it has besides.

    Attributes:
        rank, world_size, local_rank: As torchrun has them.
        epoch: The membership's epoch; 0 outside ``dlrover-run``. (The data's own is ``position.data_epoch``.)
        run_dir: Where checkpoints are saved; None if they cannot be.
        resume: What the run goes on from; None: step 0.
    """

    _data: Batches[Any] | None = None
    _wish: DataWish | None = None
    _trained: Trained | None = None
    _configured = False
    _stepping = False

    # Who stays has no part in what ranks tell each other before the training.

    def sum(self, value: float) -> float:
        """The sum of ``value`` over all ranks, the same bits on every rank. Collective."""
        way_in.talks()
        return super().sum(value)

    def start_sum(self, *values: int) -> Pending:
        """Begins exact sums of whole numbers over all ranks; ``wait()`` returns them as a list. Collective."""
        way_in.talks()
        return super().start_sum(*values)

    def gather(self, message: Any) -> list[Any]:
        """Every rank's ``message`` (plain JSON values), in rank order, on every rank. Collective."""
        way_in.talks()
        return super().gather(message)

    def check_ends(self) -> None:
        """Checks that all ranks leave the loop behind this step, where that is not agreed. Repeating it does no harm.

        `finish` does so, too. A loop that does something else before, with all ranks, calls this as it is left.

        Raises:
            Refusal: Another rank goes on. It is raised here or there, and the agent hears of it from both.
        """
        self._exchange.finish()

    def data(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        data_epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        count_tokens: Callable[..., int] | None = None,
        fixed_micro_batch: bool = False,
        pad: bool = False,
        check_data: bool = True,
        **loader_options: Any,
    ) -> Batches[Any]:
        """The data of the training, from where the run goes on, dealt to any number of ranks.

        Args:
            dataset: Map-style, or iterable; not a ``DataLoader``. It is the same on all ranks.
            global_batch: Samples of one optimizer step, all ranks together.
            micro_batch: Most samples of one forward and backward pass.
            seed: Of the order of samples and of the random generators. The same on all ranks.
            shuffle: Default: True, or False for an iterable data set, which has its own order.
            drop_last: Leave out a last batch that is short; otherwise each of its samples weighs as much as any other.
            data_epochs: The training ends after so many passes over the data; default: with ``s.steps(max_steps=...)``.
            collate_fn: Makes ``micro.data`` from a list of samples; default: torch's.
            count_tokens: For losses that are means over tokens, see `Batches`.
            fixed_micro_batch, pad: See `BatchPlan`.
            check_data: Compare a few samples over the ranks, and with those that the run began with.
            loader_options: As torch's ``DataLoader`` has them: ``num_workers``, ``pin_memory``, ….

        Raises:
            ValueError: The data set or an option cannot be used; or the run began with other ones; or there are data
                already.
        """
        with self.meetings.telling():
            self._check_before("data", self._data)
            wish = DataWish(
                *(global_batch, micro_batch, seed, shuffle, drop_last, data_epochs, collate_fn, count_tokens),
                *(fixed_micro_batch, pad, check_data, loader_options),
            )
            self._data, self._wish = batches_of(self, dataset, wish), wish
        return self._data

    def state(
        self,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        cast: bool = False,
        other_schedule: bool = False,
        weights_only: bool = False,
        wrap: Wrap | None = None,
        **parts: Any,
    ) -> ScriptState:
        """What is trained, loaded where the run goes on: the same on every rank, saved by rank 0. Collective.

        Call it once the model is on its device, before or after ``DistributedDataParallel(model)``.

        Args:
            model: Of two models make one: ``nn.ModuleList([a, b])``.
            optimizer, scheduler, scaler: Those that the loop steps itself; a ``torch.amp.GradScaler`` for fp16.
            cast, other_schedule, weights_only: See ``TrainingState.load``.
            wrap: Wraps the model for the present world, such as ``DistributedDataParallel``: in the default process
                group, which is made if there is none. The training then calls ``state.model``.
            parts: Whatever else has ``state_dict`` and ``load_state_dict``, by name.

        Raises:
            ValueError: These are no model and optimizer; or the checkpoint is of others; or there is a state already.
        """
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **parts}
        with self.meetings.telling():
            self._check_before("state", self._trained)
            if self._configured:
                raise ValueError(
                    "s.deepspeed_config(...) was called, so an engine trains the model: s.engine(engine), not s.state"
                )
            checked_parts(model, parts, wrap)
            found = ScriptState(self, model, wrap, **parts)
        loaded = found.load(cast=cast, other_schedule=other_schedule, weights_only=weights_only)
        found.wrapped(alike=loaded)
        self._trained = found
        return found

    def deepspeed_config(self, config: Mapping[str, Any] | str | Path, data: Batches[Any]) -> dict[str, Any]:
        """DeepSpeed's configuration for the present world, for ``deepspeed.initialize``, which it prepares.

        Args:
            config: Without batch sizes, which follow from ``data`` and the world. Or the path of such a JSON file.
            data: From `data`.

        Returns:
            A new dictionary, see ``elastic.deepspeed.config``.

        Raises:
            ValueError: ``config`` has other batch sizes, or a layout whose checkpoints do not survive a change of the
                world.
            OSError: The file cannot be read.
        """
        from .engine import config_for

        with self.meetings.telling():
            if not isinstance(data, Batches):
                raise ValueError("s.deepspeed_config(config, data): the second is what s.data(...) returns")
            found = config_for(self, config, data)
            self._configured = True
        return found

    def engine(self, engine: Any, *, other_schedule: bool = False, weights_only: bool = False, **parts: Any) -> Engine:
        """A DeepSpeed engine, loaded where the run goes on. Collective.

        Args:
            engine: From ``deepspeed.initialize(..., config=s.deepspeed_config(config, data))``. ZeRO stages 0 to 3.
            other_schedule: Accept functions of its scheduler (``LambdaLR``) that have changed.
            weights_only: Load the weights, and let the optimizer, the scheduler and the parts begin anew. Step and data
                go on. Once in a run, as in `state`.
            parts: Whatever else has ``state_dict`` and ``load_state_dict``, by name: the same on every rank, saved by
                rank 0.

        Raises:
            ValueError: It is no engine, or was made with another configuration, or trains something else than the
                checkpoint's; or a part cannot be saved or loaded; or there is a state already.
            RuntimeError: The checkpoint cannot be loaded, see ``elastic.deepspeed.restore``.
        """
        with self.meetings.telling():
            self._check_before("engine", self._trained)
            if not is_engine(engine):
                what = "s.state(model, optimizer) is for it" if isinstance(engine, nn.Module) else "give the first of "
                what += "" if isinstance(engine, nn.Module) else "what deepspeed.initialize(...) returns"
                raise ValueError(f"s.engine(engine): a {type(engine).__name__} is no DeepSpeed engine; {what}")
            if not self._configured:
                raise ValueError(
                    "the engine's config is not of this world: deepspeed.initialize(..., config=s.deepspeed_config("
                    "config, data)), where batch sizes follow from data = s.data(...)"
                )
            checked_beside(parts)
        from .engine import Engine

        self._trained = Engine(self, engine, other_schedule=other_schedule, weights_only=weights_only, **parts)
        return self._trained

    def steps(
        self,
        data: Iterable[Any],
        state: Trained | None = None,
        *,
        max_steps: int | None = None,
        save_every: int = 0,
        memory_every: int | str = 0,
        background: bool = False,
        stay: bool = False,
        metric: Callable[[], float | None] | None = None,
        **lower_layer: Any,
    ) -> Iterator[Any]:
        """The training loop: one batch per optimizer step, in which ``for micro in batch`` has its micro-batches.

        All ranks leave it at the same step. It goes through all data epochs, saves, drains and ends by itself. After a
        ``break`` the script decides: call ``finish()`` if the training is done.

        Args:
            data: From `data`; or, without ``state``, any iterable, see ``loop.steps``.
            state: From `state` or `engine`: what is trained, and saved.
            max_steps: Steps of the whole run, those before the resume point included. This or ``data_epochs`` of `data`
                ends the training.
            save_every: Steps between saves; 0: only at changes of the world and at the end.
            memory_every: The same to the nodes' memory (``docs/memory.md``); ``"auto"``: it slows the loop by 2 % at
                most.
            background: Saves are written while the training goes on; it waits for a copy to host memory.
            stay: At a planned change this process stays, with all that it has built, and goes on in the next world:
                nothing is made or loaded anew. The script asks the session each time for what belongs to a world (rank,
                world size), calls ``state.model``, and talks to other ranks only inside the loop. See `docs/loop.md`.
            metric: Returns the run's tracked metric; called at each save.
            lower_layer: Without ``state``: the other options of ``loop.steps``.

        Raises:
            ValueError: These are no data, or no state; nothing ends the training; the ranks were not started alike; or
                see ``loop.steps``.
            RuntimeError: The training has ended; or this is not the main thread, see ``Meetings.check_thread``; or a
                step ended before its micro-batches were all computed.
            SaveError: What is trained cannot be saved, or the final save failed again and again.
            Drained: The world changes, everything is saved. Exit code 83.
        """
        self.meetings.check_thread()
        way_in.at(TRAINS)
        given: dict[str, Any] = {"max_steps": max_steps, "save_every": save_every, "memory_every": memory_every}
        with self.meetings.telling():
            if state is None:
                self._check_without_state(data, background=background, save=lower_layer.get("save"))
                options = lower_layer
            else:
                batches = self._check_loop(data, state, max_steps, lower_layer)
                batches.given_to(state.begin(batches), state.scale)
                options = {"save": state.saving(beside=background), "seed": batches.order.seed}
            wish = self._check_stay(data, state) if stay else None
        self._stepping = True
        loop = partial(steps, self, data, metric=metric, **given, **options)
        if wish is None:
            return loop()
        assert self._data is not None
        assert isinstance(state, ScriptState)
        return through_worlds(self, self._data, wish, state, loop)

    def close(self) -> None:
        """Leaves the session's group and the agent's socket, for scripts that go on doing other things."""
        self._data = self._trained = None
        super().close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Under an agent the end of the process is the end of the session: it says how that came about.
        if self.alone:
            self.close()

    # Mistakes.

    def _check_before(self, name: str, known: Any) -> None:
        if self.meetings.over:
            self.meetings.check_open(self.step)
        if self._stepping:
            raise ValueError(f"s.{name}(...) comes before the loop over s.steps(...)")
        if known is not None and name == "data":
            raise ValueError(
                "this session has its data already: s.data(...) is for what is trained, one data set (torch's "
                "ConcatDataset makes one of several); for an evaluation take a DataLoader or the Evaluator"
            )
        if known is not None:
            raise ValueError(
                "this session has its state already: it trains one model; of two make one, nn.ModuleList([a, b]), and "
                "give further optimizers by name: s.state(model, optimizer, second=...)"
            )

    def _check_stay(self, data: Any, state: Any) -> DataWish | None:
        if not isinstance(state, ScriptState) or not state.wraps:
            raise ValueError(
                "stay=True is for a replicated model that is wrapped anew in each world: "
                "state = s.state(model, optimizer, wrap=DistributedDataParallel), and state.model in the loop"
            )
        if data is not self._data or self._wish is None:
            raise ValueError("stay=True wants the data of s.data(...), which are dealt anew in each world")
        return None if none_stays("s.steps()") else self._wish

    def _check_without_state(self, data: Any, *, background: bool, save: Any) -> None:
        if isinstance(data, ScriptState) or is_engine(data):
            raise ValueError("s.steps(data, state): the data come first")
        if background:
            raise ValueError("background=True belongs to s.steps(data, state); otherwise save=background(...)")
        if data is not None and data is self._data and save is None:
            raise ValueError(
                "s.steps(data, state): the state is missing, so nothing would be saved or loaded: "
                "state = s.state(model, optimizer), or s.engine(engine)"
            )

    def _check_loop(self, data: Any, state: Any, max_steps: int | None, lower_layer: Mapping[str, Any]) -> Batches[Any]:
        if self.meetings.over:
            raise ValueError(
                f"the training has ended at step {self.step}: s.steps goes through all data epochs by itself, so leave "
                "out the loop over epochs around it; s.data(data_epochs=...) says how many there are"
            )
        if isinstance(state, Batches) or isinstance(data, ScriptState):
            raise ValueError("s.steps(data, state): the data come first, then the state")
        if not hasattr(state, "saving"):
            how = "s.engine(engine)" if is_engine(state) else "s.state(model, optimizer)"
            raise ValueError(f"s.steps(data, state): a {type(state).__name__} is no state; {how} makes one")
        if not isinstance(data, Batches):
            raise ValueError(
                f"s.steps(data, state): a {type(data).__name__} does not say how it is dealt to the ranks; "
                "s.data(dataset, global_batch=..., micro_batch=...) does"
            )
        for name in lower_layer:
            if name not in _KNOWN:
                raise ValueError(f"s.steps({name}=...): there is no such option")
            raise ValueError(f"s.steps(data, state, {name}=...): that follows from data and state, leave it out")
        if max_steps is None and data.left is None:
            raise ValueError(
                "when does the training end? s.steps(data, state, max_steps=...), or s.data(..., data_epochs=...)"
            )
        return data

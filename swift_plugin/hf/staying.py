"""A Trainer's process that stays: at a change of the world it keeps its model and its optimizer, and trains on.

A Trainer is made for one world: its arguments and accelerate know the ranks from the first moment on. So these are made
anew in place, as a new process would make them, and ``train()`` begins again, where it loads all but what is here: the
parameters, and what the optimizer keeps. See ``elastic.training.staying``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import TrainerControl
from transformers.trainer import OPTIMIZER_NAME
from transformers.utils import logging

from dalsegno.elastic import Session
from dalsegno.elastic.rank.exits import EXIT_DRAINED, Drained, Stays, end_at_once, insist
from dalsegno.elastic.rank.remarks import remark, remarked_after
from dalsegno.elastic.rank.way_in import TRAINS, way_in
from dalsegno.elastic.training.entry import is_begun, move
from dalsegno.elastic.training.staying import Wrappers, until_lost

from .checkpoints import trainers
from .refusals import overrides

_CAUSE = (
    "something holds the DistributedDataParallel that the Trainer has made: a callback, or a loss function that was "
    "given it. Take trainer.model instead"
)
# How long other ranks may take from their TrainingArguments to elastic() before a line says what they may wait for.
_PATIENCE_SECONDS = 60.0
_WAITS = (
    "this process has stayed, and waits for new ones to come to elastic(): with stay=True ranks meet before train() "
    "(main_process_first, a barrier) as often in each world"
)
# Of whatever is saved of a model in one file.
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
# What TrainingArguments know of their place, and the one that finds that out when it is asked for.
_DEVICES = "_setup_devices"
_OF_A_WORLD = ("distributed_state", "_n_gpu", "local_rank", _DEVICES)
# Callbacks that open their logger once, and only where the process is rank 0 then.
_REPORTS = "transformers.integrations"


def refuse(trainer: Any, strategy: str) -> None:
    """Refuses what would not be the same if ``train()`` began again in the same process. Before the session is opened.

    Raises:
        ValueError: The Trainer has such a thing.
    """
    for there, what in _found(trainer, strategy):
        if there:
            raise ValueError(f"stay=True with {what}: leave one of them out")


def _found(trainer: Any, strategy: str) -> list[tuple[Any, str]]:
    args = trainer.args
    own = overrides(trainer, "create_accelerator_and_postprocess")
    return [
        (strategy != "ddp", f"{strategy}, whose engine fits one number of ranks"),
        (trainer.model_init is not None, "model_init, which makes the model anew each time"),
        (
            getattr(args, "batch_eval_metrics", False),
            "batch_eval_metrics, which would count what was left",
        ),
        (getattr(args, "torch_compile", False), "torch_compile, which compiles for one wrapper"),
        (trainer.accelerator.scaler is not None, "fp16, whose loss scale is accelerate's"),
        (args.neftune_noise_alpha is not None, "neftune_noise_alpha, which would be added once more each time"),
        (getattr(args, "use_liger_kernel", False), "use_liger_kernel, which changes the model each time"),
        (not args.skip_memory_metrics, "skip_memory_metrics=False, which measures one training"),
        (args.debug, "debug, which watches one training"),
        (
            getattr(args.accelerator_config, "gradient_accumulation_kwargs", None),
            "gradient_accumulation_kwargs, which accelerate reads once",
        ),
        (own, f"create_accelerator_and_postprocess of {own}, which would be called anew"),
        (is_begun(), "a session that the script has opened by itself, perhaps before its TrainingArguments"),
    ]


class Worlds:
    """How the process of one Trainer goes through its worlds. Main thread only.

    Args:
        trainer: It is constructed, and was not refused.
        begin: Makes it elastic in the world that its session has then. Collective.

    Attributes:
        stayed: What this world resumes from is here.
    """

    def __init__(self, trainer: Any, begin: Callable[[], None]) -> None:
        self._trainer, self._begin = trainer, begin
        self._wrappers = Wrappers(trainer.model, _CAUSE)
        # The arguments as the script gave them; those that the plugin sets; and what the script has set behind that.
        self._given, self._ours, self._later = _arguments(trainer.args), frozenset[str](), dict[str, Any]()
        self._forward: Any = None
        self.stayed = False

    def begun(self, session: Session) -> None:
        """The Trainer is elastic in this world."""
        if not self.stayed:
            now = _arguments(self._trainer.args)
            self._ours = frozenset(name for name in now if now[name] is not self._given.get(name))
        session.may_stay = lambda: self._wrappers.alone
        session.survivor.loop_stays = True

    def end_with_this_world(self) -> None:
        """Its process does not stay."""
        session = self._trainer.elastic_run.session
        session.may_stay, session.survivor.loop_stays = bool, False

    def wrapped(self) -> None:
        """The Trainer has wrapped its model for this world."""
        self._wrappers.note(self._trainer.model_wrapped)

    @property
    def keeps_weights(self) -> bool:
        """Whether the model's files need not be loaded."""
        return self.stayed and not self._reads_weights

    @property
    def _reads_weights(self) -> bool:
        return _has_own(self._trainer.model) or bool(overrides(self._trainer, "_load_from_checkpoint"))

    def train(self, train: Callable[[], Any]) -> Any:
        """Calls ``train`` in one world after another, until one comes to its end."""
        now, known = _arguments(self._trainer.args), self._given
        self._later = {name: now[name] for name in now.keys() - self._ours if now[name] is not known.get(name)}
        while True:
            session = self._trainer.elastic_run.session
            self._forward = vars(self._trainer.model).get("forward")
            try:
                with until_lost(session.meetings, session.survivor):
                    return train()
            except Stays as out:
                held, broken = out.holds, out.broken
            # Outside of the handler: nothing may hold what belongs to the old world.
            self._move(held, broken=broken)

    def _move(self, held: Mapping[str, str], *, broken: bool) -> None:
        run = self._trainer.elastic_run
        session, survivor, first = run.session, run.session.survivor, run.session.rank == 0
        survivor.anywhere = False
        unread = self._unread(session.step)
        run.let_go()
        if not self._lets_go() or (broken and survivor.peer_lost(True) != held):
            _end(broken=broken)
        # What watches this world's optimizer goes once the next one's run takes its place.
        del run
        with contextlib.ExitStack() as entering:

            def before() -> None:
                # From here on it waits for other ranks, and no longer for its place.
                entering.enter_context(remarked_after(_PATIENCE_SECONDS, _WAITS))
                self._renew()

            # A new process makes its arguments first, so its group meets before its session.
            move(session, held, unread, broken=broken, before=before)
        self.stayed = True
        if session.rank == 0 and not first:
            self._become_first()
        self._begin()
        way_in.again(TRAINS)
        vars(self._trainer.args).update(self._later)

    def _lets_go(self) -> bool:
        """Drops all that belongs to the present world. Returns whether that is all."""
        trainer, alone = self._trainer, self._wrappers.alone
        bare = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        trainer.accelerator.free_memory()
        trainer.model_wrapped = trainer.model
        # What accelerate has put around it for bf16. (It would take off what others have put there, too.)
        if vars(trainer.model).pop("_original_forward", None) is not None:
            vars(trainer.model).pop("forward", None)
            if self._forward is not None:
                trainer.model.forward = self._forward
        if trainer.args.gradient_checkpointing:
            unhook(trainer.model)
        for parameter in trainer.model.parameters():
            parameter.grad = None
        same = bare is trainer.model
        del bare
        if not same:
            remark("this process cannot stay for the next world: the Trainer's model is wrapped in a way of its own")
        return alone and same and self._wrappers.are_gone()

    def _unread(self, step: int) -> list[str]:
        names = () if self._reads_weights else _WEIGHTS
        if self._trainer.loads_as_known:
            names = (OPTIMIZER_NAME, *names)
        return [str(trainers(Path(), step) / name) for name in names]

    def _renew(self) -> None:
        """Makes what knows the ranks anew, in the order in which a new process makes it."""
        trainer = self._trainer
        vars(trainer.args).update(self._given)
        vars(trainer.args).pop(_DEVICES, None)
        _ = trainer.args._setup_devices
        logging.set_verbosity(trainer.args.get_process_log_level())
        trainer.accelerator.gradient_state._reset_state()
        trainer.create_accelerator_and_postprocess()
        # Loaders that were kept deal an evaluation's batches to the old ranks.
        vars(trainer).pop("_eval_dataloaders", None)
        trainer.callback_handler.eval_dataloader = None
        trainer.control = TrainerControl()
        # The schedule goes on, with the optimizer that it belongs to.
        trainer._created_lr_scheduler = False
        trainer.current_flos = 0
        trainer.renewed()

    def _become_first(self) -> None:
        """Does what only rank 0 does as it makes its Trainer, and lets reports begin here."""
        if self._trainer.args.push_to_hub:
            self._trainer.init_hf_repo()
        for callback in self._trainer.callback_handler.callbacks:
            reports = any(cls.__module__.startswith(_REPORTS) for cls in type(callback).__mro__)
            if reports and getattr(callback, "_initialized", False):
                callback._initialized = False


def unhook(model: nn.Module) -> None:
    """Takes off the hooks that ``train()`` has put on embeddings for gradient checkpointing, and puts on each time."""
    for module in model.modules():
        known = vars(module)
        # Older versions of transformers have the one, newer both.
        for hook in (known.pop("_require_grads_hook", None), *known.pop("_require_grads_hooks", ())):
            if hook is not None:
                hook.remove()


def _arguments(args: Any) -> dict[str, Any]:
    """What TrainingArguments have that is not of the present world."""
    return {name: value for name, value in vars(args).items() if name not in _OF_A_WORLD}


def _has_own(model: nn.Module) -> bool:
    """Whether more than parameters is saved of it: a rank may have its own until rank 0 saves its."""
    return bool(model.state_dict(keep_vars=True).keys() - dict(model.named_parameters(remove_duplicate=False)).keys())


def _end(*, broken: bool) -> NoReturn:
    """All is saved, and the agent knows it. Another process takes this one's place."""
    if broken:
        # Whoever waits for threads of the script's here keeps all others waiting.
        end_at_once(1)
    insist(EXIT_DRAINED)
    raise Drained

"""Puts one agent together from a checked command line and runs it. Needs torch."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig

from dalsegno.elastic.checkpoint import Tracked
from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import addresses_of, host_and_port
from dalsegno.protos.contract import GROW_SOON_SECONDS, JobSettings, Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.shortage import shortage, starting

from ..control.connection import Connector, Credentials
from ..control.credentials import CredentialFiles, CredentialsError
from ..control.embedded import EmbeddedMaster, MasterError
from ..control.handshake import mismatch
from ..control.spawning import LOOPBACK, read_token
from ..decisions.events import EXIT_FAILED, EXIT_FINISHED, EXIT_LEFT, EXIT_LEFT_UNSAVED, EXIT_USAGE, Event, Exit
from ..dlrover import scripts
from ..processes.signals import SignalWatch
from ..script import Script, asks_for_universal, dlrover_text, expects_session, knows_us, runs_ahead, uses_dlrover
from ..shell.config import AgentConfig
from ..shell.console import RunConsole, log_torch
from ..shell.effects import Effects
from ..shell.elastic_agent import ElasticAgent
from ..shell.mailbox import Mailbox
from ..shell.rendezvous import NamedRendezvous
from ..shell.torch_record import recorded
from ..storage.best_save import BestRule
from ..storage.complaint import of_another
from ..storage.job_directory import JobDirectory
from ..storage.macros import SAVE_DIR, macros_of
from ..storage.namesake import unfinished
from ..workers.attempts import forgetting
from ..workers.last_words import without_file
from ..workers.own_address import why_not_begun
from ..workers.torch_versions import known
from .asking import is_served
from .beginning import Beginning
from .endpoint import answers, local_address, wait_for_name, where_to_listen

__all__ = ["launch"]

logger = logging.getLogger(__name__)

# For who knows torchrun's default, a store, and gives an endpoint that no node hosts.
_HOSTS = "; with --rdzv-backend=c10d the node with that address hosts one"
# A shell may have it for another job. `_connect` says why it decides.
_BY_TOKEN = (
    f"; with {Variable.TOKEN} it is taken for a master that is a service: if there is to be none, unset that, and the"
    " node with that address hosts one"
)
# For who runs in a pod of DLRover's operator, which names DLRover's own master there. What to do holds only where that
# answers: a silent one may be ours, and late, and the job would get a second one.
_BY_VARIABLE = f"; the variable {Variable.MASTER} names it"
_OPERATORS = (
    ", as DLRover's operator has it for a master of DLRover's: unset it, or give --rdzv-backend=c10d"
    " --rdzv-endpoint=HOST:PORT of the node that is to host ours"
)
# What later versions of torch have added to their configuration, and the flag's name that each is for.
_LATER_FIELDS = {
    "event_log_handler": "event_log_handler",
    "numa_options": "numa_binding",
    "duplicate_stdout_filters": "duplicate_stdout_filters",
    "duplicate_stderr_filters": "duplicate_stderr_filters",
    "virtual_local_rank": "virtual_local_rank",
}


def launch(options: argparse.Namespace, beginning: Beginning, watch: SignalWatch, console: RunConsole) -> int:
    """Runs one agent to its end. Signals go to the agent as soon as it has a loop that can hear them.

    Raises:
        UsageError: bad input that only now came to light.
    """
    log_torch()
    directory, log_dir = beginning.directory, beginning.log_dir
    directory.complaint.say = console.say
    torch_config, script = _torch_config(options, log_dir)
    config = _agent_config(options, int(torch_config.nproc_per_node), directory, log_dir, script, beginning.token)
    source = _connect(options, beginning.token, directory, console, log_dir, watch)
    try:
        ending = _run(config, beginning, torch_config, script, source, console, watch)
    finally:
        source.close()
    message = ending.message
    if ending.code == EXIT_FAILED and not ending.final:
        message = verdict(message, log_dir, said=console.last)
    if message:
        expected = ending.final or ending.code in (EXIT_FINISHED, EXIT_LEFT, EXIT_USAGE)
        console.say(message, warning=not expected)
    return ending.code


def verdict(reason: str, log_dir: Path, *, said: str = "") -> str:
    """The last line of a failed job: why it failed, where to find more, and what to do.

    Args:
        said: the line right before it. If that said in full why, this one does not say it again.
    """
    reason, said = without_file(reason), without_file(said)  # it was named when it happened
    if said and reason.startswith(said):
        why = reason.removeprefix(said)  # how often it failed, if it was tried again
        text = f"the job failed, for the reason above{why}"
    else:
        text = f"the job failed: {reason}"
    return (
        f"{text}; logs in {log_dir}; the same command tries again, from the newest checkpoint if there is one,"
        " --new-run starts over"
    )


class _Source:
    """The master's addresses: given by the user, or an embedded master's.

    Args:
        addresses: as the user gave them; of an embedded master, where other nodes find it: none, if there are none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Callable[[], Credentials],
        embedded: EmbeddedMaster | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._credentials = credentials
        self.embedded = embedded
        self.generation = embedded.abandoned_generation if embedded is not None else 0

    def addresses(self) -> Sequence[str]:
        return self.embedded.addresses() if self.embedded is not None else self._addresses

    def known_as(self) -> Sequence[str]:
        """The addresses that other nodes have, too: the way there decides under which one they reach this node."""
        return self._addresses or self.addresses()

    def connector(self) -> Connector:
        embedded = self.embedded
        if embedded is not None:
            return Connector(embedded.addresses, embedded.credentials, embedded.missing)
        return Connector(lambda: self._addresses, self._credentials, explain=mismatch)

    def close(self) -> None:
        if self.embedded is not None:
            self.embedded.close()


def _torch_config(options: argparse.Namespace, log_dir: Path) -> tuple[Any, Script]:
    """Torch's own parsing of its part of the command line: processes, log files, filters."""
    # Flags of newer versions of torch, with their defaults.
    known = vars(torchrun.get_args_parser().parse_args([options.training_script]))
    merged = argparse.Namespace(**{**known, **vars(options)})
    merged.log_dir = str(log_dir)
    merged.rdzv_backend = "dalsegno"
    merged.rdzv_id = options.job_id
    # A standby worker is the same interpreter with the same path.
    merged.run_path = False
    if not options.nproc_is_given and merged.nproc_per_node == "gpu" and not torch.cuda.is_available():
        merged.nproc_per_node = "1"
    try:
        torch_config, entrypoint, arguments = torchrun.config_from_args(merged)
    except (ValueError, AssertionError, ImportError) as error:
        raise UsageError(str(error)) from error
    _check_later_flags(options, torch_config)
    try:
        # Torch itself looks it up only when the agent ends.
        get_logging_handler(options.event_log_handler)
    except KeyError as error:
        why = f"torch has no handler {options.event_log_handler!r}, but console and null"
        raise UsageError(f"argument --event-log-handler: {why}") from error
    return torch_config, Script(str(entrypoint), tuple(arguments))


def _check_later_flags(options: argparse.Namespace, torch_config: Any) -> None:
    """Torch's own parser does not see what ours has taken, and would refuse what its version does not know.

    Raises:
        UsageError: such a flag is given.
    """
    for field, flag in _LATER_FIELDS.items():
        if getattr(options, flag) not in (None, False, [], "null") and not hasattr(torch_config, field):
            raise UsageError(f"argument --{flag.replace('_', '-')}: torch {torch.__version__} does not have it")


def _agent_config(
    options: argparse.Namespace,
    nproc: int,
    directory: JobDirectory,
    log_dir: Path,
    script: Script,
    token: str | None = None,
) -> AgentConfig:
    settings = control_pb2.Settings(**{name: getattr(options, name) for name in JobSettings.names()})
    # Also if the user gave the script this flag itself; it is called the same.
    settings.universal_checkpoint |= asks_for_universal(options.training_script_args)
    adopts = SAVE_DIR in macros_of(script.arguments)
    if settings.grow_wait < 0 and not (
        adopts or expects_session(script) or scripts.keeps_nothing(dlrover_text(script.source))
    ):
        settings.grow_wait = GROW_SOON_SECONDS
    return AgentConfig(
        job_id=options.job_id,
        nproc=nproc,
        settings=settings,
        checkpoint_dir=directory.root,
        log_dir=log_dir,
        node_name=options.node_name,
        local_addr=options.local_addr,
        new_run=options.new_run,
        resume_step=options.resume_step,
        master_outage_timeout=options.master_outage_timeout,
        connect_timeout=options.connect_timeout,
        addresses=options.master or options.meet or "",
        hint=_hint(options, token),
        advice=_OPERATORS if options.master_is_variables else "",
        token_file=str(options.token_file or ""),
        # With the other flag its configuration says what this one would tell it.
        script_flag=not (knows_us(script) or options.deepspeed_load_universal),
        deepspeed_load_universal=options.deepspeed_load_universal,
        expects_session=expects_session(script),
        checkpoint_glob=options.checkpoint_glob,
        keep_saves=options.keep_saves,
        make_room=options.make_room,
        save_signal=options.save_signal,
        self_fence=options.self_fence,
        best=_best_rule(options),
        initial=options.initial_checkpoint,
        tell_fd=options.tell_fd,
        run_ahead=runs_ahead(script, options.run_ahead),
        adopts=adopts,
        # An embedded master speaks plaintext.
        tls=bool(options.master or options.meet) and CredentialFiles.given(options, None).tls,
        memory_budget_bytes=options.memory_budget,
        memory_bytes_per_second=options.memory_bandwidth,
        dlrover=options.dlrover or options.dlrover_fixes or uses_dlrover(script),
        dlrover_fixes=_fixes(script) if options.dlrover_fixes else "",
        # A job that has its name from us is presented before, as one may be looking for it.
        announcement="" if getattr(options, "job_id_is_default", False) else f"job {options.job_id}; logs in {log_dir}",
    )


def _hint(options: argparse.Namespace, token: str | None) -> str:
    """What to say where no master of ours answers. `token`: the environment's."""
    if options.meet and token and not CredentialFiles.given(options, None).some:
        return _BY_TOKEN
    if options.rdzv_endpoint and options.master == options.rdzv_endpoint:
        return _HOSTS
    return _BY_VARIABLE if options.master_is_variables else ""


def _best_rule(options: argparse.Namespace) -> BestRule | None:
    if options.best is None:
        return None
    metric, mode = options.best
    return BestRule(Tracked(metric, mode, options.best_min_delta or 0.0), options.metrics_file or "metrics.jsonl")


def _fixes(script: Script) -> str:
    """What the script asks of DLRover's trainer: "total", every world makes the same batch; "each", each its own."""
    return "each" if scripts.uses(dlrover_text(script.source)).batch_of_its_own else "total"


def _connect(
    options: argparse.Namespace,
    token: str | None,
    directory: JobDirectory,
    console: RunConsole,
    log_dir: Path,
    watch: SignalWatch,
) -> _Source:
    """Finds the master's address, starting an embedded master if there is to be one."""
    by_default = getattr(options, "job_id_is_default", False)
    files = CredentialFiles.given(options, token)
    # With credentials of its own the node at the meeting point is no agent of ours, but a master that is a service.
    addresses = options.master or (options.meet if files.some else "")
    if addresses:
        try:
            files.check()
        except CredentialsError as error:
            raise UsageError(str(error)) from error
        if by_default:
            console.say(
                f"job {options.job_id} (from user, script and arguments; --job-id names another); logs in {log_dir}"
            )
        return _Source(addresses_of(addresses), files.read)
    if by_default:
        console.say(f"job {options.job_id} (the same command in another terminal joins it); logs in {log_dir}")
        means_it = options.new_run or options.initial_checkpoint
        if not means_it and (other := unfinished(directory, is_served)) is not None:
            job, step = other
            console.say(
                f"{job}, a job of a script of this name, is at step {step} here: --job-id={job} goes on with it; this"
                " one begins at step 0"
            )
    listen = LOOPBACK
    if options.meet:
        host, port = host_and_port(options.meet)
        if not (own := local_address(host)):
            return _hosted_elsewhere(options.meet, directory, console, options.connect_timeout)
        listen = where_to_listen(host, own, options.max_nodes > 1), port
    embedded = EmbeddedMaster(
        directory.private,
        options.job_id,
        options.node_timeout,
        console.say,
        patience_seconds=options.connect_timeout,
        listen=listen,
        undisturbed=watch.undisturbed,
    )
    try:
        embedded.start()
    except (MasterError, OSError) as error:
        embedded.close()
        theirs = of_another(directory.root, error) if isinstance(error, OSError) else ""
        raise UsageError(theirs or str(error)) from error
    return _Source((options.meet,) if options.meet else (), embedded.credentials, embedded)


def _hosted_elsewhere(address: str, directory: JobDirectory, console: RunConsole, patience_seconds: float) -> _Source:
    """The master that another node hosts; the job's token comes with the checkpoint directory that all nodes see.

    Raises:
        UsageError: the other node has no address within `patience_seconds`.
    """
    if not answers(address):
        console.say(
            f"waiting for the master at {address}: the node with that address hosts it; at most {patience_seconds:g} s "
            "(--connect-timeout)"
        )
        wait_for_name(address, patience_seconds)
    return _Source((address,), lambda: Credentials(read_token(directory.private)))


def _run(
    config: AgentConfig,
    beginning: Beginning,
    torch_config: Any,
    script: Script,
    source: _Source,
    console: RunConsole,
    watch: SignalWatch,
) -> Exit:
    mailbox: Mailbox[Event] = Mailbox()
    directory, lifeline = beginning.directory, beginning.lifeline
    addresses = source.known_as()
    try:
        with starting("the agent"):
            effects = Effects(
                config, directory, source.connector(), addresses, lifeline, mailbox, console.say, source.generation
            )
    except OSError as error:
        raise UsageError(why_not_begun(error, ",".join(addresses), "--master, or --rdzv-endpoint")) from error
    spec = WorkerSpec(
        role=torch_config.role,
        local_world_size=config.nproc,
        rdzv_handler=NamedRendezvous(config.job_id),
        entrypoint=script.entrypoint,
        args=script.arguments,
        max_restarts=int(config.settings.max_restarts),
        **_later_fields(torch_config),
    )
    initialize_metrics(MetricsConfig(torch_config.metrics_cfg))
    try:
        with starting("the agent"):
            agent = ElasticAgent(
                spec,
                forgetting(torch_config.logs_specs),
                config,
                script,
                mailbox,
                effects,
                lifeline,
                watch,
                torch_config.log_line_prefix_template,
                beginning.take_early(),
            )
    except OSError as error:
        # There is no place for the workers' socket, or no process can be started.
        effects.close(0.0)
        raise UsageError(str(error)) from error
    beginning.where.now = agent.where
    try:
        with recorded(agent):
            agent.run()
    except (OSError, RuntimeError, MemoryError) as error:
        if not (why := shortage(error)):
            raise
        logger.exception("the agent cannot go on")
        return Exit(EXIT_LEFT_UNSAVED, f"the agent cannot go on: {why}; the same command joins again")
    return agent.ending


def _later_fields(torch_config: Any) -> dict[str, Any]:
    """Fields of WorkerSpec that later versions of torch have added."""
    fields = {name: getattr(torch_config, name) for name in _LATER_FIELDS if hasattr(torch_config, name)}
    return known(WorkerSpec, **fields)

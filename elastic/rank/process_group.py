"""The default process group, which the training's collectives use (the session has its own: ``collective``)."""

from __future__ import annotations

import os
import socket
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .contexts import cards_in_use
from .remarks import remark
from .way_in import way_in

# Backends for tensors on CPU and GPU, even though torch's own default may be NCCL alone.
BOTH = "cpu:gloo,cuda:nccl"
# Time for the ranks of one world to meet. A rank that hangs is the agent's business long before that.
TIMEOUT = timedelta(minutes=30)


def init_process_group(device: torch.device) -> None:
    """Initialises the group unless it is initialised: torchrun's world, or one rank without torchrun.

    NCCL needs a card of its own for each rank. It refuses if two ranks have the same card; then gloo takes its place,
    and one line says so.

    Args:
        device: Where this rank computes. A card is bound to the group, whose communicator is created at once.
    """
    if dist.is_initialized():
        return
    # Who stays comes here, too, so there is nothing to follow.
    with way_in.by_us():
        if "RANK" not in os.environ:
            init_alone(_backend(device, shared=False))
        elif device.type == "cuda":
            _init_on_cards(device)
        else:
            dist.init_process_group(_backend(device, shared=False))


def init_alone(backend: str | None = None) -> None:
    """Initialises a group of one rank, with the store in this process: no port to choose, nobody to meet.

    Args:
        backend: As in ``torch.distributed``; None: its default.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, though torch's __init__ does not list it
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def send_rank_0s(tensor: torch.Tensor) -> None:
    """Gives all ranks rank 0's values of a tensor, however it lies in memory. Collective.

    The collective itself takes as many elements as there are behind the first one, also of an expanded tensor.

    Raises:
        ValueError: It has no plain values, so it cannot be sent.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor with {tensor.layout} cannot be sent to all ranks: make it a dense one")
    with torch.no_grad():
        place = tensor.detach()
        for dimension, step in enumerate(place.stride()):
            place = place if step else place.narrow(dimension, 0, min(1, place.shape[dimension]))
        sent = place if place.is_contiguous() else place.contiguous()
        dist.broadcast(sent, 0)
        if sent is not place:
            place.copy_(sent)


def settle_device() -> None:
    """Waits until this process's cards have finished their work: a peer may be waiting for it in a collective.

    Does nothing if CUDA is not in use.
    """
    for card in cards_in_use():
        torch.cuda.synchronize(card)


def shared_cards(store: Any, rank: int, world_size: int, card: str) -> bool:
    """Whether two ranks of this world have the same card. Rank 0 decides, so all ranks get the same answer. Collective.

    Args:
        store: A ``torch.distributed`` store that only this world uses.
        rank, world_size: This rank's place in the world.
        card: A name that no other card has.
    """
    store.set(f"card/{rank}", card)
    if rank == 0:
        cards = [bytes(answer).decode() for answer in store.multi_get([f"card/{peer}" for peer in range(world_size)])]
        most, different = max(Counter(cards).values()), len(set(cards))
        if most > 1:
            remark(
                "%d ranks share %d card%s, up to %d on one: gloo takes NCCL's place, and training is slow. Start as "
                "many workers on each node as it has cards of its own: --nproc-per-node=gpu, CUDA_VISIBLE_DEVICES",
                *(world_size, different, "" if different == 1 else "s", most),
            )
        store.set("shared", str(int(most > 1)))
    return bytes(store.get("shared")) == b"1"


def _init_on_cards(device: torch.device) -> None:
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    store = dist.PrefixStore("dalsegno/training", store)  # type: ignore[attr-defined]  # as HashStore
    shared = shared_cards(store, rank, world_size, _name(device))
    dist.init_process_group(
        _backend(device, shared=shared),
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=None if shared else device,
    )


def _name(device: torch.device) -> str:
    """A name that no other card has; if torch gives none, a name that no other process has.

    What `NCCL_HOSTID` names are different hosts for NCCL: it takes ranks of two of them on one card.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    card = f"{socket.gethostname()}/{os.getpid()}" if uuid is None else str(uuid)
    return f"{os.environ.get('NCCL_HOSTID', '')}/{card}"


def _backend(device: torch.device, *, shared: bool) -> str | None:
    """The backend for where this training computes; torch would choose one by what the machine has."""
    if device.type == "cpu" or shared:
        return "gloo"
    return BOTH if device.type == "cuda" else None


def is_the_only_group() -> bool:
    """Whether the default process group is the only one of this process: no script has made others of it."""
    known = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    return dist.is_initialized() and known is not None and len(known) == 1

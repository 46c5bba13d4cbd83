"""What is asked of the Hugging Face Hub, through ``huggingface_hub``. Imported in a process of its own only."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
    set_client_factory,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from dalsegno.protos.grouping import grouped

from .run_manifest import FOLDER, MANIFEST_PATH, MAX_BYTES, METRICS_PATH, File, RunManifest, git_blob_id
from .snapshot import local_path

__all__ = ("RefusedMilestone", "download", "is_of_xet", "publish")

Tell = Callable[[dict[str, Any]], None]
Operation = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete

# The library itself sets no limit: a hub that takes a request and never answers would hold an upload for good.
TIMEOUT = httpx.Timeout(60.0, connect=15.0)
# What is sent before the next part begins: what is finished need not be sent again after a kill.
GROUP_FILES, GROUP_BYTES = 64, 1 << 30
THREADS = 2
COMMIT_TRIES = FETCH_TRIES = 4


class RefusedMilestone(Exception):
    """A revision does not hold what a milestone must hold; one line."""


def _client() -> httpx.Client:
    # One context: else httpx reads all certificates anew for each proxy that the environment names.
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT, verify=httpx.create_ssl_context())


def _api(token: str) -> HfApi:
    set_client_factory(_client)
    return HfApi(token=token or False)


def is_of_xet(error: BaseException) -> bool:
    """Whether the Xet way failed. Its library raises what is neither of HTTP nor the file system's."""
    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    of_files = isinstance(error, OSError) and error.errno is not None
    return not (of_files or isinstance(error, (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError)))


def _status(error: HfHubHTTPError) -> int:
    return error.response.status_code if error.response is not None else 0


def publish(job: dict[str, Any], token: str, tell: Tell) -> None:
    """Uploads a snapshot, and tells the commit that holds it.

    Large files go first, those that the hub does not have yet. One commit then adds everything: it names its parent,
    so that nobody else's commit is overwritten and no second one is made where an answer was lost.
    """
    api, repo = _api(token), str(job["repo"])
    directory = Path(job["snapshot"])
    text = (directory / MANIFEST_PATH).read_bytes()
    manifest = RunManifest.from_bytes(text)
    _make(api, repo, bool(job["private"]))
    for number in range(COMMIT_TRIES):
        # The head before anything is compared with it: if it moves meanwhile, the commit is refused.
        head = str(api.model_info(repo).sha)
        found = _find(api, repo, manifest, text)
        if found:
            tell({"revision": found})
            return
        additions = [_addition(directory, manifest, one) for one in manifest.files]
        for group in grouped(additions, lambda addition: addition.upload_info.size, GROUP_FILES, GROUP_BYTES):
            api.preupload_lfs_files(repo, additions=group, num_threads=THREADS)
            tell({"sent": len(group)})
        tell({"phase": "payload"})
        own = CommitOperationAdd(MANIFEST_PATH, text)
        operations: list[Operation] = [*additions, own, *_deletions(api, repo, head, manifest)]
        try:
            made = api.create_commit(
                repo, operations, commit_message=manifest.title, parent_commit=head, num_threads=THREADS
            )
        except (httpx.HTTPError, HfHubHTTPError) as error:
            if not _may_have_happened(error) or number == COMMIT_TRIES - 1:
                found = _find(api, repo, manifest, text) if _may_have_happened(error) else ""
                if not found:
                    raise
                tell({"revision": found})
                return
            time.sleep(2.0**number)  # why: the hub is busy, or still at work on the commit whose answer was lost
            continue
        problem = _problem(api, repo, str(made.oid), manifest, text)
        if problem:
            raise RefusedMilestone(f"{repo}@{made.oid}: {problem}")
        tell({"revision": str(made.oid)})
        return


def _may_have_happened(error: Exception) -> bool:
    """Whether the commit may be there, or another try may help: no answer, a server's error, another head."""
    return not isinstance(error, HfHubHTTPError) or _status(error) in (0, 408, 409, 412, 429) or _status(error) >= 500


def _make(api: HfApi, repo: str, private: bool) -> None:
    try:
        api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private, exist_ok=True)


def _addition(directory: Path, manifest: RunManifest, one: File) -> CommitOperationAdd:
    addition = CommitOperationAdd(one.path, str(local_path(directory, manifest.checkpoint, one.path)))
    if not addition.upload_info.is_hashed:
        addition.upload_info.sha256 = bytes.fromhex(one.sha256)  # it was read when it was frozen
    return addition


def _deletions(api: HfApi, repo: str, head: str, manifest: RunManifest) -> list[CommitOperationDelete]:
    """What the milestone before had and this one does not have. Nothing else of the repository is touched."""
    mine = {one.path for one in manifest.files}
    return [
        CommitOperationDelete(path, is_folder=False)
        for path in _tree(api, repo, head)
        if _is_ours(path) and path not in mine
    ]


def _is_ours(path: str) -> bool:
    return path.startswith(f"{FOLDER}/") or path == METRICS_PATH


def _tree(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    listed = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {one.path: one for one in listed if isinstance(one, RepoFile)}


def _find(api: HfApi, repo: str, manifest: RunManifest, text: bytes) -> str:
    """The commit that made this milestone, if it was made before; "" if not."""
    for commit in api.list_repo_commits(repo):
        if commit.title.startswith(manifest.mark) and not _problem(api, repo, commit.commit_id, manifest, text):
            return str(commit.commit_id)
    return ""


def _problem(api: HfApi, repo: str, revision: str, manifest: RunManifest, text: bytes) -> str:
    """What is wrong with a revision that is to hold exactly this milestone, by what the hub lists; "" if nothing is."""
    there = _tree(api, repo, revision)
    problem = _listing_problem(there, manifest)
    own = there.get(MANIFEST_PATH)
    if problem or own is None:
        return problem or f"{MANIFEST_PATH} is missing"
    same = own.lfs.sha256 == hashlib.sha256(text).hexdigest() if own.lfs else own.blob_id == git_blob_id(text)
    return "" if same else f"{MANIFEST_PATH} is another one"


def _listing_problem(there: dict[str, RepoFile], manifest: RunManifest) -> str:
    for one in manifest.files:
        file = there.get(one.path)
        if file is None:
            return f"{one.path} is missing"
        if file.size != one.size:
            return f"{one.path} has {file.size} bytes instead of {one.size}"
        if file.lfs is not None and file.lfs.sha256 != one.sha256:
            return f"{one.path} has another checksum"
    mine = {one.path for one in manifest.files}
    extra = sorted(path for path in there if _is_ours(path) and path not in mine)
    return f"{extra[0]} does not belong to it" if extra else ""


def download(job: dict[str, Any], token: str, tell: Tell) -> None:
    """Fetches a revision into a directory, file by file; those that are there and right are not fetched again.

    Raises:
        RefusedMilestone: it is none of ours, or not what its manifest says.
    """
    api, repo, target = _api(token), str(job["repo"]), Path(job["target"])
    try:
        revision = str(api.model_info(repo, revision=job["revision"]).sha)
    except RevisionNotFoundError as error:
        raise RefusedMilestone(f"{repo} has no revision {job['revision']}") from error
    there = _tree(api, repo, revision)
    if job["milestone"]:
        if MANIFEST_PATH not in there:
            raise RefusedMilestone(f"{repo}@{revision}: it has no {MANIFEST_PATH}: no milestone of ours")
        if there[MANIFEST_PATH].size > MAX_BYTES:
            raise RefusedMilestone(f"{repo}@{revision}: its {MANIFEST_PATH} is too large")
        _bring(api, repo, revision, MANIFEST_PATH, target, *_listed(there[MANIFEST_PATH]))
        text = (target / MANIFEST_PATH).read_bytes()
        try:
            manifest = RunManifest.from_bytes(text)
        except ValueError as error:
            raise RefusedMilestone(f"{repo}@{revision}: {MANIFEST_PATH}: {error}") from error
        if problem := _listing_problem(there, manifest):
            raise RefusedMilestone(f"{repo}@{revision}: {problem}")
        wanted = {one.path: (one.size, one.sha256, "") for one in manifest.files}
    else:
        wanted = {path: _listed(one) for path, one in there.items()}
    _check_room(target, {path: size for path, (size, _, _) in wanted.items()})
    for path, sums in sorted(wanted.items()):
        _bring(api, repo, revision, path, target, *sums)
        tell({"fetched": path})
    tell({"downloaded": revision, "paths": sorted(wanted)})


def _listed(one: RepoFile) -> tuple[int, str, str]:
    """Its size, and its SHA-256 or else its blob id, as the hub lists them."""
    return one.size, one.lfs.sha256 if one.lfs else "", "" if one.lfs else one.blob_id


def _bring(api: HfApi, repo: str, revision: str, path: str, target: Path, size: int, sha256: str, blob_id: str) -> None:
    """Fetches one file unless it is there and right. Raises RefusedMilestone if what comes is not right either."""
    for anew in (False, True):
        if _is_right(target / path, size, sha256, blob_id):
            return
        # What is there and wrong, as after a power cut, is fetched anew; the library would take it for good.
        _fetched(api, repo, revision, path, target, anew=anew or (target / path).exists())
    if not _is_right(target / path, size, sha256, blob_id):
        raise RefusedMilestone(f"{repo}@{revision}: {path} is not what its checksum says")


def _check_room(target: Path, sizes: Mapping[str, int]) -> None:
    """Raises OSError (ENOSPC) if the files that are not there yet have no room, with how much is missing."""
    # A download that was killed has left a part of a file, which nothing goes on from.
    for left in target.glob(".cache/**/*.incomplete"):
        left.unlink(missing_ok=True)
    to_come = sum(
        size for path, size in sizes.items() if not (target / path).is_file() or (target / path).stat().st_size != size
    )
    free = shutil.disk_usage(target).free
    if to_come > free:
        more = math.ceil((to_come - free) / 1e6)
        raise OSError(errno.ENOSPC, f"{to_come / 1e6:.1f} MB are to come, and {more} MB of room for that are missing")


def _fetched(api: HfApi, repo: str, revision: str, path: str, target: Path, anew: bool = False) -> Path:
    """One file, tried a few times: the library tries again what is cut, and not what a server's error ends."""
    for number in range(FETCH_TRIES):
        try:
            return Path(api.hf_hub_download(repo, path, revision=revision, local_dir=target, force_download=anew))
        except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            # Of the same family is a hub that cannot be reached.
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                raise RefusedMilestone(f"{repo}@{revision}: {path} is missing") from error
            if number == FETCH_TRIES - 1:
                raise
        time.sleep(2.0**number)  # why: the hub is busy
    raise AssertionError("the last try returns or raises")


def _is_right(path: Path, size: int, sha256: str, blob_id: str) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
        return False
    digest = hashlib.sha256() if sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest() == (sha256 or blob_id)

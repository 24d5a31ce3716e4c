"""Policies of a run as Hugging Face folders, RUN/policies/version=...: each appears whole.

On a disk a folder is renamed into place. On S3 config.json, without which nothing takes a folder for a model, is last.
"""

import shutil
from functools import partial
from pathlib import Path

from tasks.errors import StoreError
from tasks.store.checkpoints import check_newest
from tasks.store.filesystem import files_of, reason_of
from tasks.store.layout import RunFolder, policy_key

MODEL_CONFIG = "config.json"


def has_policy(folder: RunFolder, version: int) -> bool:
    """True when a run has the whole policy of a version."""
    return bool(files_of(folder).keys(f"{policy_key(version)}/{MODEL_CONFIG}"))


def unfinished_policy(folder: RunFolder, version: int) -> Path:
    """Where, on this machine, a policy is written before it is published."""
    return folder.tmp / f"policy-{version:06d}"


def publish_policy(folder: RunFolder, version: int, incarnation: int) -> str:
    """Make what lies in `unfinished_policy` the policy of a version; returns where it is.

    Args:
        folder: of the run.
        version: of the policy.
        incarnation: that of the trainer which publishes; before a request to S3 run.json is asked whether it is the newest.

    Raises:
        LeaseLostError: a newer trainer has loaded the run.
        StoreError: it could not be stored.
    """
    unfinished, key = unfinished_policy(folder, version), policy_key(version)
    if folder.is_local:
        target = folder.policy(version)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {reason_of(error)}") from error
        return str(target)
    from tasks.store.s3 import objects_of

    stored, check = objects_of(RunFolder(folder.path(key))), partial(check_newest, folder, key, incarnation)
    names = sorted(
        path.relative_to(unfinished).as_posix() for path in unfinished.rglob("*") if path.is_file()
    )
    for name in sorted(names, key=MODEL_CONFIG.__eq__):
        stored.upload(unfinished / name, name, check)
    shutil.rmtree(unfinished)
    return folder.path(key)

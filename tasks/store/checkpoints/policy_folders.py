"""Policies of a run as Hugging Face folders, RUN/policies/version=..., each published whole.

On a disk the folder is renamed into place. On S3 config.json, without which nothing loads a folder as a model, is
uploaded last.
"""

import shutil
from functools import partial
from pathlib import Path

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.checkpoints.checkpoint_store import check_newest_trainer
from rollmill.tasks.store.filesystem import describe_os_error, move_into_place, open_files
from rollmill.tasks.store.folders import RunFolder, policy_key

MODEL_CONFIG = "config.json"


def has_policy(folder: RunFolder, version: int) -> bool:
    """Return True if all files of the policy of a version are stored."""
    return bool(open_files(folder).keys(f"{policy_key(version)}/{MODEL_CONFIG}"))


def staging_folder(folder: RunFolder, version: int) -> Path:
    """Return the folder on this machine where a policy is written before it is published."""
    return folder.tmp / f"policy-{version:06d}"


def publish_policy(folder: RunFolder, version: int, incarnation: int) -> str:
    """Publish the content of `staging_folder` as the policy of a version; returns the path of the published folder.

    Args:
        folder: folder of the run.
        version: number of the policy version.
        incarnation: number of the trainer that publishes it; checked against run.json before each request to S3.

    Raises:
        LeaseLostError: a newer trainer has loaded the run.
        StoreError: it could not be stored.
    """
    staged, key = staging_folder(folder, version), policy_key(version)
    if folder.is_local:
        target = folder.policy(version)
        try:
            move_into_place(staged, target)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {describe_os_error(error)}") from error
        return str(target)
    # s3fs and botocore take a second to import, and only runs on S3 need them.
    from rollmill.tasks.store.s3.s3_files import open_objects

    stored = open_objects(RunFolder(folder.path(key)))
    check = partial(check_newest_trainer, folder, key, incarnation)
    names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
    # False sorts before True: config.json, without which nothing loads the folder, comes last.
    for name in sorted(names, key=MODEL_CONFIG.__eq__):
        stored.upload(staged / name, name, check)
    shutil.rmtree(staged)
    return folder.path(key)

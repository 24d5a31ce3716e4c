"""vLLM's general plugin of this distribution: registers the weight-transfer engine `rollmill`, and shortens a start."""

from contextlib import suppress

from rollmill.tasks.sync.vllm_plugin.private_vllm import REGISTER_ENGINE, fork_engine

BACKEND = "rollmill"


def register() -> None:
    """Register Rollmill's weight transfer engine by name, which vLLM imports when a server asks for it; let engines fork."""
    fork_engine()
    # vLLM calls this in each of its processes, in some more than once; the second call finds it registered.
    with suppress(ValueError):
        REGISTER_ENGINE.find()(
            BACKEND, "rollmill.tasks.sync.vllm_plugin.transfer_engine", "RollmillWeightTransferEngine"
        )

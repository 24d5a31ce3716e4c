"""What vLLM loads from this distribution: the weight-transfer engine `rollmill`, by its name alone."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "rollmill"


def register() -> None:
    """Register the engine; vLLM calls this once or more in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "tasks.sync.engine", "RollmillWeightTransferEngine"
        )

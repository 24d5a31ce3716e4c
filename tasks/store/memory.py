"""Arrow's memory."""

import pyarrow as pa


def arrow_bytes() -> int:
    """Bytes that live Arrow arrays of this process have."""
    allocated: int = pa.default_memory_pool().bytes_allocated()
    return allocated


def release_arrow() -> None:
    """Give what Arrow's pool keeps for later back to the system."""
    pa.default_memory_pool().release_unused()

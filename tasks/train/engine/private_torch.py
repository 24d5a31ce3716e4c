"""Every use of what torch has and does not document. Seen in torch 2.13.0.

| undocumented | for | public alternative |
|---|---|---|
| `torch.distributed.distributed_c10d.Store`, `PrefixStore` | keys that ranks share | the same names in `torch.distributed`, which have no types |
"""

import torch

from rollmill.tasks.errors import LibraryError

SEEN_IN = "2.13.0"

try:
    from torch.distributed.distributed_c10d import PrefixStore, Store
except ImportError as error:
    raise LibraryError("torch", torch.__version__, SEEN_IN, str(error)) from error

__all__ = ["PrefixStore", "Store"]

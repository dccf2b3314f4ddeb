import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_trace_of_a_distributed_run() -> Iterator[None]:
    """A strategy that starts a process group leaves ``LOCAL_RANK`` and the like, which the next script would obey."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)

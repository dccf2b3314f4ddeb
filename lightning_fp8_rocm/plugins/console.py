"""What the plugins tell the person who runs them."""

import logging

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("lightning_fp8_rocm")
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)  # the conversion table shows unless the user turns this logger down


@rank_zero_only
def say(line: str) -> None:
    """One line on rank 0, unless the user turned this package's logger down."""
    if log.isEnabledFor(logging.INFO):
        from rich.console import Console

        Console().print(line, highlight=False, soft_wrap=True)

"""Kill this process between two of its calls that change files, to see what is on disk then.

killed.install(at=7, torn=False)  # in a process of its own
save()                            # dies just before the 7th such call
print(killed.count())             # or ends, and says how many there were
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning_fp8_rocm.distributed import publish

OF_OS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir")  # `shutil` and `pathlib` call these

_lock = threading.Lock()
_seen: list[str] = []
_at, _torn, _only_when = 0, False, lambda: True
_wrapped = False


def install(at: int, torn: bool = False, only_when: Callable[[], bool] = lambda: True) -> None:
    """Count from now on, in every thread, and send SIGKILL just before call number `at`; 0 for never.

    With `torn`, half of the data gets to the kernel if that call is a write. Only calls for which `only_when` returns
    True count.
    """
    global _at, _torn, _only_when, _wrapped
    _at, _torn, _only_when = at, torn, only_when
    _seen.clear()
    if _wrapped:
        return
    _wrapped = True
    for name in OF_OS:
        setattr(os, name, _counted(name, getattr(os, name)))
    publish._exchange = _counted("exchange", publish._exchange)
    publish.CheckedFile.write = _counted("write", publish.CheckedFile.write, _write_half)


def count() -> int:
    """How many calls there were since `install`."""
    return len(_seen)


def calls() -> list[str]:
    """Which they were: `"write"`, `"exchange"`, or the name in `os`."""
    return list(_seen)


def _counted(name: str, call: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        if _only_when():
            with _lock:
                _seen.append(name)
                if len(_seen) == _at:
                    if _torn and half is not None:
                        half(call, *args)
                    os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counting


def _write_half(write: Callable[..., int], file: publish.CheckedFile, data: Any) -> None:
    view = memoryview(data).cast("B")
    write(file, view[: len(view) // 2])
    file.flush()

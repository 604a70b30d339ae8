"""The one thread of a process that talks to its devices, so that the event loop never blocks on them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any


class DeviceThread:
  """Runs device work in the order of submission; collectives of several processes meet because all keep this order."""

  def __init__(self):
    self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='device')

  async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Awaits `function(*args, **kwargs)` on the device thread."""
    return await asyncio.get_running_loop().run_in_executor(
      self._executor, functools.partial(function, *args, **kwargs)
    )

  def close(self) -> None:
    self._executor.shutdown(wait=True, cancel_futures=True)

"""Several coroutines as one: for what goes on in several runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Until all have ended. The first error is raised as it is, once the others have been cancelled and have ended."""
    tasks = [asyncio.create_task(coroutine, name=coroutine.__qualname__) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

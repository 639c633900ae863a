"""A Redis URL works as a whole, or is refused in one line."""

from __future__ import annotations

import random

from tests.hostile import redis_urls
from tests.hostile.judge import Tally


def test_a_url_works_or_is_refused_in_one_line(redis_url: str) -> None:
    tally, choose = Tally("Redis URLs"), random.Random(0).randrange
    for number in range(150):
        url = redis_urls.make(choose, redis_url)
        tally.take(f"{number}: {url[:200]!r}", lambda url=url: redis_urls.use(url))  # type: ignore[misc]
    tally.check()
    assert {"works", "ConfigError", "StreamError"} == set(tally.outcomes)

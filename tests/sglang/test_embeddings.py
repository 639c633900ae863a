"""Embeddings of real SGLang, which makes them of a model that it serves for nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import openai

from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.passage import passing
from tests.serving.sglang.outside.fake_sglang import FakeSglang
from tests.sglang.server import SglangServer, dtype_flags

NAME = "SmolLM2-135M-Instruct"


def test_openais_client_gets_embeddings(model_dir: Path, tmp_path: Path) -> None:
    async def embed(url: str) -> np.ndarray:
        draft = DoubleEngine(model=NAME)
        async with (
            passing(FakeSglang(), draft=draft, urls=(url,)) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            texts = ["A cat sleeps.", "A kitten is asleep.", "Stocks fell on Monday."]
            answer = await client.embeddings.create(model=NAME, input=texts)
            assert answer.usage.prompt_tokens > 10
            whole = await client.embeddings.create(model=NAME, input=texts[0], encoding_format="float")
            np.testing.assert_allclose(whole.data[0].embedding, answer.data[0].embedding, atol=0.02)
            return np.array([each.embedding for each in answer.data])

    flags = ["--is-embedding", "--served-model-name", NAME, *dtype_flags()]
    with SglangServer(model_dir, log_path=tmp_path / "log", flags=flags) as server:
        cat, kitten, stocks = asyncio.run(embed(server.url))
    assert cat @ kitten > cat @ stocks

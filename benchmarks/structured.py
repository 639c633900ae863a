"""Check answers that follow JSON schemas: they are valid, and equal with drafts and by plain decoding.

    python -m benchmarks.structured [--quick] [--json FILE]

Fifty schemas as clients send them (thirteen with --quick), greedy, on the local engine in float32, whose sums do not
depend on what else is in a pass. Half of the prompts quote the schema.
"""

from __future__ import annotations

import asyncio
import json

import jsonschema

from benchmarks.common.engines import engine_with
from benchmarks.common.report import Target, finish, parser
from serving.acceptance import Acceptance
from serving.engine import GenerateRequest
from serving.grammar import json_grammar
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from tests.fixtures.schemas import SCHEMAS, Schema

_MAX_TOKENS = 160


async def _answer(engine: LocalEngine, number: int, schema: Schema, acceptance: Acceptance) -> str:
    asked = "Give an example." if number % 2 else f"Give an example of {json.dumps(schema)}"
    request = GenerateRequest(
        request_id=str(number),
        prompt_token_ids=tuple(engine.tokenizer.encode_chat([{"role": "user", "content": asked}])),
        max_tokens=_MAX_TOKENS,
        sampling=SamplingParams(temperature=0),
        grammar=json_grammar(schema),
    )
    text = ""
    async for chunk in engine.generate(request):
        text += chunk.text
        if chunk.num_proposed is not None:
            acceptance.add(chunk.num_proposed, chunk.num_accepted)
    return text


def _is_valid(text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    options = parser(__doc__ or "", has_prompts=False)
    arguments = options.parse_args()
    schemas = SCHEMAS[:: 4 if arguments.quick else 1]
    model_dir = resolve_model(arguments.model)
    texts, accepted = {}, Acceptance()
    for depth in (0, 4):
        settings = {"depth": depth, "dtype": "float32", "control_share": 0.0}
        with engine_with(model_dir, fresh_draft(model_dir, seed=0), 2, settings=settings) as engine:
            accepted = Acceptance()
            # One after the other, so that suffix drafts can use earlier answers.
            texts[depth] = [
                asyncio.run(_answer(engine, number, schema, accepted)) for number, schema in enumerate(schemas)
            ]
    num_valid = sum(map(_is_valid, texts[4], schemas))
    num_same = sum(one == other for one, other in zip(texts[0], texts[4], strict=True))
    finish(
        [
            ("schemas", len(schemas)),
            ("valid", num_valid),
            ("as by plain decoding", num_same),
            ("proposals accepted", f"{accepted.num_accepted} of {accepted.num_proposed}"),
        ],
        [Target("valid", num_valid, len(schemas)), Target("same", num_same, len(schemas))],
        {"schemas": len(schemas), "valid": num_valid, "same": num_same, "accepted": accepted.num_accepted},
        arguments.json,
    )


if __name__ == "__main__":
    main()

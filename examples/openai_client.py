"""Stream an answer from a Slipstream server with the `openai` client, and print how many proposals were accepted.

python -m examples.openai_client http://127.0.0.1:8000/v1 "Count to thirty."
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def ask(url: str, prompt: str) -> float:
    """Print an answer as it comes; returns its mean accept length (tokens a verification)."""
    # A server without keys accepts any key.
    client = OpenAI(base_url=url, api_key=os.environ.get("SLIPSTREAM_API_KEY", "none"))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=200,
        temperature=0,
        stream=True,
        # The last event then has the usage, with the number of accepted proposals.
        stream_options={"include_usage": True},
        # For your own use: the server accepts and ignores it.
        metadata={"trip": "summer"},
        # Slipstream's own: the trainer keeps domains apart. `"capture": False` would record no trace of this answer.
        extra_body={"slipstream": {"domain": "examples"}},
    )
    length = 1.0
    for event in stream:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage is None:
            continue
        details = event.usage.completion_tokens_details
        accepted = details.accepted_prediction_tokens if details else None
        print(f"\n\n{event.usage.completion_tokens} tokens, of which {accepted or 0} were proposed and accepted")
        # Not a field of OpenAI's, so the client has it in `model_extra`. SGLang 0.5.17 does not send it.
        told = (event.model_extra or {}).get("metrics", {}).get("speculative_decoding", {})
        length = told.get("mean_acceptance_length", length)
        print(f"a verification committed {length:.2f} tokens; without drafts it commits 1")
    return length


if __name__ == "__main__":
    ask(*sys.argv[1:])

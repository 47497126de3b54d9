# SPDX-License-Identifier: Apache-2.0
"""Asks a question about documents, in two orders. The server prefills each document once and reads it from the
cache wherever it stands in the prompt: docs/documents.md.

python examples/rag.py --url http://127.0.0.1:30000 --question "Who pays?" contract.txt letter.txt
"""

import argparse
import time
from pathlib import Path

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path, help="text files")
    parser.add_argument("--question", required=True)
    parser.add_argument("--repair", default="none", help="none, first:TOKENS or query:SHARE")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server listens")
    parser.add_argument("--most", type=int, default=200, help="most tokens of the answer")
    options = parser.parse_args()

    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    for documents in (options.documents, options.documents[::-1]):
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "Answer from the documents."}
        ]
        for text in (*(path.read_text() for path in documents), options.question):
            messages.append({"role": "user", "content": text})
        begun = time.perf_counter()
        first = None
        text = ""
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=options.most,
            stream=True,
            extra_body={
                # All messages between the first and the last are documents.
                "custom_params": {"documents": "messages", "documents_repair": options.repair},
                "separate_reasoning": False,
            },
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = first or time.perf_counter() - begun
                text += piece
        print(f"{', '.join(path.name for path in documents)}: first token after {first or 0:.3f} s")
        print(text)

    report = httpx.get(f"{options.url}/reasoncache").raise_for_status().json()
    for scheduler in report["schedulers"]:
        totals = scheduler["totals"]
        print(
            f"documents read from the cache: {totals['documents_composed']}, "
            f"documents off: {scheduler['documents_off'] or 'no'}"
        )


if __name__ == "__main__":
    main()

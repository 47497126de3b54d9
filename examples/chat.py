# SPDX-License-Identifier: Apache-2.0
"""Asks a running server one question with OpenAI's client, then asks what the plugin did.

python examples/chat.py --url http://127.0.0.1:30000 "Why is the sky blue?"
"""

import argparse

import httpx
import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server listens")
    parser.add_argument("--most", type=int, default=1000, help="most tokens of the answer")
    options = parser.parse_args()

    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=options.most,
    )
    print(answer.choices[0].message.content)

    report = httpx.get(f"{options.url}/reasoncache").raise_for_status().json()
    for scheduler in report["schedulers"]:
        totals = scheduler["totals"]
        print(
            f"blocks shared since the start: {totals['blocks_shared']}, "
            f"slots saved now: {scheduler['slots_saved_now']}, "
            f"disabled: {scheduler['disabled'] or 'no'}"
        )


if __name__ == "__main__":
    main()

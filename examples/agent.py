# SPDX-License-Identifier: Apache-2.0
"""A tool loop that keeps the reasoning of earlier turns in the history, so that the next turn finds it cached.

The tool is a queue of tasks: the answer in ``\\boxed{...}`` goes in, the next task comes out. Put your own tool
in its place.

python examples/agent.py --url http://127.0.0.1:30000 "Solve x + 3 = 5." "Now solve x + 3 = 6."
"""

import argparse
import re
from collections.abc import Iterator

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam


def tool(tasks: Iterator[str], answer: str) -> str | None:
    """Takes the model's answer to a task. Returns the next task; None after the last."""
    print(f"the tool got: {answer}")
    return next(tasks, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server listens")
    parser.add_argument("--most", type=int, default=1000, help="most tokens of a turn")
    options = parser.parse_args()

    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    tasks = iter(options.tasks)
    history: list[ChatCompletionMessageParam] = []
    task = next(tasks, None)
    while task is not None:
        history.append({"role": "user", "content": task})
        turn = client.chat.completions.create(
            model=model,
            messages=history,
            temperature=0,
            max_tokens=options.most,
            # The reasoning stays in the content, also on a server with --reasoning-parser.
            extra_body={"separate_reasoning": False},
        )
        said = turn.choices[0].message.content or ""
        history.append({"role": "assistant", "content": said})
        boxed = re.findall(r"\\boxed\{(.*?)\}", said)
        task = tool(tasks, boxed[-1].strip() if boxed else "no answer")

    report = httpx.get(f"{options.url}/reasoncache").raise_for_status().json()
    for scheduler in report["schedulers"]:
        totals = scheduler["totals"]
        print(
            f"prompts that went on with a response that shared: {totals['prompts_continued']}, "
            f"tokens read from it: {totals['tokens_continued']}"
        )


if __name__ == "__main__":
    main()

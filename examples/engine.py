# SPDX-License-Identifier: Apache-2.0
"""Generates offline, without a server: ``sglang.Engine`` takes the plugin's settings as one mapping.

python examples/engine.py --model MODEL "<|user|> ... <|assistant|>"
"""

import argparse

import sglang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+", help="texts as the model's chat template makes them")
    parser.add_argument("--model", required=True, help="folder or name of the model")
    parser.add_argument("--device", help="cpu or cuda; default: SGLang chooses")
    parser.add_argument("--slots", type=int, help="KV slots; default: SGLang chooses")
    parser.add_argument("--when", default="short", choices=("short", "always"))
    parser.add_argument("--most", type=int, default=1000, help="most tokens of a response")
    options = parser.parse_args()

    engine = sglang.Engine(
        model_path=options.model,
        device=options.device,
        max_total_tokens=options.slots,
        enable_reasoncache={"when": options.when},
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": options.most}
        for response in engine.generate(options.prompts, sampling):
            print(response["text"])
        for state in engine.get_server_info()["internal_states"]:
            print(f"blocks shared: {state['reasoncache']['totals']['blocks_shared']}")
    finally:
        engine.shutdown()


# SGLang spawns processes that import this file again.
if __name__ == "__main__":
    main()

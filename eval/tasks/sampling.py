# SPDX-License-Identifier: Apache-2.0
"""How the makers of a model say it should be sampled."""

import re
from typing import Any

# Of a request's body as SGLang takes it; max_tokens counts reasoning too.
_DEFAULT = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768}
_QWEN3 = {"top_k": 20, "min_p": 0.0}
# The first expression that is found in the model's name counts; "-", "_" and " " are the same.
_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    # Their READMEs: evaluated greedily.
    (r"(tiny|small)-reasoner", {"temperature": 0.0, "top_p": 1.0, "max_tokens": 1500}),
    # huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-32B, "Usage Recommendations": temperature
    # 0.6; its evaluation: top-p 0.95, at most 32,768 tokens. Before Qwen3: DeepSeek-R1-0528-Qwen3-8B.
    (r"deepseek-r1", {}),
    # huggingface.co/Qwen/QwQ-32B, "Usage Guidelines": 0.6, 0.95, MinP 0, TopK between 20 and 40.
    (r"qwq", {"top_k": 40, "min_p": 0.0}),
    # huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507, "Best Practices": the variants without thinking.
    (r"qwen3.*instruct", {"temperature": 0.7, "top_p": 0.8, "max_tokens": 16384, **_QWEN3}),
    # huggingface.co/Qwen/Qwen3-32B, "Best Practices", thinking mode.
    (r"qwen3", _QWEN3),
    # huggingface.co/microsoft/Phi-4-reasoning-plus, "Inference Parameters": 0.8, top_k 50, top_p 0.95.
    (r"phi-4-reasoning", {"temperature": 0.8, "top_k": 50}),
    # huggingface.co/microsoft/Phi-4-mini-reasoning, its example: 0.8, top_p 0.95.
    (r"phi-4-mini-reasoning", {"temperature": 0.8}),
    # github.com/openai/gpt-oss, "Recommended Sampling Parameters": temperature 1.0, top_p 1.0.
    (r"gpt-oss", {"temperature": 1.0, "top_p": 1.0}),
)


def sampling_for(model_name: str) -> dict[str, Any]:
    """The official settings of a model's family, whose name may stand anywhere in the last part of
    a hub name or folder, else temperature 0.6 and top-p 0.95."""
    parts = [part for part in model_name.split("/") if part] or [""]
    # The folder of a training run's checkpoint does not name the model.
    if len(parts) > 1 and re.fullmatch(r"checkpoint(-[0-9]+)?", parts[-1]):
        del parts[-1]
    # The hub's cache: models--OWNER--NAME/snapshots/REVISION.
    cached = next((part.rpartition("--")[2] for part in parts if part.startswith("models--")), "")
    name = re.sub(r"[-_ ]+", "-", (cached or parts[-1]).lower())
    own = next((own for expression, own in _FAMILIES if re.search(expression, name)), {})
    return {**_DEFAULT, **own}

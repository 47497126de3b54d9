# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.quotes MODEL > FILE`` has a model edit source files of this project: a prompt shows a file,
and the response first quotes what must change, then writes the whole file again, as agents do that write code.
Prints rows for ``python -m eval.fidelity MODEL FILE``."""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.command import option, parse
from eval.fidelity.responses import device_option

_SOURCES = Path(__file__).parent.parent / "sglang_reasoncache"
#: Bytes of a file that is shown: it and its copy fit into ``--cap`` of ``eval.fidelity``.
_SIZES = range(1_800, 3_600)
ASK = (
    "Rename the first function or class to {name}, wherever it is used. First quote the lines that change. "
    "Then write the whole new file, with every line that stays as it is."
)


@dataclass(frozen=True)
class Options:
    model: Path = option(text="Hugging Face folder of an instruction-tuned model")
    count: int = option(8, "files that the model is asked to change", least=1)
    most: int = option(1_200, "most tokens of a response", least=1)
    device: str = device_option()


def edits(count: int) -> Iterator[tuple[str, str, str]]:
    """Up to ``count`` files: name, text, and what the model is asked to do."""
    files = [file for file in sorted(_SOURCES.rglob("*.py")) if file.stat().st_size in _SIZES]
    for file in files[:: max(1, len(files) // count)][:count]:
        name = file.relative_to(_SOURCES.parent).as_posix()
        text = file.read_text()
        task = ASK.format(name=f"renamed_{file.stem}")
        yield name, text, f"This is {name}:\n\n```python\n{text}```\n\n{task}"


def is_edited(before: str, response: str) -> bool:
    """Whether the last code in ``response`` is Python with as many statements as ``before``."""
    code = response.rpartition("```python\n")[2].partition("```")[0]
    try:
        return len(ast.parse(code).body) == len(ast.parse(before).body)
    except (SyntaxError, ValueError):
        return False


def main() -> None:
    options = parse(Options)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, local_files_only=True, dtype=torch.float32
    )
    model.to(options.device)
    for name, text, question in edits(options.count):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(options.device)
        with torch.no_grad():
            [tokens] = model.generate(**prompt, max_new_tokens=options.most, do_sample=False)
        response = tokenizer.decode(
            tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        row = {"id": name, "question": question, "response": response}
        print(json.dumps({**row, "correct": is_edited(text, response)}), flush=True)
        print(f"{name}: {len(tokens)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()

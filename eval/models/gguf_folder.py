# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF file's model and tokenizer as a Hugging Face folder."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def write(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Make ``folder``, completely or not at all, with the weights of ``source`` in ``dtype``. Raises ValueError
    if ``source`` lacks a weight of its model."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(source))["config"], dtype=dtype)
    # On "meta" a model has shapes but no memory, so that all weights are in memory only once.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )
    tensors = {name: torch.as_tensor(value).to(dtype) for name, value in read["tensors"].items()}
    missing, _ = model.load_state_dict(tensors, strict=False, assign=True)
    if missing != (["lm_head.weight"] if config.tie_word_embeddings else []):
        raise ValueError(f"{source}: must hold all weights, lacks {', '.join(missing)}")
    model.tie_weights()
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(folder)

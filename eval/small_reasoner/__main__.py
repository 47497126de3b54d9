# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.small_reasoner`` merges SmolLM2-135M-Instruct and the shipped adapter into one model, a
Hugging Face folder in bf16."""

import shutil
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.small_reasoner import ADAPTER, BASE, MODEL


def write(base: Path, adapter: Path, folder: Path) -> None:
    """Write the merged model to ``folder``, which appears only when it is complete."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().to(torch.bfloat16)
    partial = folder.with_name(f"{folder.name}.partial")
    merged.save_pretrained(partial)
    AutoTokenizer.from_pretrained(base).save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    if not BASE.is_dir():
        sys.exit(f"{BASE} is not there: make small-model makes it")
    made = MODEL / "config.json"
    adapter = ADAPTER / "adapter_model.safetensors"
    if made.exists() and made.stat().st_mtime < adapter.stat().st_mtime:
        shutil.rmtree(MODEL)
    if not MODEL.exists():
        write(BASE, ADAPTER, MODEL)

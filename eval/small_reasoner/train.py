# SPDX-License-Identifier: Apache-2.0
"""Fine-tune SmolLM2-135M-Instruct for the small reasoner's task, on a CPU; see README.md."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eval import command
from eval.command import option
from eval.small_reasoner.task import Difficulty, make_problem
from eval.tiny_reasoner.task import split_of

IGNORE = -100
BATCH_TOKENS = 2400
#: The first SHORT_SHARE of the training steps use problems of size SHORT, which teach arithmetic and format.
SHORT_SHARE = 0.4
SHORT = Difficulty(2, 3, 1, 1)
#: In the loss, each digit has the weight NUMBER_WEIGHT. Only a random WORDS_SHARE of the other tokens is
#: counted, because words are learnt soon and logits over 49,152 tokens are costly.
WORDS_SHARE = 0.25
NUMBER_WEIGHT = 3.0

Example = tuple[list[int], list[int]]  # token ids; their targets: next ids, IGNORE in prompts


def examples(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, size: Difficulty
) -> Iterator[Example]:
    while True:
        problem = make_problem(rng, size)
        if split_of(problem.prompt) != "train":
            continue
        chat = [{"role": "user", "content": problem.prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        start = tokenizer.encode(prompt, add_special_tokens=False)
        rest = tokenizer.encode(problem.response + tokenizer.eos_token, add_special_tokens=False)
        yield start + rest, [IGNORE] * (len(start) - 1) + rest + [IGNORE]


def batch(
    source: Iterator[Example], left: list[Example], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws similarly long examples, at most BATCH_TOKENS tokens in all. Unused examples stay in ``left``."""
    while len(left) < 24:
        left.append(next(source))
    left.sort(key=lambda example: len(example[0]))
    at = rng.randrange(len(left))
    longest = len(left[at][0])
    chosen = left[max(0, at + 1 - max(1, BATCH_TOKENS // longest)) : at + 1]
    for example in chosen:
        left.remove(example)
    columns = ([torch.tensor(example[k]) for example in chosen] for k in (0, 1))
    inputs, targets = (
        pad_sequence(column, batch_first=True, padding_value=value)
        for column, value in zip(columns, (0, IGNORE), strict=True)
    )
    return inputs, targets


@dataclass(frozen=True)
class Options:
    model: str = option(text="folder of SmolLM2-135M-Instruct: make small-model")
    out: Path = option(text="folder of the adapter")
    adapter: Path | None = option(None, "adapter to train further, without short problems")
    shuffled: bool = option(False, "problems that state their facts in any order")
    fewer: bool = option(False, "problems whose facts may say that one has fewer than another")
    steps: int = option(480, "training steps in all")
    rate: float = option(1e-3, "highest learning rate")
    seed: int = option(1, "seed of weights and problems")


def train(args: Options) -> None:
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    if args.adapter:
        model = PeftModel.from_pretrained(base, args.adapter, is_trainable=True)
    else:
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
    inner = base.model
    head = base.lm_head
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    digits = torch.tensor([tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"])
    short = 0 if args.adapter else int(SHORT_SHARE * args.steps)
    for step in range(1, args.steps + 1):
        if step == 1 or step == short:
            size = replace(
                SHORT if step < short else Difficulty(), shuffled=args.shuffled, fewer=args.fewer
            )
            left: list[Example] = []
            source = examples(tokenizer, rng, size)
        inputs, targets = batch(source, left, rng)
        scale = min(1.0, step / 20, 1.02 - step / args.steps)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * scale
        number = torch.isin(targets, digits)
        counted = (targets != IGNORE) & (number | (torch.rand(targets.shape) < WORDS_SHARE))
        with torch.autocast("cpu", torch.bfloat16), disable_input_dtype_casting(model):
            states = inner(inputs, use_cache=False).last_hidden_state
            logits = head(states[counted]).float()
        wanted = targets[counted]
        weight = torch.where(number[counted], NUMBER_WEIGHT, 1.0)
        losses = F.cross_entropy(logits, wanted, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 10 == 0:
            right = (logits.argmax(-1) == wanted)[number[counted]].float().mean()
            print(f"step {step} loss {loss:.4f} digits {right:.4f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.to(torch.bfloat16).save_pretrained(str(args.out))


if __name__ == "__main__":
    command.run(Options, train)

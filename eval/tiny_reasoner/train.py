# SPDX-License-Identifier: Apache-2.0
"""Train the tiny reasoner from scratch on a CPU; the defaults reproduce the shipped checkpoint."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

from eval import command
from eval.command import option
from eval.tiny_reasoner import task as tiny
from eval.tiny_reasoner.model import TOKEN_ID, build_model, encode, save_checkpoint

IGNORE = -100
# Stages: (first training step, difficulty, share of drills). Drills have only arithmetic. Short problems come
# first, because the model learns look-up and arithmetic many times faster from short problems.
CURRICULUM = (
    (0, tiny.Difficulty(2, 4, 0, 1), 0.5),
    (150, tiny.Difficulty(2, 4, 0, 2), 0.1),
    (350, tiny.Difficulty(2, 5, 1, 4), 0.0),
    (600, tiny.Difficulty(3, 5, 2, 4), 0.0),
)
BATCH_TOKENS = 2048
GAP_AFTER = frozenset(encode([tiny.STEP_END, tiny.ASSISTANT]))
WARM_UP = 100


@dataclass(frozen=True)
class Options:
    out: Path = option(text="folder of the checkpoint")
    steps: int = option(1900, "training steps in all")
    decay: int = option(900, "last steps, in which the learning rate falls")
    seed: int = option(1, "seed of weights and problems")
    workers: int = option(2, "processes of one thread; part of the recipe")


@dataclass(frozen=True)
class Example:
    """Token ids, and for each id whether the model learns to predict it."""

    ids: list[int]
    learn: list[bool]


def drill(rng: random.Random, facts: int = 24) -> Example:
    """An example with only arithmetic. A drill has one sum per six tokens, a problem one per thirty."""
    words: list[str] = []
    for _ in range(facts):
        x = rng.randrange(10)
        y = rng.randrange(10)
        op = rng.choice(tiny.OPERATORS)
        words += [str(x), op, str(y), "=", str((x + y if op == "+" else x - y) % 10), ","]
    return Example(encode(words), [i % 6 == 4 for i in range(len(words))])


def conversation(problem: tiny.Problem) -> Example:
    """The token ids of the chat, as the chat template writes it. The model learns only the response."""
    prompt = encode([tiny.USER, *problem.prompt.split(" "), tiny.ASSISTANT])
    response = encode([*problem.response.split(" "), tiny.EOS])
    return Example(prompt + response, [False] * len(prompt) + [True] * len(response))


def batches(rng: random.Random, steps: int) -> Iterator[list[Example]]:
    """Yields a batch for each step. The examples of a batch have similar lengths and so need little padding."""
    ready: list[list[Example]] = []
    for step in range(steps):
        if not ready:
            _, difficulty, drilled = [s for s in CURRICULUM if step >= s[0]][-1]
            pool: list[Example] = []
            while len(pool) < 128:
                problem = tiny.make_problem(rng, difficulty)
                if rng.random() < drilled:
                    pool.append(drill(rng))
                elif tiny.split_of(problem.prompt) == "train":
                    pool.append(conversation(problem))
            pool.sort(key=lambda item: len(item.ids))
            batch: list[Example] = []
            for item in pool:
                if batch and len(item.ids) * (len(batch) + 1) > BATCH_TOKENS:
                    ready.append(batch)
                    batch = []
                batch.append(item)
            ready.append(batch)
            rng.shuffle(ready)
        yield ready.pop()


def positions(ids: list[int], rng: random.Random) -> list[int]:
    """Position ids, in half of the sequences with gaps, so that the model does not rely on token distances."""
    if rng.random() < 0.5:
        return list(range(len(ids)))
    out = []
    position = 0
    for token in ids:
        out.append(position)
        position += 1
        if token in GAP_AFTER and rng.random() < 0.3:
            position += rng.randrange(24)
    return out


def collate(batch: list[Example], rng: random.Random) -> tuple[torch.Tensor, ...]:
    rows = []
    for example in batch:
        pairs = zip(example.ids, example.learn, strict=True)
        learnt = [token if learn else IGNORE for token, learn in pairs]
        parts = (example.ids, [*learnt[1:], IGNORE], positions(example.ids, rng))
        rows.append([torch.tensor(part) for part in parts])
    inputs, targets, where = (
        pad_sequence(column, batch_first=True, padding_value=value)
        for column, value in zip(zip(*rows, strict=True), (0, IGNORE, 0), strict=True)
    )
    return inputs, targets, where


def optimisers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest. Without Muon, training needs twice the steps."""
    inner = {n: p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n}
    tables = [p for n, p in model.named_parameters() if p.dim() == 2 and n not in inner]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(inner.values(), lr=0.02, weight_decay=0.01, momentum=0.95)
    groups = [{"params": tables, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.97), fused=True)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def train(rank: int, args: Options, rendezvous: str) -> None:
    """What each training process does. All processes have the same weights, but draw different problems."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.workers
    )
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(f"{args.seed}-{rank}")
    model = build_model().train()
    parts = optimisers(model)
    # Filler words are learnt soon. Words to look up, compute or decide on have more weight in the loss.
    weight = torch.ones(model.config.vocab_size)
    weight[[TOKEN_ID[w] for w in (*tiny.FORMAL, "same", "but")]] = 4.0
    for step, batch in enumerate(batches(rng, args.steps), 1):
        inputs, targets, where = collate(batch, rng)
        # The learning rate warms up, stays constant, and falls linearly to 2%.
        scale = min(1.0, step / WARM_UP, max(0.02, (args.steps - step) / args.decay))
        for part in parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * scale
        # Without a mask, transformers would take a gap in the position ids for the start of a packed sequence.
        arguments = dict(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), position_ids=where
        )
        states = model.model(**arguments, use_cache=False).last_hidden_state
        counted = targets != IGNORE
        logits = model.lm_head(states[counted])
        wanted = targets[counted]
        loss = F.cross_entropy(logits, wanted, weight=weight)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        mean = parameters_to_vector(gradients)
        dist.all_reduce(mean)
        vector_to_parameters(mean.div_(args.workers), gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in parts:
            part.step()
            part.zero_grad(set_to_none=True)
        last = step == args.steps
        if rank == 0 and (step % 25 == 0 or last):
            right = (logits.argmax(-1) == wanted).float().mean()
            print(f"step {step} loss {loss:.4f} right {right:.4f}", flush=True)
        if rank == 0 and (step % 50 == 0 or last):
            save_checkpoint(model, args.out)
    dist.destroy_process_group()


def work(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = options, f"{folder}/rendezvous"
        torch.multiprocessing.spawn(train, args, nprocs=options.workers)


if __name__ == "__main__":
    command.run(Options, work)

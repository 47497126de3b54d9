# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for tests of PD pairs without a GPU or a network: a transfer backend that keeps the KV of
each prompt in a file. It takes the place of SGLang's backend ``mori``.

A file is named after the request's bootstrap room and the rank, and lies in the folder :data:`FOLDER`. The two
servers have equally many ranks, and need not run at the same time."""

import ctypes
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

FOLDER = "REASONCACHE_HANDED_OVER"
#: On the decode server the transfers of rooms from here on fail.
FAILING = 1 << 40


def register() -> None:
    if not os.environ.get(FOLDER):
        return
    from sglang.srt.disaggregation.base import conn

    poll = conn.KVPoll

    class Manager(conn.BaseKVManager):
        def __init__(self, args: Any, *_: Any) -> None:
            self.kv_args = args
            self.req_to_decode_prefix_len: dict[int, int] = {}
            self.prefill_info_table = _AnyPrefillServer()
            self.kv = _views(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
            self.aux = _views(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
            sizes = zip(
                args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True
            )
            self.states = [_views(*each) for each in sizes]

        def path(self, room: int) -> Path:
            """The file of a room, on this tensor-parallel rank."""
            return Path(os.environ[FOLDER]) / f"{room}-{self.kv_args.engine_rank}"

        def register_to_bootstrap(self) -> None:
            pass

    class Sender(conn.BaseKVSender):
        conclude_state = None

        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, **_: Any) -> None:
            self.mgr = mgr
            self.room = bootstrap_room
            self.state = poll.WaitingForInput
            self.sent: list[list[np.ndarray]] = []

        def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
            self.pages = num_kv_indices
            self.aux_index = aux_index

        def send(
            self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: Any = None
        ) -> None:
            self.sent.append([layer[kv_indices] for layer in self.mgr.kv])
            if sum(len(chunk[0]) for chunk in self.sent) < self.pages:
                return
            kv = [np.concatenate(chunks) for chunks in zip(*self.sent, strict=True)]
            aux = [one[self.aux_index].copy() for one in self.mgr.aux]
            states = [
                None if indices is None else [layer[indices] for layer in layers]
                for layers, indices in zip(self.mgr.states, state_indices or (), strict=False)
            ]
            _write(self.mgr.path(self.room), (kv, aux, states))
            self.state = poll.Success

        def poll(self) -> int:
            return int(self.state)

        poll_pp_consensus = poll

        def get_transfer_metric(self) -> Any:
            return conn.KVTransferMetric()

        def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
            return num_pages > 0 or last_chunk

        def failure_exception(self) -> None:
            raise RuntimeError("the transfer failed")

        def abort(self) -> None:
            self.state = poll.Failed

    class Receiver(conn.BaseKVReceiver):
        conclude_state = None
        require_staging = abort_notified = False

        def __init__(
            self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None, **_: Any
        ) -> None:
            self.mgr = self.kv_mgr = mgr
            self.room = bootstrap_room or 0
            self.state = poll.Bootstrapping

        def init(self, prefill_dp_rank: int) -> None:
            self.state = poll.WaitingForInput

        def send_metadata(
            self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
            decode_prefix_len: int | None = None, **_: Any,
        ) -> None:  # fmt: skip
            self.to = kv_indices
            self.aux_index = aux_index
            self.state_indices = state_indices
            self.held = (decode_prefix_len or 0) // self.mgr.kv_args.page_size
            self.state = poll.Transferring

        def poll(self) -> int:
            if self.state == poll.Transferring and self.room >= FAILING:
                self.state = poll.Failed
            elif self.state == poll.Transferring and (path := self.mgr.path(self.room)).exists():
                kv, aux, states = pickle.loads(path.read_bytes())
                for mine, sent in zip(self.mgr.kv, kv, strict=True):
                    mine[self.to] = sent[self.held :]
                for mine, sent in zip(self.mgr.aux, aux, strict=True):
                    mine[self.aux_index] = sent
                for layers, to, of in zip(
                    self.mgr.states, self.state_indices or (), states, strict=False
                ):
                    for mine, sent in zip(layers, of or (), strict=False):
                        mine[to] = sent
                self.state = poll.Success
            return int(self.state)

        def failure_exception(self) -> None:
            raise RuntimeError("the transfer failed")

        def abort(self) -> None:
            self.state = poll.Failed

        def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
            pass

    class Bootstrap(conn.BaseKVBootstrapServer):
        def __init__(self, host: str, port: int) -> None:
            pass

    module: Any = ModuleType("sglang.srt.disaggregation.mori")
    module.MoriKVManager = Manager
    module.MoriKVBootstrapServer = Bootstrap
    module.MoriKVSender = Sender
    module.MoriKVReceiver = Receiver
    sys.modules[module.__name__] = module


class _AnyPrefillServer(dict[str, Any]):
    """Knows each prefill server, without asking it."""

    def get(self, *_: Any) -> Any:
        return SimpleNamespace(dp_size=1, follow_bootstrap_room=True)


def _views(starts: Sequence[int], sizes: Sequence[int], items: Sequence[int]) -> list[np.ndarray]:
    """Tensors in memory, each as bytes ``[items, bytes of an item]``."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)).reshape(-1, item)
        for start, size, item in zip(starts, sizes, items, strict=True)
    ]


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)

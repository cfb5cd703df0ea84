"""The segment's map: every byte two processes share, written once. Readers and writers derive all offsets from here.

    0 ┌────────────────────────────────────────────────────────────────────────────┐
      │ IDENTITY  magic, version, layout hash, sizes, owner        written at birth │
 256  │ WORDS     a 64-byte line each: engine, draft, control, counts, worker        │
 4096 ├────────────────────────────────────────────────────────────────────────────┤
      │ ORDERS    one 64-byte row a session slot          control ───────► engine   │
      ├────────────────────────────────────────────────────────────────────────────┤
      │ VERDICTS  ring of frames                          engine  ───────► control  │
      ├────────────────────────────────────────────────────────────────────────────┤
      │ OUTCOMES  ring of frames                          engine  ───────► draft    │
      ├────────────────────────────────────────────────────────────────────────────┤
      │ PROPOSALS ring of frames                          draft   ───────► engine   │
      ├────────────────────────────────────────────────────────────────────────────┤
      │ STATES    ring of frames, empty without a head    worker  ───────► draft    │
      └────────────────────────────────────────────────────────────────────────────┘

A frame in its slot:   sequence u64 · length u32 · crc u32 · body (head, then rows, then tokens or names).
A row of ORDERS:       version u32 · crc u32 · fields.

Ordering. Python has no fences, and aarch64 may show a reader the sequence number before the body. So no reader trusts
a word alone: the checksum covers sequence, length and body, and a frame whose checksum fails has not arrived yet. A
reader gives a slot back only after the checksum it computed from its own copy agreed, and a store that depends on
such a branch cannot pass the loads before it, on x86-64 and on aarch64 alike. Words of 8 aligned bytes are stored and
loaded whole. Nothing else is assumed of the machine.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

MAGIC = 0x3143_4544_4345_5053  # "SPECDEC1" read as a little-endian word
VERSION = 1
PAGE = 4096
LINE = 64
REQUEST_ID_BYTES = 96  # an engine request id; longer ones are cut

# ---- header -----------------------------------------------------------------------------------------------------

IDENTITY = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("max_sessions", "<u4"),
        ("max_steps", "<u4"),
        ("frame_tokens", "<u4"),
        ("states_mb", "<u4"),
        ("reserved", "<u4"),
        ("layout_hash", "<u8"),
        ("size", "<u8"),
        ("owner_pid", "<u8"),
        ("owner_start", "<u8"),  # clock ticks since boot, /proc/<pid>/stat field 22
        ("vocab_size", "<u8"),  # ids below it may be proposed; 0 until the engine has started
        ("vocabulary", "<u8"),  # fingerprint of what they stand for (vocabulary.py), written after the size
    ]
)

# Words of 8 bytes, one line a writer. A bell is a counter its writer raises after every frame; futex waits on its low
# half. Times are CLOCK_MONOTONIC nanoseconds, one clock for all processes of a machine.
# beat_ns: a cycle began; pulse_ns: the process runs, also while there is nothing to do
ENGINE_WORDS = ("pid", "start", "beat_ns", "pulse_ns", "outcome_bell", "verdict_bell", "proposals_read")
DRAFT_WORDS = ("pid", "start", "beat_ns", "proposal_bell", "outcomes_read", "generation", "states_read", "reads_states")
WORKER_WORDS = ("pid", "start", "state_bell", "states_lost")  # tokens whose states found the ring full
CONTROL_WORDS = ("pid", "start", "router_until_ns", "order_bell", "verdicts_read", "draft_limit_us")
COUNT_WORDS = ("late", "stale", "garbage", "lost_verdicts", "lapsed_leases", "resyncs", "no_slot")  # the engine's
WORDS_AT = 256

# ---- orders: control -> engine ------------------------------------------------------------------------------------

ORDER_ROW = np.dtype(
    {
        "names": ["version", "crc", "session", "order", "steps", "window", "lease_ms", "seen"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4"],
        "itemsize": LINE,
    }
)

# ---- frames -------------------------------------------------------------------------------------------------------

SLOT_HEAD = np.dtype([("sequence", "<u8"), ("length", "<u4"), ("crc", "<u4")])

# outcome: what a cycle committed, and how many draft tokens each session wants next
OUTCOME_HEAD = np.dtype([("cycle", "<u8"), ("rows", "<u4"), ("tokens", "<u4")])
OUTCOME_ROW = np.dtype(
    [
        ("session", "<u8"),
        ("epoch", "<u4"),
        ("kind", "<u2"),  # OPEN, COMMIT, CLOSE
        ("steps", "<u2"),  # draft tokens wanted now; 0: none
        ("position", "<u4"),  # of the first token below, from the prompt's start
        ("tokens", "<u4"),  # how many of the frame's tokens are this row's
    ]
)
OPEN, COMMIT, CLOSE = 1, 2, 3  # OPEN starts an epoch: what the draft knew of the session is void

# proposal: k draft tokens a session
PROPOSAL_HEAD = np.dtype(
    [("cycle", "<u8"), ("rows", "<u4"), ("tokens", "<u4"), ("drafting_us", "<u8")]  # from the outcome's arrival on
)
PROPOSAL_ROW = np.dtype([("session", "<u8"), ("epoch", "<u4"), ("tokens", "<u4")])
AT_LIMIT = 0xFFFF_FFFF  # in place of a row's tokens: the session has outgrown the draft; it need not ask again

# verdict: what a cycle did, session by session; opened sessions carry their request id
VERDICT_HEAD = np.dtype(
    [
        ("cycle", "<u8"),
        ("rows", "<u4"),
        ("opened", "<u4"),
        ("batch", "<u4"),  # sessions that decoded
        ("lost", "<u4"),  # frames before this one that found the ring full
        ("draft_us", "<u4"),  # waiting for the proposal
        ("schedule_us", "<u4"),
        ("verify_us", "<u4"),  # the forward pass and sampling
        ("output_us", "<u4"),
        ("drafting_us", "<u8"),  # of draft_us, what the draft itself took; the rest is the channel's
    ]
)
VERDICT_ROW = np.dtype(
    [
        ("session", "<u8"),
        ("order", "<u8"),  # 0: the standing order
        ("kind", "<u2"),  # PREFILL, CYCLE, CLOSED
        ("reason", "<u2"),  # why fewer drafts than ordered were verified, or why the session ended
        ("steps", "<u2"),  # ordered
        ("proposed", "<u2"),  # drafts verified
        ("accepted", "<u2"),  # of them, delivered
        ("committed", "<u2"),  # tokens delivered
        ("context", "<u4"),  # tokens of the session after the cycle
        ("number", "<u4"),  # of the session's cycles under orders, this one included
    ]
)
PREFILL, CYCLE, CLOSED = 1, 2, 3
OPENED_ROW = np.dtype(
    [("session", "<u8"), ("slot", "<u4"), ("prompt_tokens", "<u4"), ("request_id", f"S{REQUEST_ID_BYTES}")]
)

# states: what the target computed for the tokens of one pass, for an EAGLE-3 head
STATES_HEAD = np.dtype(
    [
        ("rows", "<u4"),
        ("tokens", "<u4"),
        ("width", "<u4"),  # numbers a token: layers * the target's hidden size
        ("dtype", "S12"),  # "float32", "float16", "bfloat16"
        ("layers", "S40"),  # after how many layers each, as "2,15,27", in the order they are joined
    ]
)
STATES_ROW = np.dtype(
    [
        ("session", "<u8"),
        ("epoch", "<u4"),
        ("position", "<u4"),  # of the first token, from the prompt's start
        ("tokens", "<u4"),  # how many of the frame's are this row's; then all ids, int32, and all states
    ]
)

REASONS = ("none", "draft_down", "draft_late", "draft_short", "budget", "standing", "draft_limit")
NONE, DRAFT_DOWN, DRAFT_LATE, DRAFT_SHORT, BUDGET, STANDING, DRAFT_LIMIT = range(len(REASONS))

VERDICT_SLOTS, OUTCOME_SLOTS, PROPOSAL_SLOTS, STATES_SLOTS = 256, 64, 8, 64


def _page(n: int) -> int:
    return -(-n // PAGE) * PAGE


def _line(n: int) -> int:
    return -(-n // LINE) * LINE


@dataclass(frozen=True)
class Area:
    """A ring's place: `slots` slots of `slot_bytes` from byte `start`."""

    start: int
    slots: int
    slot_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.slots * self.slot_bytes


@dataclass(frozen=True)
class Layout:
    """Offsets of every area, from four sizes.

    max_sessions: rows of the order table, and sessions a frame can name. max_steps: the largest k. frame_tokens: tokens
    one outcome frame holds; longer prompts are cut over several frames. states_mb: the ring of hidden states, 2**20
    bytes each; 0 without a head.
    """

    max_sessions: int
    max_steps: int
    frame_tokens: int = 8192
    states_mb: int = 0

    @property
    def orders_start(self) -> int:
        return PAGE

    @property
    def verdicts(self) -> Area:
        rows = self.max_sessions * (2 * VERDICT_ROW.itemsize + OPENED_ROW.itemsize)  # a session may end in its cycle
        start = _page(self.orders_start + self.max_sessions * ORDER_ROW.itemsize)
        return Area(start, VERDICT_SLOTS, _line(SLOT_HEAD.itemsize + VERDICT_HEAD.itemsize + rows))

    @property
    def outcomes(self) -> Area:
        body = OUTCOME_HEAD.itemsize + 2 * self.max_sessions * OUTCOME_ROW.itemsize + 4 * self.frame_tokens
        return Area(_page(self.verdicts.end), OUTCOME_SLOTS, _line(SLOT_HEAD.itemsize + body))

    @property
    def proposals(self) -> Area:
        body = PROPOSAL_HEAD.itemsize + self.max_sessions * (PROPOSAL_ROW.itemsize + 4 * self.max_steps)
        return Area(_page(self.outcomes.end), PROPOSAL_SLOTS, _line(SLOT_HEAD.itemsize + body))

    @property
    def states(self) -> Area:
        return Area(_page(self.proposals.end), STATES_SLOTS, self.states_mb * 2**20 // STATES_SLOTS // LINE * LINE)

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return _page(self.states.end)

    @property
    def hash(self) -> int:
        """Both sides compare it before the first frame: equal only if every offset and field above is equal."""
        records = [IDENTITY, ORDER_ROW, SLOT_HEAD, OUTCOME_HEAD, OUTCOME_ROW, PROPOSAL_HEAD, PROPOSAL_ROW]
        records += [VERDICT_HEAD, VERDICT_ROW, OPENED_ROW, STATES_HEAD, STATES_ROW]
        fields = [str(record.descr) for record in records]
        areas = (self.orders_start, self.verdicts, self.outcomes, self.proposals, self.states)
        words = (ENGINE_WORDS, DRAFT_WORDS, CONTROL_WORDS, COUNT_WORDS, WORKER_WORDS, WORDS_AT)
        text = repr((VERSION, fields, words, REASONS, areas, self))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

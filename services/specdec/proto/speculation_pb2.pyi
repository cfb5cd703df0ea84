from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerdictKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_KIND_UNSPECIFIED: _ClassVar[VerdictKind]
    VERDICT_KIND_PREFILL: _ClassVar[VerdictKind]
    VERDICT_KIND_CYCLE: _ClassVar[VerdictKind]
    VERDICT_KIND_CLOSED: _ClassVar[VerdictKind]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_DRAFT_DOWN: _ClassVar[Reason]
    REASON_DRAFT_LATE: _ClassVar[Reason]
    REASON_DRAFT_SHORT: _ClassVar[Reason]
    REASON_BUDGET: _ClassVar[Reason]
    REASON_STANDING: _ClassVar[Reason]
    REASON_DRAFT_LIMIT: _ClassVar[Reason]
VERDICT_KIND_UNSPECIFIED: VerdictKind
VERDICT_KIND_PREFILL: VerdictKind
VERDICT_KIND_CYCLE: VerdictKind
VERDICT_KIND_CLOSED: VerdictKind
REASON_NONE: Reason
REASON_DRAFT_DOWN: Reason
REASON_DRAFT_LATE: Reason
REASON_DRAFT_SHORT: Reason
REASON_BUDGET: Reason
REASON_STANDING: Reason
REASON_DRAFT_LIMIT: Reason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PairDescription(_message.Message):
    __slots__ = ("pair", "model", "http_url", "max_steps", "max_sessions", "engine_ready", "draft_up", "draft_detail", "specdec_version", "vllm_version", "step_age_ms")
    PAIR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_READY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DETAIL_FIELD_NUMBER: _ClassVar[int]
    SPECDEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    pair: str
    model: str
    http_url: str
    max_steps: int
    max_sessions: int
    engine_ready: bool
    draft_up: bool
    draft_detail: str
    specdec_version: str
    vllm_version: str
    step_age_ms: int
    def __init__(self, pair: _Optional[str] = ..., model: _Optional[str] = ..., http_url: _Optional[str] = ..., max_steps: _Optional[int] = ..., max_sessions: _Optional[int] = ..., engine_ready: _Optional[bool] = ..., draft_up: _Optional[bool] = ..., draft_detail: _Optional[str] = ..., specdec_version: _Optional[str] = ..., vllm_version: _Optional[str] = ..., step_age_ms: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("session", "slot", "id", "steps", "window", "seen", "lease_ms", "cap")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    session: int
    slot: int
    id: int
    steps: int
    window: int
    seen: int
    lease_ms: int
    cap: int
    def __init__(self, session: _Optional[int] = ..., slot: _Optional[int] = ..., id: _Optional[int] = ..., steps: _Optional[int] = ..., window: _Optional[int] = ..., seen: _Optional[int] = ..., lease_ms: _Optional[int] = ..., cap: _Optional[int] = ...) -> None: ...

class OrderFrame(_message.Message):
    __slots__ = ("orders", "lease_ms", "observe")
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    lease_ms: int
    observe: bool
    def __init__(self, orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., lease_ms: _Optional[int] = ..., observe: _Optional[bool] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session", "order", "kind", "reason", "steps", "proposed", "accepted", "committed", "context", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: int
    order: int
    kind: VerdictKind
    reason: Reason
    steps: int
    proposed: int
    accepted: int
    committed: int
    context: int
    number: int
    def __init__(self, session: _Optional[int] = ..., order: _Optional[int] = ..., kind: _Optional[_Union[VerdictKind, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., steps: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., committed: _Optional[int] = ..., context: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "slot", "request_id", "prompt_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    slot: int
    request_id: str
    prompt_tokens: int
    def __init__(self, session: _Optional[int] = ..., slot: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class VerdictFrame(_message.Message):
    __slots__ = ("cycle", "batch", "opened", "verdicts", "draft_us", "schedule_us", "verify_us", "output_us", "lost", "drafting_us")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_US_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_US_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    batch: int
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    draft_us: int
    schedule_us: int
    verify_us: int
    output_us: int
    lost: int
    drafting_us: int
    def __init__(self, cycle: _Optional[int] = ..., batch: _Optional[int] = ..., opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., draft_us: _Optional[int] = ..., schedule_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., output_us: _Optional[int] = ..., lost: _Optional[int] = ..., drafting_us: _Optional[int] = ...) -> None: ...

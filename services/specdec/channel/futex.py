"""Wait for a 32-bit word of shared memory to change, across processes: futex(2).

The word is the truth and the wait only saves the processor: a waiter compares the word in the kernel before it sleeps,
so a wake-up cannot be lost, and every wait has a bound, so a waker that died cannot hang it.
"""

import ctypes
import platform

_NUMBER = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _futex_number() -> int:
    try:
        return _NUMBER[platform.machine()]
    except KeyError:
        raise OSError(f"specdec runs on x86-64 and aarch64, not on {platform.machine()}") from None


_FUTEX = ctypes.c_long(_futex_number())


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Returns when the word at `address` is not `expected`, on a wake-up, on a signal, or after `timeout_s`."""
    if timeout_s <= 0:
        return
    seconds, fraction = divmod(timeout_s, 1)
    limit = _Timespec(int(seconds), int(fraction * 1e9))
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wakes every waiter on the word at `address`."""
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYONE, None, None, 0)

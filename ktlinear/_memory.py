"""Memory for weights: aligned to huge pages, so that reading a matrix once does not miss the TLB every 4 KiB."""

import mmap
import threading

import torch

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64


def empty(nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] on the CPU with a storage of its own of exactly `nbytes`.

    From 2 MiB on, the tensor owns an anonymous mapping that begins on a 2-MiB boundary and is unmapped with the last
    tensor that uses it. Smaller ones are 64-byte aligned pieces of a shared 32-MiB mapping, which lives as long as
    any of its tensors: a model has hundreds of small matrices, and a huge page for each would waste more than it
    holds. Where the platform has ``MADV_HUGEPAGE``, both ask for huge pages. The
    bytes are zero: pages are fresh and no piece is used twice.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError, OSError: the system has no such memory.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes: must not be negative, got {nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if nbytes >= HUGE_PAGE:
        mapping, start = _map(nbytes)
        return _piece(mapping, start, nbytes)
    return _pool.take(nbytes)


def zeros(rows: int, row_bytes: int) -> torch.Tensor:
    """Return `empty` memory, whose fresh pages are zero, as a uint8 tensor [rows, row_bytes]."""
    return empty(rows * row_bytes).view(rows, row_bytes)


def _piece(mapping: mmap.mmap, start: int, nbytes: int) -> torch.Tensor:
    # frombuffer keeps a reference to the mapping, and mmap unmaps when the last reference goes.
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start)


def _map(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map `nbytes` and return the mapping with the offset of its first 2-MiB boundary."""
    # Untouched pages cost nothing, so over-allocating by one huge page only takes address space.
    length = nbytes + HUGE_PAGE
    if hasattr(mmap, "MAP_ANONYMOUS"):
        # Python's default is a shared mapping, which Linux backs by shmem: no transparent huge pages there.
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        mapping = mmap.mmap(-1, length)
    start = -_piece(mapping, 0, 1).data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Whole huge pages only: one more for the tail could cost a matrix of 2.1 MiB another 1.9 MiB.
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: slower, not wrong
    return mapping, start


class _Pool:
    """A bump allocator for pieces below 2 MiB; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._start = 0
        self._left = 0

    def take(self, nbytes: int) -> torch.Tensor:
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._mapping is None or room > self._left:
                self._mapping, self._start = _map(CHUNK)
                self._left = CHUNK
            piece = _piece(self._mapping, self._start, nbytes)
            self._start += room
            self._left -= room
        return piece


_pool = _Pool()

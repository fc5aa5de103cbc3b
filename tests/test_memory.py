"""Memory for weights: alignment, huge pages, release, threads."""

import gc
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ktlinear import _memory

MIB = 1 << 20


def test_large_block_is_huge_page_aligned_and_has_its_own_storage():
    for nbytes in (2 * MIB, 2 * MIB + 1, 5 * MIB + 12345):
        tensor = _memory.empty(nbytes)
        assert tensor.dtype == torch.uint8 and tensor.shape == (nbytes,)
        assert tensor.data_ptr() % (2 * MIB) == 0
        assert tensor.untyped_storage().nbytes() == nbytes
        assert int(tensor.sum()) == 0
        tensor.fill_(7)
        assert int(tensor.sum()) == 7 * nbytes


def test_small_pieces_are_cache_line_aligned_apart_and_zero():
    sizes = [1, 63, 64, 65, 4097, 2 * MIB - 1]
    pieces = [_memory.empty(size) for size in sizes]
    for value, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,) and piece.data_ptr() % 64 == 0
        assert piece.untyped_storage().nbytes() == size
        assert not piece.any()
        piece.fill_(value + 1)
    for value, piece in enumerate(pieces):
        assert bool((piece == value + 1).all())


def test_hundreds_of_small_pieces_share_mappings():
    pieces = [_memory.empty(100_000) for _ in range(300)]
    pages = {piece.data_ptr() // (2 * MIB) for piece in pieces}
    assert len(pages) <= 300 * 100_000 // (2 * MIB) + 4


def test_empty_and_negative():
    assert _memory.empty(0).shape == (0,)
    assert _memory.zeros(0, 34).shape == (0, 34)
    with pytest.raises(ValueError, match="nbytes.*-1"):
        _memory.empty(-1)


def _vm_flags(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2 and not line.split(" ", 1)[0].endswith(":"):
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_huge_pages_are_asked_for():
    if not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no transparent huge pages")
    if _smaps_hides_flag():
        pytest.skip("this kernel does not show MADV_HUGEPAGE in /proc/self/smaps")
    for nbytes in (4 * MIB, 1000):
        tensor = _memory.empty(nbytes)
        assert "hg" in _vm_flags(tensor.data_ptr())


def _smaps_hides_flag() -> bool:
    probe = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    probe.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(probe, dtype=torch.uint8).data_ptr()
    return "hg" not in _vm_flags(address)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_is_released_with_the_last_tensor():
    before = _resident_bytes()
    tensor = _memory.empty(64 * MIB)
    tensor.fill_(1)
    view = tensor[5:]
    del tensor
    gc.collect()
    assert _resident_bytes() - before > 60 * MIB
    assert int(view[0]) == 1
    del view
    gc.collect()
    assert _resident_bytes() - before < 16 * MIB


def test_threads_get_disjoint_pieces():
    results: list[list[torch.Tensor]] = [[] for _ in range(8)]

    def work(index: int) -> None:
        for _ in range(100):
            results[index].append(_memory.empty(999).fill_(index))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((piece == i).all()) for i, pieces in enumerate(results) for piece in pieces)
    assert len({piece.data_ptr() for pieces in results for piece in pieces}) == 800


def test_interpreter_exits_cleanly_while_tensors_live():
    code = "import builtins; from ktlinear import _memory; builtins.keep = [_memory.empty(n) for n in (100, 4 << 20)]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

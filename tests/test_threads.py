"""Threads: PyTorch's pool and no other, the same bits for any number of threads, fork, and many callers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from test_ops import QUANTIZED, random_rows, whole_blocks

import ktlinear  # noqa: F401
from ktlinear import WeightType

kt = torch.ops.kt
Q4 = int(WeightType.Q4_0)


def run_python(code: str, **env: str) -> str:
    """Run code in a fresh process and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("m", (1, 2, 4, 16, 70, 600))
def test_same_bits_for_any_number_of_threads(isa: str, m: int, restore_threads: None) -> None:
    n, k = 333, 1056
    x, weight = torch.randn(m, k), torch.randn(n, k)
    rows = kt.quantize(weight, Q4)
    panels = kt.pack(rows, Q4)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(
            (
                kt.linear(x, weight),
                kt.linear(x, weight.half()),
                kt.linear(x, rows, None, Q4),
                kt.linear_packed(x, panels, None, n, k, Q4),
                kt.quantize(weight, Q4),
                kt.pack(rows, Q4),
            )
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_same_bits_for_any_number_of_threads_in_every_type(weight_type: WeightType, restore_threads: None) -> None:
    n, k, t = 333, whole_blocks(weight_type, 1056), int(weight_type)
    rows = random_rows(n, k, weight_type)
    inputs = [torch.randn(m, k) for m in (1, 5, 40)]
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        panels = kt.pack(rows, t)
        results.append([panels, kt.unpack(panels, n, k, t), kt.dequantize(rows, t, torch.float16)])
        for x in inputs:
            results[-1] += [kt.linear(x, rows, None, t), kt.linear_packed(x, panels, None, n, k, t)]
    assert torch.equal(results[0][1], rows)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_exactly_one_openmp_runtime() -> None:
    code = """
import re, torch, ktlinear
torch.ops.kt.linear(torch.zeros(64, 512), torch.zeros(512, 512))
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(*sorted(p for p in paths if re.search(r"lib(g|i)?omp", p)))
"""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("there is no /proc/self/maps on this system")
    assert len(run_python(code).split()) == 1


# Prints the CPU seconds of every thread of the process that did any work in the loop, the busiest first.
CPU_TIME = """
import os, torch, ktlinear
torch.set_num_threads({threads})
x, weight = torch.randn(256, 1024), torch.randn(1024, 1024)
rows = torch.ops.kt.quantize(weight, 2)
def used():
    times = {{}}
    for task in os.listdir("/proc/self/task"):
        fields = open(f"/proc/self/task/{{task}}/stat").read().rsplit(")", 1)[1].split()
        times[task] = int(fields[11]) / os.sysconf("SC_CLK_TCK")
    return times
torch.ops.kt.linear(x, weight)
before = used()
for _ in range({repeats}):
    torch.ops.kt.{call}
after = used()
spent = sorted((t - before.get(task, 0) for task, t in after.items()), reverse=True)
print(*(s for s in spent if s > 0.1 * spent[0]))
"""


@pytest.mark.parametrize("call", ("linear(x, weight)", "linear(x, rows, None, 2)", "linear(x[:1], weight)"))
@pytest.mark.parametrize("threads", (1, 2))
def test_as_many_threads_work_as_asked_for(call: str, threads: int) -> None:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("there is no /proc/self/task on this system")
    repeats = 6000 if "x[:1]" in call else 120
    # Waiting threads sleep at once: one that only spins would look busy.
    printed = run_python(CPU_TIME.format(threads=threads, repeats=repeats, call=call), OMP_WAIT_POLICY="passive")
    assert len(printed.split()) == threads, printed


def test_fork_before_first_use() -> None:
    code = """
import os, torch, ktlinear
x, weight = torch.randn(64, 512), torch.randn(512, 512)
pid = os.fork()
y = torch.ops.kt.linear(x, weight)
assert torch.allclose(y, torch.nn.functional.linear(x, weight), atol=1e-3)
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("both")
"""
    assert run_python(code) == "both"


def test_no_threads_at_import() -> None:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("there is no /proc/self/task on this system")
    code = """
import os, torch
before = len(os.listdir("/proc/self/task"))
import ktlinear.ops
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run_python(code) == "0"


def test_eight_python_threads_on_one_weight() -> None:
    weight = torch.randn(200, 256)
    rows = kt.quantize(weight, Q4)
    panels = kt.pack(rows, Q4)
    inputs = [torch.randn(1 + 5 * i, 256) for i in range(8)]
    expected = [(kt.linear(x, weight), kt.linear_packed(x, panels, None, 200, 256, Q4)) for x in inputs]
    wrong: list[int] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait()
        for _ in range(20):
            y = kt.linear(inputs[i], weight), kt.linear_packed(inputs[i], panels, None, 200, 256, Q4)
            if not (torch.equal(y[0], expected[i][0]) and torch.equal(y[1], expected[i][1])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_large_call_gives_its_workspace_back() -> None:
    """The activations of this call exceed what a thread keeps, so a second large call must find the memory valid."""
    x, weight = torch.randn(512, 40000), torch.randn(4, 40000)
    first = kt.linear(x, weight)
    small = kt.linear(x[:1, :64], weight[:, :64])
    torch.testing.assert_close(small, torch.nn.functional.linear(x[:1, :64], weight[:, :64]))
    assert torch.equal(kt.linear(x, weight), first)

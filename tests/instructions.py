"""What an object file asks of the CPU, from its disassembly."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from pathlib import Path

# Feature, as ktlinear/_cpu.py names it -> instructions that only a CPU with it has, as objdump writes them. Those that
# compilers make of code like ours, not all that there are. What no tier asks for (AVX-512 VBMI, SVE) may be in no
# tier's objects.
_X86 = {
    "ssse3": r"(pshufb|pabs[bwd]|ph(add|sub)\w+|pmaddubsw|pmulhrsw|palignr|psign\w"
    r"|h(add|sub)p[sd]|mov(ddup|s[hl]dup)) ",
    "sse4": r"(p(blend\w+|(max|min)(s[bd]|u[wd])|mov[sz]x\w+|mulld|muldq|ackusdw|extr[bdq]|insr[bdq]|cmpeqq|cmpgtq"
    r"|test)|blend\w+|round[sp][sd]|dpp[sd]|insertps|extractps|popcnt\w?|crc32\w?) ",
    "avx": r"v\w+( |$)|.*%[yz]mm",
    "fma": r"vfn?m(add|sub)\w+ ",
    "f16c": r"vcvt(ph2ps|ps2ph) ",
    "avx2": r"v(insert|extract|broadcast)i128 |vpbroadcast\w |vpblendd |v[gp]*gather\w+ |vpmaskmov\w "
    r"|vp(s[lr]lv|srav)\w |vbroadcasts[sd] %xmm|vp(?!erm2f128|ermil|test)\w+ .*%ymm",
    "bmi2": r"(s[ahr][lr]x|rorx|mulx|bzhi|pdep|pext) ",
    "bmi1": r"(andn|blsi|blsr|blsmsk|bextr) ",  # tzcnt is bsf to older CPUs, and as good
    "avx_vnni": r"\{vex\} vpdp",
    "avx512f": r".*(%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])|\{1to)"
    r"|vpternlog|v(mov|p(and|or|xor|andn))\w*(32|64) |vmovdqu(8|16) |vpermt2|vpro[lr]"
    r"|v(rndscale|getexp|getmant|scalef|reduce|range)",
    "avx512_vnni": r"vpdp(busd|wssd)s? ",
    "avx512_bf16": r"vdpbf16ps |vcvtne\w*ps2bf16",
    "avx512_vbmi": r"vpermb |vperm[it]2b |vpmultishiftqb |vp(compress|expand)[bw] "
    r"|vpsh[lr]dv?[wdq] |vpopcnt\w |vpshufbitqmb ",
    "avx512_fp16": r"v(add|sub|mul|div|max|min|sqrt|cmp|fn?m(add|sub)\d+)(ph|sh) ",
    "amx": r"(tdp|tile)\w+ ",
}
_ARM = {
    "asimddp": r"[su]dot ",
    "i8mm": r"(us|su)dot |([su]|us)mmla ",
    "bf16": r"bf(dot|mmla|mlal[bt]?|cvt\w*) ",
    "asimdhp": r"(?!fcvt[nl]?2? )(f\w+|[su]cvtf) (v\d+\.[48]h|h\d+)",
    "asimdrdm": r"sqrdml[as]h ",
    "asimdfhm": r"fml[as]l2? ",
    "fcma": r"fc(mla|add) ",
    "crc32": r"crc32",
    "atomics": r"(casp?|swp|ld(add|clr|eor|set|[su]max|[su]min)|st(add|clr|eor|set))(al?|l)?[bh]? ",
    "sve": r".* z\d+\.",
}


def beyond(path: Path, features: Collection[str], arm: bool, objdump: str = "objdump") -> list[str]:
    """The different instructions of an object that a CPU with just these features lacks, without their numbers."""
    command = [objdump, "-d", "--no-show-raw-insn", *(("-M", "no-aliases") if arm else ()), str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    number = re.compile(r"0x[0-9a-f]+|[0-9a-f]+ <.*|#.*")
    lines = {number.sub("", line.partition("\t")[2]) for line in text.splitlines()}
    if len(lines) < 100:
        raise ValueError(f"{path}: {len(lines)} different instructions, which are too few to be kernels")
    lacks = [pattern for name, pattern in (_ARM if arm else _X86).items() if name not in features]
    if "avx" in features:
        lacks = [pattern for pattern in lacks if pattern not in (_X86["ssse3"], _X86["sse4"])]
    search = re.compile("|".join(lacks))
    return sorted(line for line in {" ".join(line.split()) for line in lines} if search.match(line))

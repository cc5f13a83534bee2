"""Targets: their features and instruction sets, and that they compile."""

from __future__ import annotations

import struct

import pytest

from castiron.vmfb import cpu_features, targets
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.targets import TARGETS, Target, TargetError, missing_features, resolve
from tests.vmfb import toy

ZEN4 = (
    "fma cx16 sse4_1 sse4_2 movbe popcnt avx f16c abm sse4a bmi1 avx2 bmi2 avx512f avx512dq avx512ifma avx512cd"
    " avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vbmi2 gfni vaes avx512_vnni avx512_bitalg avx512_vpopcntdq"
    " pni ssse3 sha_ni"
)


def test_cpuinfo_is_read_under_llvms_names():
    found = cpu_features.cpuinfo_features(f"processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: {ZEN4}\n")
    assert set(TARGETS["x86-64-v4"].features) <= found
    assert {"avx512vnni", "avx512bf16", "gfni"} <= found and not {"sha_ni", "vaes"} & found
    assert targets.isa_of("x86_64", found) == "avx512bf16"
    assert targets.isa_of("x86_64", found - {"avx512vnni", "avx512bf16"}) == "avx512"


def test_hwcaps_are_read_under_llvms_names():
    # fp asimd aes crc32 atomics fphp asimdhp asimdrdm asimddp
    arm = cpu_features.hwcap_features(0x10178B, 0)
    assert arm == set(TARGETS["aarch64"].features) and targets.isa_of("aarch64", arm) == "neon"
    # Graviton 3 also has sve, i8mm and bf16.
    graviton3 = cpu_features.hwcap_features(0x50178B, 0x6000)
    assert graviton3 == {*TARGETS["aarch64-i8mm"].features, "sve"} and targets.isa_of("aarch64", graviton3) == "neoni8mm"


def test_the_isa_follows_the_features():
    isas = {
        "x86-64-v3": "avx2", "x86-64-v3-vnni": "avxvnni", "x86-64-v4": "avx512", "x86-64-v4-vnni": "avx512vnni",
        "x86-64-v4-bf16": "avx512bf16", "sapphirerapids": "amx", "aarch64": "neon", "aarch64-i8mm": "neoni8mm",
    }  # fmt: skip
    assert {name: TARGETS[name].isa for name in isas} == isas
    assert targets.isa_of("x86_64", {"avx2"}) == "" and targets.isa_of("riscv64", {"v"}) == ""


def test_missing_features_are_named(monkeypatch):
    assert missing_features(resolve("host")) == ()
    monkeypatch.setattr(targets, "host_arch", lambda: "x86_64")
    monkeypatch.setattr(targets, "host_features", lambda: frozenset(TARGETS["x86-64-v4"].features) - {"avx512vl"})
    assert missing_features(TARGETS["x86-64-v3"]) == ()
    assert missing_features(TARGETS["x86-64-v4"]) == ("avx512vl",)
    assert missing_features(TARGETS["aarch64"]) == ("aarch64",)


def test_rejects_bad_targets(monkeypatch):
    with pytest.raises(TargetError, match="unknown target: 'sparc'; choose one of host, x86-64-v3, x86-64-v3-vnni, x86-64-v4"):
        resolve("sparc")
    monkeypatch.setitem(TARGETS, "host", Target("host", "x86_64", "", "Pentium", ("sse3",), ()))
    with pytest.raises(TargetError, match="Pentium.*neither AVX2"):
        resolve("host")


def test_a_gpu_may_have_an_architecture():
    assert resolve("cuda").flags == resolve("cuda:sm_80").flags
    assert "--iree-cuda-target=sm_89" in resolve("cuda:sm_89").flags
    assert "--iree-rocm-target=gfx1100" in resolve("rocm:gfx1100").flags and resolve("rocm").driver == "hip"
    assert "--iree-vulkan-target=ampere" in resolve("vulkan:ampere").flags
    # Without these features IREE reads f16 wrongly.
    assert any("StorageBuffer16BitAccess" in flag for flag in resolve("vulkan").flags)
    assert missing_features(resolve("metal")) == ("metal",)
    for name in ("cuda:gfx942", "rocm:sm_80", "metal:m3", "cuda:"):
        with pytest.raises(TargetError, match="unknown architecture of"):
            resolve(name)


@pytest.mark.parametrize(("name", "machine"), [("x86-64-v3", 62), ("x86-64-v4", 62), ("aarch64", 183)])
def test_every_target_compiles_to_code_for_its_cpu(tmp_path, compile_cache, name, machine):
    out = tmp_path / "model.vmfb"
    compile_mlir(toy.module_text(24, (4,)), TARGETS[name], out, cache_dir=compile_cache)
    data = out.read_bytes()
    header = data[data.index(b"\x7fELF") :][:20]
    assert struct.unpack_from("<H", header, 18)[0] == machine

"""The hardware table, on a CPU. A test with `pretended` in its name stands in for a GPU that is not there."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_fp8_rocm.hardware import (
    CPU,
    TABLE,
    Hardware,
    MixedFormatsError,
    identify,
    local_devices,
    of_device,
    shared_format,
)

GIB = 2**30
RDNA3 = ["gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151"]


def amd(arch: str, units: int = 0, gib: float = 0.0, name: str = "", capability: tuple[int, int] = (0, 0)):
    """What `torch.cuda.get_device_properties` gives on ROCm, where the capability must decide nothing."""
    return SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=units,
        total_memory=int(gib * GIB),
        gcnArchName=arch,
    )


def nvidia(name: str, capability: tuple[int, int], units: int = 0, gib: float = 0.0):
    """What it gives on CUDA, where torch fills `gcnArchName` with the device's name."""
    return amd(name, units, gib, name, capability)


MI300X = amd("gfx942:sramecc+:xnack-", 304, 192, "AMD Instinct MI300X", (9, 4))
MI325X = amd("gfx942:sramecc+:xnack-", 304, 256, "AMD Instinct MI325X", (9, 4))
MI355X = amd("gfx950:sramecc+:xnack-", 256, 288, "AMD Instinct MI355X", (9, 5))
RX7900 = amd("gfx1100", 96, 24, "AMD Radeon RX 7900 XTX", (11, 0))


@pytest.fixture
def pretend(monkeypatch):
    """Make torch see the given GPUs and nothing else."""

    def visible(*gpus, hip: bool = True):
        monkeypatch.setattr(torch.version, "hip", "7.2.0" if hip else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])

    return visible


# The table


@pytest.mark.parametrize("row", [*TABLE, CPU], ids=lambda row: f"{row.name} {row.arch}")
def test_every_row_says_where_it_is_from(row):
    assert row.source


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name} {row.arch}")
def test_an_fp8_peak_is_twice_the_bf16_peak_within_the_rounding_of_the_data_sheets(row):
    """True of every matrix unit in the table, so a typing error or a figure with sparsity shows."""
    if row.fp8_tflops is not None:
        assert row.fp8_tflops / row.bf16_tflops == pytest.approx(2, rel=0.015)


@pytest.mark.parametrize("row", [row for row in TABLE if not row.official], ids=lambda row: row.name)
def test_unofficial_figures_are_not_printed(row):
    assert row.peaks() is None


def test_the_unofficial_rows_are_those_without_a_data_sheet_seen():
    assert {row.name for row in TABLE if not row.official} == {"AMD Instinct MI300A", "AMD Instinct MI308X"}


@pytest.mark.parametrize("row", [row for row in TABLE if row.fp8_tflops and row.official], ids=lambda row: row.name)
def test_official_figures_are_printed_whole(row):
    assert f"{row.bf16_tflops:g} TFLOPS bf16" in row.peaks()
    assert f"{row.fp8_tflops:g} TFLOPS FP8" in row.peaks()


def test_without_figures_nothing_is_printed():
    assert CPU.peaks() is None


def test_products_that_share_arch_and_compute_units_can_be_told_apart():
    """Else `identify` could never choose between them: by memory if that differs, by the model's name if not."""
    products = [(row.arch, row.compute_units, row.memory_gb, row.name) for row in TABLE if row.compute_units]
    assert len(set(products)) == len(products)
    assert all(memory for *_, memory, _ in products)


# AMD, pretended


@pytest.mark.parametrize(
    ("units", "gib", "name", "fp8_tflops"),
    [
        (304, 192, "AMD Instinct MI300X", 2614.9),
        (304, 191.98, "AMD Instinct MI300X", 2614.9),
        (304, 192e9 / GIB, "AMD Instinct MI300X", 2614.9),
        (304, 170, "AMD Instinct MI300X", 2614.9),
        (304, 256, "AMD Instinct MI325X", 2614.9),
        (304, 255.98, "AMD Instinct MI325X", 2614.9),
        (304, 256e9 / GIB, "AMD Instinct MI325X", 2614.9),
        (304, 225, "AMD Instinct MI325X", 2614.9),
        (228, 128, "AMD Instinct MI300A", 1961.2),
        (228, 61, "AMD Instinct MI300A", 1961.2),
        (80, 192, "AMD Instinct MI308X", None),
    ],
)
@pytest.mark.parametrize("reported_name", ["", "AMD Instinct MI300X", "AMD Radeon Graphics"])
def test_pretended_gfx942_product_is_known_by_compute_units_and_memory_whatever_its_name(
    units, gib, name, fp8_tflops, reported_name
):
    found = identify(amd("gfx942:sramecc+:xnack-", units, gib, reported_name), hip=True)
    assert (found.name, found.arch, found.fp8_format, found.fp8_tflops) == (name, "gfx942", "fnuz", fp8_tflops)


@pytest.mark.parametrize(
    ("units", "gib"),
    [(38, 24), (38, 192), (76, 48), (152, 96), (20, 24), (304, 64), (304, 212), (304, 300), (303, 192)],
)
def test_pretended_gfx942_partition_or_unlisted_model_is_fnuz_without_figures(units, gib):
    found = identify(amd("gfx942", units, gib, "AMD Instinct MI300X"), hip=True)
    assert found.fp8_format == "fnuz"
    assert (found.bf16_tflops, found.fp8_tflops, found.memory_gb, found.peaks()) == (None, None, None, None)
    assert (found.name, found.compute_units) == ("AMD Instinct MI300X", units)


@pytest.mark.parametrize(
    ("reported_name", "bf16_tflops", "fp8_tflops"),
    [
        ("AMD Instinct MI350X", 2300, 4600),
        ("AMD Instinct MI355X", 2500, 5000),
        ("AMD Instinct MI355X OAM", 2500, 5000),
        ("AMD Instinct MI350 series", None, None),
        ("AMD Radeon Graphics", None, None),
        ("", None, None),
    ],
)
def test_pretended_gfx950_is_ocp_and_its_figures_follow_from_its_name_alone(reported_name, bf16_tflops, fp8_tflops):
    found = identify(amd("gfx950:sramecc+:xnack-", 256, 287.98, reported_name), hip=True)
    assert (found.arch, found.fp8_format) == ("gfx950", "ocp")
    assert (found.bf16_tflops, found.fp8_tflops) == (bf16_tflops, fp8_tflops)


def test_pretended_gfx950_partition_has_no_figures_though_its_name_says_the_product():
    found = identify(amd("gfx950", 32, 36, "AMD Instinct MI355X"), hip=True)
    assert (found.fp8_format, found.fp8_tflops, found.compute_units) == ("ocp", None, 32)


@pytest.mark.parametrize("arch", ["gfx1200", "gfx1201"])
def test_pretended_rdna4_is_allowed_with_a_caution(arch):
    found = identify(amd(arch, 32, 16, "AMD Radeon RX 9070 XT", (12, 0)), hip=True)
    assert (found.name, found.fp8_format, found.no_fp8_reason()) == ("AMD Radeon RX 9070 XT", "ocp", None)
    assert arch in found.caution
    assert "gfx942" in found.caution
    assert found.peaks() is None


@pytest.mark.parametrize("gpu", [MI300X, MI325X, MI355X], ids=lambda gpu: gpu.name)
def test_pretended_instinct_has_no_caution(gpu):
    assert identify(gpu, hip=True).caution is None


@pytest.mark.parametrize(
    ("arch", "capability"),
    [
        ("gfx90a:sramecc+:xnack-", (9, 0)),
        ("gfx1030", (10, 3)),
        *((arch, (11, int(arch[5]))) for arch in RDNA3),
        ("gfx1201x", (12, 0)),
        ("gfx1250", (12, 5)),
        ("gfx1300", (13, 0)),
        ("gfx940", (9, 4)),
        ("gfx9420", (9, 4)),
        ("gfx94", (9, 4)),
        ("xgfx942", (9, 4)),
        ("", (9, 4)),
    ],
)
def test_pretended_amd_gpu_outside_the_table_has_no_fp8_whatever_its_capability(arch, capability):
    """`capability >= (9, 4)` would let most of these through; an unknown arch is not assumed to work."""
    found = identify(amd(arch, 304, 192, "AMD Instinct MI300X", capability), hip=True)
    assert (found.fp8_format, found.peaks(), found.caution) == (None, None, None)
    assert found.arch == arch.split(":")[0]
    assert found.source


@pytest.mark.parametrize("suffix", ["", ":sramecc+:xnack-", ":sramecc-:xnack+", ":xnack-"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1201", "gfx90a", "gfx1100"])
def test_pretended_feature_suffix_changes_nothing(arch, suffix):
    assert identify(amd(arch + suffix, 304, 192), hip=True) == identify(amd(arch, 304, 192), hip=True)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100", "gfx1250"])
def test_pretended_refusal_names_the_arch_what_is_allowed_and_what_to_do(arch):
    reason = identify(amd(arch, name="Some GPU"), hip=True).no_fp8_reason()
    for part in ("Some GPU", arch, "gfx942, gfx950, gfx1200, gfx1201", "8.9", "on_unsupported"):
        assert part in reason


# NVIDIA, pretended


@pytest.mark.parametrize(
    ("capability", "arch", "fp8_format"),
    [
        ((7, 5), "sm_75", None),
        ((8, 0), "sm_80", None),
        ((8, 6), "sm_86", None),
        ((8, 9), "sm_89", "ocp"),
        ((9, 0), "sm_90", "ocp"),
        ((10, 0), "sm_100", "ocp"),
        ((12, 0), "sm_120", "ocp"),
    ],
)
def test_pretended_nvidia_has_ocp_from_capability_8_9_on(capability, arch, fp8_format):
    found = identify(nvidia("NVIDIA Something", capability, 100), hip=False)
    assert (found.name, found.arch, found.fp8_format) == ("NVIDIA Something", arch, fp8_format)
    assert (found.bf16_tflops, found.fp8_tflops, found.compute_units) == (None, None, 100)
    assert found.source


@pytest.mark.parametrize(
    ("name", "capability", "units", "bf16_tflops", "fp8_tflops"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 989.4, 1978.9),
        ("NVIDIA H100 PCIe", (9, 0), 114, 756, 1513),
        ("NVIDIA H200", (9, 0), 132, 989.5, 1979),
        ("NVIDIA L40S", (8, 9), 142, 362.05, 733),
        ("NVIDIA B200", (10, 0), 148, 2250, 4500),
        # Slices and siblings, which have other peaks or none that we know of.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, None, None),
        ("NVIDIA H100 80GB HBM3", (9, 0), 16, None, None),
        ("NVIDIA H100 NVL", (9, 0), 132, None, None),
        ("NVIDIA H200 NVL", (9, 0), 132, None, None),
        ("NVIDIA L40", (8, 9), 142, None, None),
    ],
)
def test_pretended_nvidia_has_figures_only_as_a_whole_listed_product(name, capability, units, bf16_tflops, fp8_tflops):
    found = identify(nvidia(name, capability, units), hip=False)
    assert (found.name, found.fp8_format) == (name, "ocp")
    assert (found.bf16_tflops, found.fp8_tflops) == (bf16_tflops, fp8_tflops)


def test_pretended_nvidia_is_never_read_as_amd():
    """A CUDA build of torch fills `gcnArchName` too, so the build decides and not the attribute."""
    gpu = amd("gfx942", 304, 192, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert identify(gpu, hip=False).fp8_format is None


# Who am I running on


def test_cpu_has_no_fp8_in_hardware_and_says_that_it_emulates():
    found = of_device(torch.device("cpu"))
    assert (found, found.arch, found.fp8_format) == (CPU, "cpu", None)
    assert "emulates both formats" in found.no_fp8_reason()


def test_another_accelerator_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Expected argument `device` to be a CPU .* but got `xpu:0`"):
        of_device(torch.device("xpu", 0))


def test_pretended_device_is_asked_by_its_index_and_build(pretend):
    pretend(MI300X, MI355X)
    assert of_device(torch.device("cuda", 1)).name == "AMD Instinct MI355X"
    pretend(nvidia("NVIDIA H200", (9, 0), 132))
    assert of_device(torch.device("cuda", 0)).fp8_format is None  # a ROCm build knows no such arch
    pretend(nvidia("NVIDIA H200", (9, 0), 132), hip=False)
    assert of_device(torch.device("cuda", 0)).fp8_format == "ocp"


def test_pretended_host_without_a_gpu_has_the_cpu(pretend):
    pretend()
    assert local_devices() == [CPU]


def test_pretended_every_visible_device_is_looked_at_and_a_second_without_fp8_is_named(pretend):
    pretend(MI300X, RX7900)
    found = local_devices()
    assert [each.arch for each in found] == ["gfx942", "gfx1100"]
    with pytest.raises(MixedFormatsError) as error:
        shared_format(found)
    for part in ("AMD Instinct MI300X (gfx942, first at index 0) has fnuz FP8", "HIP_VISIBLE_DEVICES", "bf16"):
        assert part in str(error.value)
    assert "AMD Radeon RX 7900 XTX (gfx1100, first at index 1) has no FP8" in str(error.value)


def test_pretended_mix_of_fnuz_and_ocp_is_refused(pretend):
    pretend(MI300X, MI300X, MI355X)
    with pytest.raises(MixedFormatsError, match=r"MI300X .* fnuz FP8; AMD Instinct MI355X .*index 2\) has ocp FP8"):
        shared_format(local_devices())


def test_pretended_products_of_one_format_may_be_mixed(pretend):
    pretend(MI300X, MI325X)
    assert shared_format(local_devices()) == "fnuz"


def test_devices_without_fp8_share_no_format_and_no_error():
    assert shared_format([CPU]) is None


def test_a_thousand_devices_make_a_short_error():
    many = [Hardware("A", "gfx942", "fnuz")] * 1023 + [Hardware("B", "gfx950", "ocp")]
    with pytest.raises(MixedFormatsError, match="first at index 1023") as error:
        shared_format(many)
    assert len(str(error.value)) < 500


def test_no_device_at_all_is_an_error():
    with pytest.raises(ValueError, match="at least one device"):
        shared_format([])


def test_importing_the_module_touches_no_device_and_imports_neither_torchao_nor_lightning():
    script = """
import sys
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a device was touched")

for name in ("get_device_properties", "get_device_capability", "get_device_name", "is_available", "device_count",
             "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
import lightning_fp8_rocm.hardware
unwanted = {"torchao", "lightning", "pytorch_lightning", "lightning_fabric"} & sys.modules.keys()
assert not unwanted, unwanted
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

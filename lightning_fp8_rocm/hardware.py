"""One table: architecture -> FP8 format, peak rates, memory, what is allowed; and which row a device is.

Importing this module touches no device and imports neither torchao nor Lightning. Only :func:`of_device` and
:func:`local_devices` ask a GPU who it is, and that starts the GPU runtime: call them after a launcher has forked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

FP8Format = Literal["ocp", "fnuz"]


@dataclass(frozen=True)
class Hardware:
    """What is known of one kind of device.

    Rates are dense peaks (no structured sparsity) in TFLOPS, 10**12 floating-point operations a second, as the vendor
    states them. Nothing here was measured.

    Args:
        name: The product, or what the device calls itself where it is no product of :data:`TABLE`.
        arch: ``"gfx942"`` (the LLVM target, without its feature suffix), ``"sm_90"`` or ``"cpu"``.
        fp8_format: The FP8 format that the matrix units multiply: ``"ocp"`` is ``float8_e4m3fn`` / ``float8_e5m2``
            (largest finite value 448 / 57344), ``"fnuz"`` is ``float8_e4m3fnuz`` / ``float8_e5m2fnuz`` (240 / 57344).
            None: no FP8 matrix products in hardware that this package relies on.
        bf16_tflops: Dense bf16 peak; None where no source states it.
        fp8_tflops: Dense FP8 peak; None where no source states it.
        memory_gb: Memory of the whole product in GB as the vendor prints it. AMD's "192 GB" is 192 * 2**30 bytes; a
            driver reports a little less than the printed figure.
        compute_units: Compute units (AMD) or streaming multiprocessors (NVIDIA) of the whole product, None where
            the vendor's sheet leaves them out; for a device that is no product of the table, what it reports.
        source: Where the format and the figures come from.
        official: False: the figures are not from the vendor, and are never printed as fact.
        caution: A sentence to warn the user with, where the hardware is allowed but nothing is promised.
    """

    name: str
    arch: str
    fp8_format: FP8Format | None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    memory_gb: float | None = None
    compute_units: int | None = None
    source: str = ""
    official: bool = True
    caution: str | None = None

    def peaks(self) -> str | None:
        """The peak rates as text for a person, or None where the vendor states none.

        >>> Hardware("x", "gfx942", "fnuz", bf16_tflops=1307.4, fp8_tflops=2614.9).peaks()
        '1307.4 TFLOPS bf16, 2614.9 TFLOPS FP8 (dense peaks)'
        >>> Hardware("x", "gfx942", "fnuz", bf16_tflops=980.6, fp8_tflops=1961.2, official=False).peaks() is None
        True
        """
        if not self.official or self.bf16_tflops is None or self.fp8_tflops is None:
            return None
        return f"{self.bf16_tflops:g} TFLOPS bf16, {self.fp8_tflops:g} TFLOPS FP8 (dense peaks)"

    def environment(self) -> dict[str, str]:
        """Environment variables that AMD's training guides set for this hardware; none for others.

        ``GPU_MAX_HW_QUEUES`` and ``HSA_NO_SCRATCH_RECLAIM`` are read when the GPU runtime starts: in the process that
        launches the others that is over by then, so export them. Not measured on AMD hardware by this package.
        Sources: https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/training/, AMD-AGI/Primus
        ``runner/helpers/envs``, ROCm/rccl#2104 (WarpSpeed gives NaN on gfx950).

        >>> Hardware("AMD Instinct MI355X", "gfx950", "ocp").environment()["RCCL_WARP_SPEED_AUTO"]
        '0'
        >>> CPU.environment()
        {}
        """
        if not self.arch.startswith("gfx"):
            return {}
        common = {
            "GPU_MAX_HW_QUEUES": "2",  # overlap of communication and computation
            "TORCH_NCCL_HIGH_PRIORITY": "1",
            "RCCL_MSCCL_ENABLE": "0",  # against data corruption; gone from ROCm 7.13 on, and ignored there
            "RCCL_MSCCLPP_ENABLE": "0",
        }
        of_arch = {"gfx942": {"HSA_NO_SCRATCH_RECLAIM": "1"}, "gfx950": {"RCCL_WARP_SPEED_AUTO": "0"}}
        return common | of_arch.get(self.arch, {})

    def no_fp8_reason(self) -> str | None:
        """Why this hardware multiplies no FP8 matrices, and what to do instead; None where it does.

        >>> Hardware("AMD Instinct MI300X", "gfx942", "fnuz").no_fp8_reason() is None
        True
        >>> print(CPU.no_fp8_reason())
        A CPU has no FP8 matrix products in hardware: it emulates both formats, which shows the numerics, not the speed.
        """
        if self.fp8_format is not None:
            return None
        if self.arch == CPU.arch:
            return (
                "A CPU has no FP8 matrix products in hardware: it emulates both formats, "
                "which shows the numerics, not the speed."
            )
        allowed = ", ".join(dict.fromkeys(row.arch for row in TABLE if row.fp8_format and row.arch.startswith("gfx")))
        return (
            f"{self.name} ({self.arch}) has no FP8 matrix products that this package can use. "
            f"It uses those of AMD {allowed} and of NVIDIA GPUs from compute capability 8.9 on. "
            'Pass `on_unsupported="bf16"` to train in bf16 on this device, or `on_unsupported="emulate"` to see the '
            "numerics of FP8 without its speed."
        )


class MixedFormatsError(RuntimeError):
    """The devices of one run do not all multiply the same FP8 format."""


class DeviceProperties(Protocol):
    """What :func:`identify` reads of ``torch.cuda.get_device_properties(i)``; on NVIDIA it leaves `gcnArchName` be."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    gcnArchName: str


_AMD_FORMATS = "https://rocm.docs.amd.com/projects/hipBLASLt/en/latest/reference/data-type-support.html"
_AMD_SPECS = "https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_CUDA_FORMATS = "https://nvidia.github.io/TransformerEngine/support_matrix.html"
_RDNA4_CAUTION = (
    "{arch} (RDNA4) multiplies FP8 matrices but is no data-centre part: this package allows it and promises neither "
    "speed nor correctness there. Compare a short run with `precision='bf16-mixed'` before you rely on it, or train on "
    "gfx942 (MI300 series) or gfx950 (MI350 series)."
)

CPU = Hardware(
    "CPU", "cpu", fp8_format=None, source="torch: the CPU build of `torch._scaled_mm` computes both formats in software"
)

# An AMD row without compute units stands for its arch: of a partition, or of a model that is not listed, the format is
# known and the figures are not.
TABLE: tuple[Hardware, ...] = (
    Hardware(
        "AMD Instinct MI300X",
        "gfx942",
        "fnuz",
        bf16_tflops=1307.4,
        fp8_tflops=2614.9,
        memory_gb=192,
        compute_units=304,
        source="AMD Instinct MI300X data sheet: https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/"
        f"data-sheets/amd-instinct-mi300x-data-sheet.pdf; {_AMD_SPECS}",
    ),
    Hardware(
        "AMD Instinct MI325X",
        "gfx942",
        "fnuz",
        bf16_tflops=1307.4,
        fp8_tflops=2614.9,
        memory_gb=256,
        compute_units=304,
        source="AMD Instinct MI325X data sheet: https://www.amd.com/en/products/accelerators/instinct/mi300/"
        f"mi325x.html; {_AMD_SPECS}",
    ),
    Hardware(
        "AMD Instinct MI300A",
        "gfx942",
        "fnuz",
        bf16_tflops=980.6,
        fp8_tflops=1961.2,
        memory_gb=128,
        compute_units=228,
        source="torch/_inductor/analysis/device_info.py, which quotes AMD's data sheet; the sheet itself was not seen",
        official=False,
    ),
    Hardware(
        "AMD Instinct MI308X",
        "gfx942",
        "fnuz",
        memory_gb=192,
        compute_units=80,
        source="reports of users for the compute units and the memory; no statement of a peak was found",
        official=False,
    ),
    Hardware("AMD Instinct MI300 series", "gfx942", "fnuz", source=_AMD_FORMATS),
    Hardware(
        "AMD Instinct MI350X",
        "gfx950",
        "ocp",
        bf16_tflops=2300.0,
        fp8_tflops=4600.0,
        memory_gb=288,
        compute_units=256,
        # torch's copy says 2309.6 and 4614.0; 256 units at 2.2 GHz give 2306.9, so its last digits are not repeated.
        source="AMD Instinct MI350X product brief, rounded, by way of AMD-AGI/Primus peak_flops_patches.py (bf16) and "
        f"torch/_inductor/analysis/device_info.py (FP8); {_AMD_SPECS} (memory, compute units)",
    ),
    Hardware(
        "AMD Instinct MI355X",
        "gfx950",
        "ocp",
        bf16_tflops=2500.0,
        fp8_tflops=5000.0,
        memory_gb=288,
        compute_units=256,
        source="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html, rounded, by way of pytorch/"
        "torchtitan torchtitan/tools/utils.py (bf16; FP8 runs at twice that rate on CDNA 4); "
        f"{_AMD_SPECS} (memory, compute units)",
    ),
    Hardware("AMD Instinct MI350 series", "gfx950", "ocp", source=_AMD_FORMATS),
    *(
        Hardware("AMD RDNA4", arch, "ocp", source=_AMD_FORMATS, caution=_RDNA4_CAUTION.format(arch=arch))
        for arch in ("gfx1200", "gfx1201")
    ),
    Hardware("AMD Instinct MI200 series", "gfx90a", None, source=_AMD_FORMATS),
    # These report capability (11, x), so that a test for `capability >= (9, 4)` would let them through.
    *(
        Hardware("AMD RDNA3", arch, None, source=_AMD_FORMATS)
        for arch in ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153")
    ),
    # Named as the driver names them: a MIG slice and a cut-down model have another name, and no figures here.
    Hardware(
        "NVIDIA H100 80GB HBM3",
        "sm_90",
        "ocp",
        bf16_tflops=989.4,
        fp8_tflops=1978.9,
        memory_gb=80,
        compute_units=132,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper, H100 SXM5: https://resources.nvidia.com/"
        "en-us-tensor-core",
    ),
    Hardware(
        "NVIDIA H100 PCIe",
        "sm_90",
        "ocp",
        bf16_tflops=756.0,
        fp8_tflops=1513.0,
        memory_gb=80,
        compute_units=114,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper, H100 PCIe: https://resources.nvidia.com/"
        "en-us-tensor-core",
    ),
    Hardware(
        "NVIDIA H200",
        "sm_90",
        "ocp",
        bf16_tflops=989.5,
        fp8_tflops=1979.0,
        memory_gb=141,
        source="NVIDIA H200 data sheet, H200 SXM, half of the figures with sparsity (1979 and 3958): "
        "https://www.nvidia.com/en-us/data-center/h200/",
    ),
    Hardware(
        "NVIDIA L40S",
        "sm_89",
        "ocp",
        bf16_tflops=362.05,
        fp8_tflops=733.0,
        memory_gb=48,
        compute_units=142,
        source="NVIDIA L40S data sheet, the figures without sparsity: https://resources.nvidia.com/en-us-l40s/"
        "l40s-datasheet-28413",
    ),
    Hardware(
        "NVIDIA B200",
        "sm_100",
        "ocp",
        bf16_tflops=2250.0,
        fp8_tflops=4500.0,
        memory_gb=180,
        source="NVIDIA Blackwell architecture brief, page 19, half of the figures with sparsity, as in torchao "
        "testing/training/roofline_utils.py: https://resources.nvidia.com/en-us-blackwell-architecture; memory: "
        "NVIDIA DGX B200 data sheet, 1440 GB over eight GPUs",
    ),
)


def identify(properties: DeviceProperties, *, hip: bool) -> Hardware:
    """Find the row of one GPU.

    An AMD GPU is known by the exact text of `gcnArchName` before the first colon, never by its capability: RDNA2 and
    RDNA3 report (10, x) and (11, x) without FP8, and an arch that is not in :data:`TABLE` is not assumed to work.

    Args:
        properties: ``torch.cuda.get_device_properties(i)``, or an object like it.
        hip: Whether torch is a ROCm build: ``torch.version.hip is not None``.

    Returns:
        The product's row; or, for a partition or a model that is not listed, the format of its arch without figures,
        under the name and with the compute units that the device reports.

    >>> from types import SimpleNamespace
    >>> gpu = SimpleNamespace(name="", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    >>> gpu.total_memory = 256 * 2**30
    >>> identify(gpu, hip=True).name
    'AMD Instinct MI325X'
    >>> gpu.gcnArchName = "gfx1100"
    >>> identify(gpu, hip=True).fp8_format is None
    True
    """
    if not hip:
        return _identify_nvidia(properties)
    arch = properties.gcnArchName.split(":")[0]
    rows = [row for row in TABLE if row.arch == arch]
    products = [row for row in rows if row.compute_units == properties.multi_processor_count]
    if len(products) > 1:
        products = [row for row in products if _fits(row, properties.total_memory)]
    if len(products) > 1:
        # Same arch, same compute units, same memory: nothing but the model in the device's name is left to go by.
        products = [row for row in products if row.name.split()[-1] in properties.name]
    if len(products) == 1:
        return products[0]
    family = next((row for row in rows if row.compute_units is None), None) or Hardware(
        f"AMD {arch}", arch, fp8_format=None, source=f"not in the table of lightning_fp8_rocm; {_AMD_FORMATS}"
    )
    return replace(family, name=properties.name or family.name, compute_units=properties.multi_processor_count)


def _identify_nvidia(properties: DeviceProperties) -> Hardware:
    arch = f"sm_{properties.major}{properties.minor}"
    for row in TABLE:
        whole = row.compute_units in (None, properties.multi_processor_count)
        if row.arch == arch and row.name == properties.name and whole:
            return row
    return Hardware(
        properties.name or f"NVIDIA {arch}",
        arch,
        fp8_format="ocp" if (properties.major, properties.minor) >= (8, 9) else None,
        compute_units=properties.multi_processor_count,
        source=_CUDA_FORMATS,
    )


def _fits(product: Hardware, total_memory: int) -> bool:
    """Whether a device that reports `total_memory` bytes can be `product`, some of it being reserved.

    Wide enough for drivers and hypervisors that keep a seventh, and for 10**9 bytes read as a GB; still, 192 GB and
    256 GB do not overlap.

    >>> mi300x, mi325x = TABLE[:2]
    >>> [_fits(mi300x, gib * 2**30) for gib in (166, 192, 256)]
    [True, True, False]
    >>> [_fits(mi325x, gib * 2**30) for gib in (166, 192, 256)]
    [False, False, True]
    """
    assert product.memory_gb is not None, f"{product.name} shares its compute units and has no memory in TABLE."
    return 0.86 <= total_memory / 2**30 / product.memory_gb <= 1.01


def of_device(device: torch.device) -> Hardware:
    """Find the row of a torch device. Of a CUDA or ROCm device this asks the device, which starts the GPU runtime.

    Raises:
        ValueError: If the device is neither a CPU nor a CUDA or ROCm GPU.

    >>> of_device(torch.device("cpu")).name
    'CPU'
    """
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        return identify(torch.cuda.get_device_properties(device), hip=torch.version.hip is not None)
    raise ValueError(
        f"Expected argument `device` to be a CPU or a CUDA or ROCm GPU (`cuda`), but got `{device}`. "
        "FP8 on other accelerators is not supported: use `precision='bf16-mixed'` there."
    )


def local_devices() -> list[Hardware]:
    """Every visible GPU in the order of its index, or the CPU where there is none. This starts the GPU runtime."""
    if not torch.cuda.is_available():
        return [CPU]
    return [of_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def shared_format(hardware: Sequence[Hardware]) -> FP8Format | None:
    """Give the one FP8 format of several devices: those of a host, or one of each rank.

    A scale that fits one format is wrong by almost two in the other (448 against 240), and a rank that cannot read
    the FP8 shards of another cannot train with it.

    Raises:
        MixedFormatsError: If they differ, one part having FP8 and another none included.
        ValueError: If there is no device.

    >>> shared_format([Hardware("AMD Instinct MI300X", "gfx942", "fnuz")] * 8)
    'fnuz'
    >>> shared_format([CPU, CPU]) is None
    True
    """
    if not hardware:
        raise ValueError("Expected argument `hardware` to hold at least one device, but got none.")
    formats = {each.fp8_format for each in hardware}
    if len(formats) == 1:
        return formats.pop()
    first_of_kind: dict[tuple[str, str, FP8Format | None], int] = {}
    for index, each in enumerate(hardware):
        first_of_kind.setdefault((each.name, each.arch, each.fp8_format), index)
    kinds = "; ".join(
        f"{name} ({arch}, first at index {index}) has {fp8_format or 'no'} FP8"
        for (name, arch, fp8_format), index in first_of_kind.items()
    )
    raise MixedFormatsError(
        f"The devices of one run must all have the same FP8 format, but {kinds}. "
        "Keep to devices of one format: choose them with `devices=`, or hide the others with HIP_VISIBLE_DEVICES "
        "(AMD) or CUDA_VISIBLE_DEVICES (NVIDIA); or train on all of them in bf16 (`precision='bf16-mixed'`)."
    )

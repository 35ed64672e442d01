"""The numbers of device models as their makers print them, with assumed prices.

The peaks are for dense arithmetic without structured sparsity, with products summed in float32 if there is a choice, on
the matrix units if a matrix product of that dtype runs on them. A 0 stands for a number that was not published.
"""

from typing import Literal

Origin = Literal["datasheet", "measured", "assumed"]
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4")

# Generation -> rows: names as drivers report them, without the maker; sizes in GB that names state, the first of which
# is the memory of the device (a maker's GB is a GiB); memory GB/s; W; assumed USD per hour; class of the links inside
# of a host, and their GB/s of a device in one direction; units that compute tiles of products (streaming
# multiprocessors, compute units); TFLOP/s by dtype.
Row = tuple[str, tuple[float, ...], float, float, float, tuple[str, float], int, tuple[float, ...]]
DATASHEETS: dict[str, tuple[Row, ...]] = {
    #   names, GB, GB/s, W, USD, links, units, (fp64, fp32, tf32, bf16, fp16, fp8, fp4)
    "Pascal": (
        ("P100-SXM2-16GB", (16,), 732, 300, 1, ("NVLink2", 80), 56, (5.3, 10.6, 0, 0, 21.2)),
        ("P100-PCIE-16GB", (16,), 732, 250, 1, ("PCIe", 16), 56, (4.7, 9.3, 0, 0, 18.7)),
    ),
    "Volta": (
        ("V100-SXM2-32GB", (32,), 900, 300, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-SXM2-16GB", (16,), 900, 300, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-SXM3-32GB", (32,), 900, 350, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-PCIE-32GB", (32,), 900, 250, 2, ("PCIe", 16), 80, (7, 14, 0, 0, 112)),
        ("V100-PCIE-16GB", (16,), 900, 250, 2, ("PCIe", 16), 80, (7, 14, 0, 0, 112)),
    ),
    "Turing": (
        ("T4", (16,), 320, 70, 0.5, ("PCIe", 16), 40, (0, 8.1, 0, 0, 65)),
        ("RTX 2080 Ti", (11,), 616, 250, 0, ("PCIe", 16), 68, (0, 13.4, 0, 0, 53.8)),
    ),
    "Ampere": (
        ("A100-SXM4-80GB", (80,), 2039, 400, 2, ("NVLink3", 300), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100-SXM4-40GB", (40,), 1555, 400, 2, ("NVLink3", 300), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100 80GB PCIe", (80,), 1935, 300, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100-PCIE-40GB", (40,), 1555, 250, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A800-SXM4-80GB", (80,), 2039, 400, 2, ("NVLink3", 200), 108, (19.5, 19.5, 156, 312, 312)),
        ("A800 80GB PCIe", (80,), 1935, 300, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A10", (24,), 600, 150, 1, ("PCIe", 32), 72, (0, 31.2, 62.5, 125, 125)),
        ("A10G", (24,), 600, 300, 1, ("PCIe", 32), 80, (0, 35, 35, 70, 70)),
        ("A30", (24,), 933, 165, 1, ("PCIe", 32), 56, (10.3, 10.3, 82, 165, 165)),
        ("A40", (48,), 696, 300, 1, ("PCIe", 32), 84, (0, 37.4, 74.8, 149.7, 149.7)),
        ("RTX 3090", (24,), 936, 350, 0, ("PCIe", 32), 82, (0, 35.6, 35.6, 71, 71)),
        ("RTX A6000", (48,), 768, 300, 1, ("PCIe", 32), 84, (0, 38.7, 77.4, 154.8, 154.8)),
    ),
    "Ada": (
        ("L4", (24,), 300, 72, 0.8, ("PCIe", 32), 58, (0, 30.3, 60, 121, 121, 242.5)),
        ("L20", (48,), 864, 275, 0, ("PCIe", 32), 92, (0, 59.8, 59.8, 119.5, 119.5, 239)),
        ("L40", (48,), 864, 300, 1, ("PCIe", 32), 142, (0, 90.5, 90.5, 181, 181, 362)),
        ("L40S", (48,), 864, 350, 1.5, ("PCIe", 32), 142, (0, 91.6, 183, 362, 362, 733)),
        ("RTX 4090", (24,), 1008, 450, 0, ("PCIe", 32), 128, (0, 82.6, 82.6, 165.2, 165.2, 330.3)),
        ("RTX 6000 Ada Generation", (48,), 960, 300, 1, ("PCIe", 32), 142, (0, 91.1, 182.1, 364.2, 364.2, 728.5)),
    ),
    "Hopper": (
        (
            "H100 SXM | H100 80GB HBM3",
            (80,),
            3350,
            700,
            3,
            ("NVLink4", 450),
            132,
            (67, 67, 494.7, 989.4, 989.4, 1978.9),
        ),
        ("H100 PCIe", (80,), 2000, 350, 2.5, ("PCIe", 64), 114, (51, 51, 378, 756, 756, 1513)),
        ("H100 NVL", (94,), 3900, 400, 2.5, ("PCIe", 64), 132, (60, 60, 417.5, 835.5, 835.5, 1671)),
        ("H800 SXM | H800 80GB HBM3", (80,), 3350, 700, 3, ("NVLink4", 200), 132, (1, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("H800 PCIe", (80,), 2000, 350, 2.5, ("PCIe", 64), 114, (0.8, 51, 378, 756, 756, 1513)),
        ("H20", (96,), 4000, 400, 1.5, ("NVLink4", 450), 78, (1, 44, 74, 148, 148, 296)),
        ("H200", (141,), 4800, 700, 3.5, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("H200 NVL", (141,), 4800, 600, 3.5, ("PCIe", 64), 132, (60, 60, 417.5, 835.5, 835.5, 1671)),
        # The driver names the size of the processor's memory, 480 GB; W are of both chips.
        ("GH200 480GB", (96, 480), 4000, 1000, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("GH200 144G HBM3e", (144,), 4900, 1000, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
    ),
    # In the Grand Teton hosts of Meta
    "Hopper at 500 W": (
        ("H100 SXM 96GB HBM2e 500W", (96,), 2400, 500, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
    ),
    "Blackwell": (
        ("B100", (180, 192), 7700, 700, 5, ("NVLink5", 900), 148, (30, 60, 900, 1750, 1750, 3500, 7000)),
        ("B200", (180, 192), 7700, 1000, 5, ("NVLink5", 900), 148, (37, 75, 1100, 2250, 2250, 4500, 9000)),
        ("GB200", (186, 192), 8000, 1200, 6, ("NVLink5", 900), 148, (40, 80, 1250, 2500, 2500, 5000, 10000)),
        ("B300", (288, 270), 7700, 1100, 6, ("NVLink5", 900), 148, (1.2, 75, 1100, 2250, 2250, 4500, 13500)),
        ("GB10 | Spark", (128,), 273, 140, 0, ("PCIe", 32), 48, (0, 31, 62, 125, 125, 250, 500)),
        ("RTX PRO 6000", (96,), 1792, 600, 2, ("PCIe", 64), 188, (0, 125, 252, 504, 504, 1008, 2015)),
        ("RTX 5090", (32,), 1792, 575, 0, ("PCIe", 64), 170, (0, 104.8, 104.8, 209.5, 209.5, 419)),
    ),
    "Blackwell at 1400 W": (
        ("GB300", (288, 279), 8000, 1400, 7, ("NVLink5", 900), 148, (1.3, 80, 1250, 2500, 2500, 5000, 15000)),
    ),
    "CDNA": (
        # The first three have two dies, which the driver shows as two devices: the numbers are of one.
        ("MI250", (64, 128), 1638, 280, 1, ("xGMI", 200), 104, (45.3, 45.3, 0, 181, 181)),
        ("MI250X", (64, 128), 1638, 280, 1, ("xGMI", 200), 110, (47.9, 47.9, 0, 191.5, 191.5)),
        ("MI210", (64,), 1638, 300, 1, ("PCIe", 32), 104, (45.3, 45.3, 0, 181, 181)),
        ("MI300A", (128,), 5300, 550, 3, ("xGMI", 384), 228, (122.6, 122.6, 490.3, 980.6, 980.6, 1961.2)),
        ("MI300X", (192,), 5300, 750, 3, ("xGMI", 448), 304, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9)),
        ("MI325X", (256,), 6000, 1000, 3.5, ("xGMI", 448), 304, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9)),
        ("MI350X", (288,), 8000, 1000, 4, ("xGMI", 537.6), 256, (72.1, 144.2, 0, 2306.9, 2306.9, 4613.8, 9227.5)),
        ("MI355X", (288,), 8000, 1400, 4, ("xGMI", 537.6), 256, (78.6, 157.3, 0, 2516.6, 2516.6, 5033.2, 10066.3)),
    ),
    "Gaudi": (
        ("Gaudi2", (96,), 2450, 600, 1.5, ("RDMA", 262.5), 1, (0, 0, 0, 432, 432, 865)),
        ("Gaudi3", (128,), 3700, 900, 2.5, ("RDMA", 525), 1, (0, 0, 0, 1835, 1835, 1835)),
    ),
    "TPU": (
        # The makers of other chips print a limit of the power; of TPU v4 the largest measured power was published.
        ("TPU v3", (32,), 900, 450, 2, ("ICI", 328), 8, (0, 0, 0, 123)),
        ("TPU v4", (32,), 1200, 192, 3.2, ("ICI", 300), 8, (0, 0, 0, 275)),
        ("TPU v5e | TPU v5 lite", (16,), 819, 0, 1.2, ("ICI", 200), 8, (0, 0, 0, 197)),
        ("TPU v5p", (95,), 2765, 0, 4.2, ("ICI", 600), 8, (0, 0, 0, 459)),
        ("TPU v6e | Trillium", (32,), 1640, 0, 2.7, ("ICI", 400), 8, (0, 0, 0, 918)),
    ),
}

# Rows of which no datasheet is public, in the same columns: press reports, and orders of magnitude of a processor core.
ASSUMED: dict[str, tuple[Row, ...]] = {
    "Blackwell": (("RTX 6000D", (84,), 1398, 0, 0, ("PCIe", 64), 156, (0, 97, 195, 390, 390, 780, 1560)),),
    "CPU": (("CPU", (8,), 10, 0, 0, ("PCIe", 8), 1, (0.05, 0.1, 0.1, 0.1, 0.1)),),
}

PRICE_SOURCE = "rounded list prices of on-demand clouds"
# Generations whose kernels a described device may resemble
GENERATIONS = (*DATASHEETS, "CPU")

# The part of the memory that a process can allocate -> how names of such devices begin, and whose measurement it is.
USABLE_SHARES: tuple[tuple[float, str, Origin, str], ...] = (
    (0.935, r"B300|GB300", "measured", "memory that nvidia-smi prints; less of 288 GB is enabled"),
    (0.935, r"T4|A10$|A40|L4|L20", "measured", "memory that nvidia-smi prints, with ECC on"),
    (0.93, r"GB10", "measured", "memory that CUDA reports; the processor shares it"),
    (0.99, r"P100|V100|A100|H100|H200|B200|GB200", "measured", "memory that CUDA reports"),
    (1.0, r"MI2|MI300X", "measured", "memory that ROCm reports"),
    (1.0, r"MI", "assumed", "like MI300X"),
    (1.0, r"CPU", "assumed", "all of its part of the host's memory"),
    (0.99, r"", "assumed", "like A100 and H100"),
)

"""Which bits go where: formats, strategies and the configuration of adaptive precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tilesmith.engine.argument_checks import suggesting

WIDTHS = (2, 3, 4, 6, 8)
TILE = 16  # rows of a tile
GROUP = 64  # columns of a tile, which share a scale and a zero point in each row
GRADIENT_WEIGHT, ACTIVATION_WEIGHT = 0.3, 0.4  # at which the Fisher information is used as it was measured


class PrecisionFormat(Enum):
    """The format of a stored weight. INTn formats hold n-bit codes, with a float16 scale and zero for every 64
    neighbours."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT6 = "int6"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"

    @property
    def bits(self) -> int:
        """Bits of a number, not counting scales."""
        return int(self.value.lstrip("fpintb"))


class AllocationStrategy(Enum):
    """How the width of each tile is chosen for a given number of bytes.

    UNIFORM: one width for all, the widest that fits. Needs no calibration.
    ENTROPY_BASED: reverse water-filling on the tiles' differential entropy plus half the logarithm of their Fisher
      information: a tile of variance v and information f is taken to lose f v 4^-bits. Source: Cover and Thomas,
      Elements of Information Theory, 10.3.3.
    FISHER: a tile loses what the Fisher information says of the errors that its codes really have at each width.
    MEASURED: one width for each layer, by the loss measured on the calibration data with this layer alone packed.
    """

    UNIFORM = "uniform"
    ENTROPY_BASED = "entropy_based"
    FISHER = "fisher"
    MEASURED = "measured"


class QuantizationMode(Enum):
    """How codes, scales and zeros are found.

    DYNAMIC: from each group's own weights, by a search for the least squared error.
    STATIC: from the inputs that the layers see on the calibration data: errors of a column are compensated in the
      columns after it. Source: Frantar et al., GPTQ, arXiv:2210.17323.
    """

    DYNAMIC = "dynamic"
    STATIC = "static"


@suggesting
@dataclass(frozen=True)
class PrecisionConfig:
    """The target of `create_ultra_precision_module`, and how it is reached.

    base_precision: the format that memory is compared with: FP32, FP16 or BF16. A reduction of 0.4 means that all
      parameters take 0.6 of the bytes that they would take in that format. What is not packed keeps its dtype.
    allocation_strategy: see `AllocationStrategy`; all but UNIFORM need calibration data.
    quantization_mode: see `QuantizationMode`; STATIC needs calibration data.
    entropy_threshold: bits of information that the code of a weight can hold at least: narrower widths are not used.
      1.5 admits 2 bits, 2.5 begins at 3 bits, 8.0 leaves 8 bits alone.
    target_memory_reduction: at least this share of the bytes is saved, in (0, 1).
    gradient_weight, activation_weight: how much the two factors of the Fisher information, the mean squares of a row's
      output gradients and of a column's inputs, count: in proportion to the defaults, as exponents. At the defaults the
      information is used as it was measured; 0 leaves a factor out. They need calibration data. The first moves widths
      alone, so UNIFORM and MEASURED refuse it; the second weighs the errors of codes, too, unless these are STATIC.

    Raises TypeError and ValueError for other values, and for weights that would have no effect.
    """

    base_precision: PrecisionFormat = PrecisionFormat.FP16
    allocation_strategy: AllocationStrategy = AllocationStrategy.ENTROPY_BASED
    quantization_mode: QuantizationMode = QuantizationMode.DYNAMIC
    entropy_threshold: float = 1.5
    target_memory_reduction: float = 0.4
    gradient_weight: float = GRADIENT_WEIGHT
    activation_weight: float = ACTIVATION_WEIGHT

    def __post_init__(self) -> None:
        kinds = {
            "base_precision": PrecisionFormat,
            "allocation_strategy": AllocationStrategy,
            "quantization_mode": QuantizationMode,
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"PrecisionConfig: {name} must be of {kind.__name__}, got {getattr(self, name)!r}")
        if self.base_precision not in (PrecisionFormat.FP32, PrecisionFormat.FP16, PrecisionFormat.BF16):
            raise ValueError(
                f"PrecisionConfig: base_precision is {self.base_precision.name}; memory is counted against FP32, FP16 "
                "or BF16, and target_memory_reduction says how much smaller the weights get"
            )
        for name in ("entropy_threshold", "target_memory_reduction", "gradient_weight", "activation_weight"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise TypeError(f"PrecisionConfig: {name} must be a finite number, got {value!r}")
        if not 0 < self.target_memory_reduction < 1:
            raise ValueError(
                f"PrecisionConfig: target_memory_reduction is {self.target_memory_reduction}; it must be between 0 and "
                "1"
            )
        if not 0 <= self.entropy_threshold <= WIDTHS[-1]:
            raise ValueError(
                f"PrecisionConfig: entropy_threshold is {self.entropy_threshold}; it must be in [0, 8] bits"
            )
        for name in ("gradient_weight", "activation_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"PrecisionConfig: {name} is {getattr(self, name)}; it must be 0 or more")
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """ValueError for a weight that this strategy and mode would not look at."""
        strategy, mode = self.allocation_strategy, self.quantization_mode
        if strategy not in (AllocationStrategy.UNIFORM, AllocationStrategy.MEASURED):
            return
        ignored = {"gradient_weight": GRADIENT_WEIGHT}
        if mode is QuantizationMode.STATIC:
            ignored["activation_weight"] = ACTIVATION_WEIGHT
        for name, default in ignored.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"PrecisionConfig: {name} is {getattr(self, name)}, which changes nothing with {strategy.name} "
                    f"widths and {mode.name} codes; leave it at {default}, or take ENTROPY_BASED or FISHER"
                )

    @property
    def weighted(self) -> bool:
        """Whether the Fisher information is not used as it was measured."""
        return (self.gradient_weight, self.activation_weight) != (GRADIENT_WEIGHT, ACTIVATION_WEIGHT)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that `entropy_threshold` leaves."""
        return tuple(w for w in WIDTHS if w >= self.entropy_threshold)

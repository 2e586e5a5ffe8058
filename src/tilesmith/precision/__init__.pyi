# Written by: python -m tilesmith.validate.stubs

from tilesmith.precision.attention import FP8AttentionConfig as FP8AttentionConfig
from tilesmith.precision.config import FP8Config as FP8Config
from tilesmith.precision.config import FP8Format as FP8Format
from tilesmith.precision.convert import convert_model_to_fp8 as convert_model_to_fp8
from tilesmith.precision.convert import revert_model_from_fp8 as revert_model_from_fp8
from tilesmith.precision.engine import FP8TrainingEngine as FP8TrainingEngine
from tilesmith.precision.engine import create_fp8_trainer as create_fp8_trainer
from tilesmith.precision.linear import FP8LinearLayer as FP8LinearLayer
from tilesmith.precision.scaling import refresh_fp8 as refresh_fp8

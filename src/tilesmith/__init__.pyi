# Written by: python -m tilesmith.validate.stubs

from tilesmith import attention as attention
from tilesmith import bench as bench
from tilesmith import cli as cli
from tilesmith import codegen as codegen
from tilesmith import core as core
from tilesmith import device as device
from tilesmith import distributed as distributed
from tilesmith import engine as engine
from tilesmith import flash_attention as flash_attention
from tilesmith import hardware as hardware
from tilesmith import integrations as integrations
from tilesmith import kernels as kernels
from tilesmith import models as models
from tilesmith import nn as nn
from tilesmith import ops as ops
from tilesmith import precision as precision
from tilesmith import rewrite as rewrite
from tilesmith import runtime as runtime
from tilesmith import settings as settings
from tilesmith import utils as utils
from tilesmith import validate as validate
from tilesmith.engine import explain as explain
from tilesmith.engine import optimize_kernel as optimize_kernel
from tilesmith.engine import register_kernel as register_kernel
from tilesmith.engine import use as use
from tilesmith.engine.memory import MemoryConfig as MemoryConfig
from tilesmith.models import fit_sequence as fit_sequence
from tilesmith.models import optimize as optimize
from tilesmith.models import register_for_sdpa as register_for_sdpa
from tilesmith.models import register_for_transformers as register_for_transformers
from tilesmith.models import report as report
from tilesmith.models import shard_sequence as shard_sequence
from tilesmith.models import undo as undo
from tilesmith.nn import KernelConfig as KernelConfig

__version__: str

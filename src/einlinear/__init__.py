"""einlinear: linear layers of any structure an einsum can express.

The public names stand in one table and are imported on first use, so that `import einlinear` is
quick and pulls in torch only when a name that needs it is touched.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from einlinear.registration import register_on_demand as _register_on_demand

__version__ = "0.1.0"

if TYPE_CHECKING:
    from einlinear.errors import EinlinearError as EinlinearError
    from einlinear.layers.expert_parallel import ExpertSharding as ExpertSharding
    from einlinear.layers.expert_parallel import average_gradients_ as average_gradients_
    from einlinear.layers.expert_parallel import clip_grad_norm_ as clip_grad_norm_
    from einlinear.layers.expert_parallel import full_state_dict as full_state_dict
    from einlinear.layers.expert_parallel import shard_experts_ as shard_experts_
    from einlinear.layers.linear import EinsumLinear as EinsumLinear
    from einlinear.layers.moe import MoEFeedForward as MoEFeedForward
    from einlinear.layers.moe import MoELinear as MoELinear
    from einlinear.layers.routing import Routing as Routing
    from einlinear.layers.routing import balance_loss as balance_loss
    from einlinear.layers.scaling import Scaling as Scaling
    from einlinear.layers.scaling import embedding_scaling as embedding_scaling
    from einlinear.layers.scaling import matrix_scaling as matrix_scaling
    from einlinear.layers.scaling import rsgd_rates as rsgd_rates
    from einlinear.layers.scaling import vector_scaling as vector_scaling
    from einlinear.layers.tune import tune as tune
    from einlinear.models.check import CoordinateCheck as CoordinateCheck
    from einlinear.models.check import coordinate_check as coordinate_check
    from einlinear.models.conversion import Conversion as Conversion
    from einlinear.models.convert import convert_ as convert_
    from einlinear.models.convert import plan_conversion as plan_conversion
    from einlinear.models.experts import moe as moe
    from einlinear.models.generate import generate as generate
    from einlinear.models.gpt import GPT as GPT
    from einlinear.models.groups import ScalingTable as ScalingTable
    from einlinear.models.groups import param_groups as param_groups
    from einlinear.models.groups import scaling_table as scaling_table
    from einlinear.models.heads import heads as heads
    from einlinear.models.init import init_ as init_
    from einlinear.models.lora import lora as lora
    from einlinear.models.mlp import MLP as MLP
    from einlinear.models.mlp import ResidualMLP as ResidualMLP
    from einlinear.models.scalings import register_scaling as register_scaling
    from einlinear.structures.diagram import draw_structure as draw_structure
    from einlinear.structures.named import btt as btt
    from einlinear.structures.named import dense as dense
    from einlinear.structures.named import kronecker as kronecker
    from einlinear.structures.named import low_rank as low_rank
    from einlinear.structures.named import monarch as monarch
    from einlinear.structures.named import tensor_train as tensor_train
    from einlinear.structures.plan import Plan as Plan
    from einlinear.structures.plan import make_plan as make_plan
    from einlinear.structures.sampling import grid_structures as grid_structures
    from einlinear.structures.sampling import sample_structures as sample_structures
    from einlinear.structures.structure import Structure as Structure
    from einlinear.structures.taxonomy import Taxonomy as Taxonomy
    from einlinear.structures.taxonomy import taxonomy as taxonomy
    from einlinear.structures.text import parse as parse
    from einlinear.studies.config import RunConfig as RunConfig
    from einlinear.studies.config_file import load_config as load_config
    from einlinear.studies.directory import read_record as read_record
    from einlinear.studies.fit import Fit as Fit
    from einlinear.studies.fit import PowerLaw as PowerLaw
    from einlinear.studies.fit import fit_power_law as fit_power_law
    from einlinear.studies.fit import frontier as frontier
    from einlinear.studies.landscape import Landscape as Landscape
    from einlinear.studies.landscape_runs import LandscapeConfig as LandscapeConfig
    from einlinear.studies.landscape_sweep import landscape as landscape
    from einlinear.studies.multiplier import LinfRow as LinfRow
    from einlinear.studies.multiplier import Multiplier as Multiplier
    from einlinear.studies.multiplier import compute_multiplier as compute_multiplier
    from einlinear.studies.multiplier import linf_table as linf_table
    from einlinear.studies.observations import Observations as Observations
    from einlinear.studies.prepare import prepare as prepare
    from einlinear.studies.record import RunRecord as RunRecord
    from einlinear.studies.reports.write import ReportFiles as ReportFiles
    from einlinear.studies.reports.write import report as report
    from einlinear.studies.sweeps.study import Study as Study
    from einlinear.studies.sweeps.study import load_study as load_study
    from einlinear.studies.sweeps.sweep import SweepResult as SweepResult
    from einlinear.studies.sweeps.sweep import sweep as sweep
    from einlinear.studies.tables import read_observations as read_observations
    from einlinear.studies.tasks.catalogue import open_task as open_task
    from einlinear.studies.train import train as train

_HOMES = {
    "EinlinearError": "errors",
    "Structure": "structures.structure",
    "dense": "structures.named",
    "low_rank": "structures.named",
    "kronecker": "structures.named",
    "tensor_train": "structures.named",
    "monarch": "structures.named",
    "btt": "structures.named",
    "parse": "structures.text",
    "Plan": "structures.plan",
    "make_plan": "structures.plan",
    "Taxonomy": "structures.taxonomy",
    "taxonomy": "structures.taxonomy",
    "sample_structures": "structures.sampling",
    "grid_structures": "structures.sampling",
    "draw_structure": "structures.diagram",
    "EinsumLinear": "layers.linear",
    "MoELinear": "layers.moe",
    "MoEFeedForward": "layers.moe",
    "Routing": "layers.routing",
    "balance_loss": "layers.routing",
    "ExpertSharding": "layers.expert_parallel",
    "shard_experts_": "layers.expert_parallel",
    "average_gradients_": "layers.expert_parallel",
    "clip_grad_norm_": "layers.expert_parallel",
    "full_state_dict": "layers.expert_parallel",
    "tune": "layers.tune",
    "convert_": "models.convert",
    "plan_conversion": "models.convert",
    "Conversion": "models.conversion",
    "heads": "models.heads",
    "moe": "models.experts",
    "Scaling": "layers.scaling",
    "embedding_scaling": "layers.scaling",
    "matrix_scaling": "layers.scaling",
    "rsgd_rates": "layers.scaling",
    "vector_scaling": "layers.scaling",
    "CoordinateCheck": "models.check",
    "coordinate_check": "models.check",
    "ScalingTable": "models.groups",
    "param_groups": "models.groups",
    "scaling_table": "models.groups",
    "init_": "models.init",
    "lora": "models.lora",
    "register_scaling": "models.scalings",
    "GPT": "models.gpt",
    "generate": "models.generate",
    "MLP": "models.mlp",
    "ResidualMLP": "models.mlp",
    "LandscapeConfig": "studies.landscape_runs",
    "Landscape": "studies.landscape",
    "landscape": "studies.landscape_sweep",
    "RunConfig": "studies.config",
    "load_config": "studies.config_file",
    "RunRecord": "studies.record",
    "read_record": "studies.directory",
    "train": "studies.train",
    "Study": "studies.sweeps.study",
    "load_study": "studies.sweeps.study",
    "SweepResult": "studies.sweeps.sweep",
    "sweep": "studies.sweeps.sweep",
    "Observations": "studies.observations",
    "read_observations": "studies.tables",
    "frontier": "studies.fit",
    "Fit": "studies.fit",
    "PowerLaw": "studies.fit",
    "fit_power_law": "studies.fit",
    "Multiplier": "studies.multiplier",
    "compute_multiplier": "studies.multiplier",
    "LinfRow": "studies.multiplier",
    "linf_table": "studies.multiplier",
    "ReportFiles": "studies.reports.write",
    "report": "studies.reports.write",
    "prepare": "studies.prepare",
    "open_task": "studies.tasks.catalogue",
}

if not TYPE_CHECKING:  # checkers take names from the imports above, so that a misspelt one is seen
    __all__ = sorted([*_HOMES, "__version__"])

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            message = f"module 'einlinear' has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])  # adds the nearest
        value = getattr(import_module(f"einlinear.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return __all__


_register_on_demand()

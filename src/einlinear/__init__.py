"""einlinear: linear layers of any structure an einsum can express.

The public names stand in one table and are imported on first use, so that `import einlinear` is
quick and pulls in torch only when a name that needs it is touched.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from einlinear.layers.export.registration import register_on_demand as _register_on_demand
from einlinear.models.saving.hook import register_with_transformers as _register_with_transformers
from einlinear.version import __version__ as __version__

if TYPE_CHECKING:
    from einlinear.bench.recommend import Recommendation as Recommendation
    from einlinear.bench.recommend import recommend as recommend
    from einlinear.bench.recommend_model import ModelRecommendation as ModelRecommendation
    from einlinear.bench.recommend_model import recommend_model as recommend_model
    from einlinear.bench.steps import measure_steps as measure_steps
    from einlinear.data.prepare import prepare as prepare
    from einlinear.data.tasks.catalogue import open_task as open_task
    from einlinear.errors import EinlinearError as EinlinearError
    from einlinear.landscapes.config import LandscapeConfig as LandscapeConfig
    from einlinear.landscapes.landscape import landscape as landscape
    from einlinear.landscapes.verdict import Landscape as Landscape
    from einlinear.laws.fit import Fit as Fit
    from einlinear.laws.fit import PowerLaw as PowerLaw
    from einlinear.laws.fit import fit_power_law as fit_power_law
    from einlinear.laws.fit import frontier as frontier
    from einlinear.laws.multiplier import LinfRow as LinfRow
    from einlinear.laws.multiplier import Multiplier as Multiplier
    from einlinear.laws.multiplier import compute_multiplier as compute_multiplier
    from einlinear.laws.multiplier import linf_table as linf_table
    from einlinear.laws.observations import Observations as Observations
    from einlinear.laws.read import read_observations as read_observations
    from einlinear.layers.engine.memory import keep_memory as keep_memory
    from einlinear.layers.linear import EinsumLinear as EinsumLinear
    from einlinear.layers.linear import SumLinear as SumLinear
    from einlinear.layers.moe.layers import MoEFeedForward as MoEFeedForward
    from einlinear.layers.moe.layers import MoELinear as MoELinear
    from einlinear.layers.moe.routing import Routing as Routing
    from einlinear.layers.moe.routing import balance_loss as balance_loss
    from einlinear.layers.moe.sharding import ExpertSharding as ExpertSharding
    from einlinear.layers.moe.sharding import average_gradients_ as average_gradients_
    from einlinear.layers.moe.sharding import clip_grad_norm_ as clip_grad_norm_
    from einlinear.layers.moe.sharding import full_state_dict as full_state_dict
    from einlinear.layers.moe.sharding import shard_experts_ as shard_experts_
    from einlinear.layers.scaling import MatrixAxes as MatrixAxes
    from einlinear.layers.scaling import Scaling as Scaling
    from einlinear.layers.scaling import embedding_scaling as embedding_scaling
    from einlinear.layers.scaling import matrix_scaling as matrix_scaling
    from einlinear.layers.scaling import rsgd_rates as rsgd_rates
    from einlinear.layers.scaling import vector_scaling as vector_scaling
    from einlinear.layers.tune import tune as tune
    from einlinear.models.adapted import AdaptedLinear as AdaptedLinear
    from einlinear.models.adapters.adapt import adapt_ as adapt_
    from einlinear.models.adapters.adaptation import Adaptation as Adaptation
    from einlinear.models.adapters.adapter_folder import load_adapters_ as load_adapters_
    from einlinear.models.adapters.adapter_folder import save_adapters as save_adapters
    from einlinear.models.adapters.merge import merge_ as merge_
    from einlinear.models.adapters.merge import remove_adapters_ as remove_adapters_
    from einlinear.models.convert.cola import from_cola as from_cola
    from einlinear.models.convert.conversion import Conversion as Conversion
    from einlinear.models.convert.convert import convert_ as convert_
    from einlinear.models.convert.convert import plan_conversion as plan_conversion
    from einlinear.models.convert.experts import moe as moe
    from einlinear.models.convert.heads import heads as heads
    from einlinear.models.convert.lora import lora as lora
    from einlinear.models.convert.upcycle import upcycle_ as upcycle_
    from einlinear.models.fusing.fuse import fuse_ as fuse_
    from einlinear.models.fusing.fuse import unfuse_ as unfuse_
    from einlinear.models.fusing.fusion import Fusion as Fusion
    from einlinear.models.generate import generate as generate
    from einlinear.models.gpt import GPT as GPT
    from einlinear.models.mlp import MLP as MLP
    from einlinear.models.mlp import ResidualMLP as ResidualMLP
    from einlinear.models.mup.check import coordinate_check as coordinate_check
    from einlinear.models.mup.check_result import CoordinateCheck as CoordinateCheck
    from einlinear.models.mup.groups import ScalingTable as ScalingTable
    from einlinear.models.mup.groups import param_groups as param_groups
    from einlinear.models.mup.groups import scaling_table as scaling_table
    from einlinear.models.mup.init import init_ as init_
    from einlinear.models.mup.muon import Muon as Muon
    from einlinear.models.saving.card import model_card as model_card
    from einlinear.models.saving.folder import load as load
    from einlinear.models.saving.folder import save as save
    from einlinear.models.survey.scalings import register_scaling as register_scaling
    from einlinear.reports.write import ReportFiles as ReportFiles
    from einlinear.reports.write import report as report
    from einlinear.runs.config import RunConfig as RunConfig
    from einlinear.runs.config_file import load_config as load_config
    from einlinear.runs.directory import read_record as read_record
    from einlinear.runs.record import RunRecord as RunRecord
    from einlinear.runs.sources import read_records as read_records
    from einlinear.runs.step_times import ModelTime as ModelTime
    from einlinear.runs.step_times import StepTimes as StepTimes
    from einlinear.runs.step_times import read_step_times as read_step_times
    from einlinear.searches.search import SearchResult as SearchResult
    from einlinear.searches.search import search as search
    from einlinear.searches.search import search_result as search_result
    from einlinear.searches.space import SearchSpace as SearchSpace
    from einlinear.structures.diagram import draw_structure as draw_structure
    from einlinear.structures.named import btt as btt
    from einlinear.structures.named import dense as dense
    from einlinear.structures.named import kronecker as kronecker
    from einlinear.structures.named import low_rank as low_rank
    from einlinear.structures.named import monarch as monarch
    from einlinear.structures.named import tensor_train as tensor_train
    from einlinear.structures.paper import paper_families as paper_families
    from einlinear.structures.paper import paper_structures as paper_structures
    from einlinear.structures.plan import Plan as Plan
    from einlinear.structures.plan import PlanSum as PlanSum
    from einlinear.structures.plan import make_plan as make_plan
    from einlinear.structures.sampling import grid_structures as grid_structures
    from einlinear.structures.sampling import sample_structures as sample_structures
    from einlinear.structures.structure import Structure as Structure
    from einlinear.structures.structure import StructureSum as StructureSum
    from einlinear.structures.taxonomy import Taxonomy as Taxonomy
    from einlinear.structures.taxonomy import taxonomy as taxonomy
    from einlinear.structures.text import parse as parse
    from einlinear.sweeps.study import Study as Study
    from einlinear.sweeps.study import load_study as load_study
    from einlinear.sweeps.sweep import SweepResult as SweepResult
    from einlinear.sweeps.sweep import sweep as sweep
    from einlinear.training.train import train as train

_HOMES = {
    "EinlinearError": "errors",
    "Structure": "structures.structure",
    "StructureSum": "structures.structure",
    "dense": "structures.named",
    "low_rank": "structures.named",
    "kronecker": "structures.named",
    "tensor_train": "structures.named",
    "monarch": "structures.named",
    "btt": "structures.named",
    "paper_families": "structures.paper",
    "paper_structures": "structures.paper",
    "parse": "structures.text",
    "Plan": "structures.plan",
    "PlanSum": "structures.plan",
    "make_plan": "structures.plan",
    "Taxonomy": "structures.taxonomy",
    "taxonomy": "structures.taxonomy",
    "sample_structures": "structures.sampling",
    "grid_structures": "structures.sampling",
    "draw_structure": "structures.diagram",
    "EinsumLinear": "layers.linear",
    "SumLinear": "layers.linear",
    "MoELinear": "layers.moe.layers",
    "MoEFeedForward": "layers.moe.layers",
    "Routing": "layers.moe.routing",
    "balance_loss": "layers.moe.routing",
    "ExpertSharding": "layers.moe.sharding",
    "shard_experts_": "layers.moe.sharding",
    "average_gradients_": "layers.moe.sharding",
    "clip_grad_norm_": "layers.moe.sharding",
    "full_state_dict": "layers.moe.sharding",
    "tune": "layers.tune",
    "keep_memory": "layers.engine.memory",
    "convert_": "models.convert.convert",
    "plan_conversion": "models.convert.convert",
    "Conversion": "models.convert.conversion",
    "heads": "models.convert.heads",
    "moe": "models.convert.experts",
    "MatrixAxes": "layers.scaling",
    "Scaling": "layers.scaling",
    "embedding_scaling": "layers.scaling",
    "matrix_scaling": "layers.scaling",
    "rsgd_rates": "layers.scaling",
    "vector_scaling": "layers.scaling",
    "CoordinateCheck": "models.mup.check_result",
    "coordinate_check": "models.mup.check",
    "ScalingTable": "models.mup.groups",
    "param_groups": "models.mup.groups",
    "scaling_table": "models.mup.groups",
    "init_": "models.mup.init",
    "Muon": "models.mup.muon",
    "AdaptedLinear": "models.adapted",
    "Adaptation": "models.adapters.adaptation",
    "adapt_": "models.adapters.adapt",
    "merge_": "models.adapters.merge",
    "remove_adapters_": "models.adapters.merge",
    "save_adapters": "models.adapters.adapter_folder",
    "load_adapters_": "models.adapters.adapter_folder",
    "upcycle_": "models.convert.upcycle",
    "Fusion": "models.fusing.fusion",
    "fuse_": "models.fusing.fuse",
    "unfuse_": "models.fusing.fuse",
    "lora": "models.convert.lora",
    "save": "models.saving.folder",
    "load": "models.saving.folder",
    "model_card": "models.saving.card",
    "from_cola": "models.convert.cola",
    "register_scaling": "models.survey.scalings",
    "GPT": "models.gpt",
    "generate": "models.generate",
    "MLP": "models.mlp",
    "ResidualMLP": "models.mlp",
    "LandscapeConfig": "landscapes.config",
    "Landscape": "landscapes.verdict",
    "landscape": "landscapes.landscape",
    "RunConfig": "runs.config",
    "load_config": "runs.config_file",
    "RunRecord": "runs.record",
    "read_record": "runs.directory",
    "read_records": "runs.sources",
    "StepTimes": "runs.step_times",
    "ModelTime": "runs.step_times",
    "read_step_times": "runs.step_times",
    "train": "training.train",
    "SearchResult": "searches.search",
    "search": "searches.search",
    "search_result": "searches.search",
    "SearchSpace": "searches.space",
    "Study": "sweeps.study",
    "load_study": "sweeps.study",
    "SweepResult": "sweeps.sweep",
    "sweep": "sweeps.sweep",
    "Observations": "laws.observations",
    "read_observations": "laws.read",
    "frontier": "laws.fit",
    "Fit": "laws.fit",
    "PowerLaw": "laws.fit",
    "fit_power_law": "laws.fit",
    "Multiplier": "laws.multiplier",
    "compute_multiplier": "laws.multiplier",
    "LinfRow": "laws.multiplier",
    "linf_table": "laws.multiplier",
    "ReportFiles": "reports.write",
    "report": "reports.write",
    "Recommendation": "bench.recommend",
    "recommend": "bench.recommend",
    "ModelRecommendation": "bench.recommend_model",
    "recommend_model": "bench.recommend_model",
    "measure_steps": "bench.steps",
    "prepare": "data.prepare",
    "open_task": "data.tasks.catalogue",
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
_register_with_transformers()

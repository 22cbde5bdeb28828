"""The order of imports: a module may import only what stands above it."""

import ast
from pathlib import Path

import einlinear

ROOT = Path(einlinear.__file__).parent

# Top to bottom. A room is a folder; its files follow in order.
ORDER = [
    "registration",
    "errors",
    "files",
    "pages",
    "structures.edges",
    "structures.values",
    "structures.structure",
    "structures.named",
    "structures.text",
    "structures.sizes",
    "structures.plan",
    "structures.taxonomy",
    "structures.sampling",
    "structures.diagram",
    "structures.atlas",
    "layers.scaling",
    "layers.program",
    "layers.flat",
    "layers.engine",
    "layers.cost",
    "layers.strided",
    "layers.compiled",
    "layers.operators",
    "layers.execute",
    "layers.norm",
    "layers.computed",
    "layers.room",
    "layers.linear",
    "layers.grouped",
    "layers.experts",
    "layers.expert_operators",
    "layers.exchange",
    "layers.routing",
    "layers.mixture",
    "layers.moe",
    "layers.expert_parallel",
    "layers.measure",
    "layers.tune",
    "models.free",
    "models.scalings",
    "models.facts",
    "models.attention",
    "models.obstacles",
    "models.trained",
    "models.sites",
    "models.groups",
    "models.init",
    "models.mlp",
    "models.gpt",
    "models.generate",
    "models.check_plot",
    "models.check",
    "models.heads",
    "models.experts",
    "models.conversion_table",
    "models.conversion",
    "models.rules",
    "models.convert",
    "models.lora",
    "machine",
    "studies.workers",
    "studies.arrays",
    "studies.cifar_batches",
    "studies.images",
    "studies.landscape_runs",
    "studies.landscape_cells",
    "studies.landscape_transfer",
    "studies.landscape_plot",
    "studies.landscape",
    "studies.landscape_train",
    "studies.landscape_sweep",
    "studies.vocabulary",
    "studies.documents",
    "studies.token_info",
    "studies.tokens",
    "studies.token_parts",
    "studies.prepare",
    "studies.pixel_files",
    "studies.tasks.task",
    "studies.tasks.text",
    "studies.tasks.pixels",
    "studies.tasks.regression",
    "studies.tasks.cifar",
    "studies.tasks.catalogue",
    "studies.presets",
    "studies.config",
    "studies.config_file",
    "studies.schedule",
    "studies.numbers",
    "studies.fields",
    "studies.record",
    "studies.observations",
    "studies.tables",
    "studies.selection",
    "studies.law",
    "studies.resample",
    "studies.residuals",
    "studies.fit",
    "studies.multiplier",
    "studies.routing_plot",
    "studies.seals",
    "studies.directory",
    "studies.tensor_files",
    "studies.checkpoint",
    "studies.distributed",
    "studies.sharded",
    "studies.counting",
    "studies.build",
    "studies.needs",
    "studies.threads",
    "studies.state",
    "studies.evaluate",
    "studies.plan_run",
    "studies.signals",
    "studies.loop",
    "studies.train",
    "studies.mirrors",
    "studies.load",
    "studies.sweeps.study",
    "studies.sweeps.claims",
    "studies.sweeps.job",
    "studies.sweeps.plan",
    "studies.sweeps.estimate",
    "studies.sweeps.planner",
    "studies.sweeps.executor",
    "studies.sweeps.local",
    "studies.sweeps.run_job",
    "studies.sweeps.worker",
    "studies.sweeps.inline",
    "studies.sweeps.away",
    "studies.sweeps.ray_driver",
    "studies.sweeps.on_ray",
    "studies.sweeps.on_slurm",
    "studies.sweeps.placing",
    "studies.sweeps.progress",
    "studies.sweeps.driver",
    "studies.sweeps.sweep",
    "studies.reports.shown",
    "studies.reports.sound",
    "studies.reports.gather",
    "studies.reports.ends",
    "studies.reports.analyse",
    "studies.reports.finals",
    "studies.reports.cautions",
    "studies.reports.words",
    "studies.reports.looks",
    "studies.reports.panels",
    "studies.reports.figures",
    "studies.reports.static",
    "studies.reports.reproduce",
    "studies.reports.tables",
    "studies.reports.html_tables",
    "studies.reports.page",
    "studies.reports.write",
    "studies.reports.live",
    "progress",
    "sweep_display",
    "peers",
    "bench_rows",
    "bench",
    "bench_experts",
    "blocks",
    "bench_page",
    "bench_words",
    "terminal",
    "cli_arguments",
    "cli_words",
    "cli_structures",
    "cli_bench",
    "cli_landscape",
    "cli_train",
    "cli_sweep",
    "cli_report",
    "cli",
    "__main__",
]
WITHOUT_TORCH = [
    name
    for name in ORDER
    if name in ("registration", "errors", "files", "pages")
    or name.startswith("structures.")
    or name in ORDER[15:20]
] + [
    "studies.workers",
    "studies.arrays",
    "studies.cifar_batches",
    "studies.images",
    "studies.landscape_runs",
    "studies.landscape_cells",
    "studies.landscape_transfer",
    "studies.landscape_plot",
    "studies.pixel_files",
    "studies.vocabulary",
    "studies.documents",
    "studies.token_info",
    "studies.tokens",
    "studies.token_parts",
    "studies.prepare",
    "studies.pixel_files",
    "studies.presets",
    "studies.config",
    "studies.config_file",
    "studies.schedule",
    "studies.numbers",
    "studies.fields",
    "studies.record",
    "studies.seals",
    "studies.directory",
    "studies.signals",
    "studies.observations",
    "studies.tables",
    "studies.selection",
    "studies.law",
    "studies.resample",
    "studies.residuals",
    "studies.fit",
    "studies.multiplier",
    *(name for name in ORDER if name.startswith("studies.reports.")),
    *(
        f"studies.sweeps.{name}"
        for name in (n.removeprefix("studies.sweeps.") for n in ORDER if ".sweeps." in n)
        if name not in ("estimate", "planner", "run_job", "inline")
    ),
    "sweep_display",
    "cli_sweep",
]


def modules():
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, path


def imported(path):
    """Everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            rooms = ("structures", "layers", "models", "studies")
            is_room = node.module in [f"einlinear.{room}" for room in rooms]
            yield from (f"{node.module}.{a.name}" for a in node.names) if is_room else [node.module]


def test_the_list_is_complete():
    assert sorted(ORDER) == sorted(name for name, _ in modules())


def test_imports_point_upwards_only():
    for name, path in modules():
        above = ORDER[: ORDER.index(name)]
        for target in imported(path):
            if target.startswith("einlinear."):
                inner = target.removeprefix("einlinear.")
                assert inner in above, f"{name} imports {target}"
            elif target == "einlinear":
                assert name in ("cli", "machine"), f"{name} imports the package itself"


def test_modules_that_load_no_torch():
    for name, path in modules():
        if name in WITHOUT_TORCH:
            assert not [target for target in imported(path) if target.split(".")[0] == "torch"]


def test_modules_are_short():
    for name, path in modules():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, name

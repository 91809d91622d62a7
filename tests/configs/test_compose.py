"""Every config composes, and the groups fit each other."""

from dataclasses import fields
from itertools import cycle

import pytest
from hydra.errors import HydraException
from hydra.utils import get_class, get_method
from omegaconf import OmegaConf

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.settings import Settings
from tests.configs.train import hydra_config, train_config

GROUPS = ("optimizer", "scheduler", "trainer", "model", "backend")
WHOLE_GRAPH = (
    "planetoid",
    "pubmed_made_features",
    "heterophilous",
    "facebook",
    "co_purchase",
    "reddit",
    "log_normal_graph",
    "log_normal_pieces_graph",
    "entities",
    "entities_like",
    "imdb",
)
KINDS = {
    "entities": "RGCN",
    "entities_like": "RGCN",
    "imdb": "HGT",
    "fb15k237": "DistMult",
    "links_like": "DistMult",
    "log_normal_pieces_graph": "GCN",
    "solubility": "GINE",
    "qm9": "ContinuousFilterNet",
}
"""Model that a data set names, by the function that makes the data set; others name one by their form."""


def choices(group):
    return sorted(path.stem for path in (configs_dir() / group).glob("*.yaml"))


def composed(*overrides):
    cfg = train_config(*overrides, "paths.run=run")
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def check(config):
    """Targets exist, and one whole graph goes without a loader."""
    get_class(config["model"]["_target_"])
    get_class(config["optimizer"]["_target_"])
    make = get_method(config["data"]["task"]["_target_"])
    assert (config["trainer"]["loader"] is None) == (make.__name__ in WHOLE_GRAPH)
    get_class(config["scheduler"]["_target_"])


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_experiment(experiment):
    config = composed(f"experiment={experiment}")
    check(config)
    # The name says the data set, the config agrees.
    task = config["data"]["task"]
    assert experiment.split("_")[1] in task.get("name", task["_target_"].split(".")[-1]).lower()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data=cora", "trainer.epochs=3", "paths.run=run"],
        ["experiment=gat_cora", "model=gatv2", "+trainer.more=[1,2]", "~optimizer.lr", "model.dropout=0.5"],
        ["trainer.epochs=1,2"],
        ["trainer.epoch=3"],
        ["hydra.job.name=train", "trainer.epochs=3"],
        ["+trainer.epochs=3"],
        ["data=nowhere"],
        ["nowhere@data=cora"],
    ],
)
def test_values_on_a_copy_are_what_hydra_makes_of_them(overrides):
    results = []
    for make in (hydra_config, train_config, train_config):
        try:
            results.append(make(*overrides))
        except HydraException as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("group", GROUPS)
def test_each_choice(group):
    for choice in choices(group):
        config = composed(f"{group}={choice}")
        if group != "trainer":
            check(config)


@pytest.mark.parametrize(("model", "data"), list(zip(choices("model"), cycle(["cora", "cluster"]))))
def test_any_data_with_any_model(data, model):
    """Each model with data that names another; with the default of the run above."""
    check(composed(f"data={data}", f"model={model}"))


def test_original_gat_setting():
    config = composed("data=cora", "model=gat")
    assert config["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.005, "weight_decay": 0.0005}
    model = {key: config["model"][key] for key in ("hidden_channels", "heads", "out_heads", "layers", "dropout")}
    assert model == {"hidden_channels": 8, "heads": 8, "out_heads": 1, "layers": 2, "dropout": 0.6}
    assert config["trainer"]["patience"] == 100 and config["data"]["task"]["normalize_features"]


@pytest.mark.parametrize("data", choices("data"))
def test_data_names_a_model_that_learns_on_it(data):
    """Of one whole graph the graph transformer learns the few labelled nodes by heart."""
    config = composed(f"data={data}")
    check(config)
    whole_graph = config["trainer"]["loader"] is None
    kind = KINDS.get(config["data"]["task"]["_target_"].split(".")[-1], "GAT" if whole_graph else "GraphTransformer")
    assert config["model"]["_target_"].split(".")[-1] == kind


def test_data_yields_to_the_command_line():
    config = composed("data=cora", "model=agnn", "optimizer=adamw", "trainer.epochs=7")
    assert config["model"]["_target_"] == "pyg_dfgnn.models.AGNN"
    assert config["optimizer"]["_target_"] == "torch.optim.AdamW" and config["trainer"]["epochs"] == 7


def test_data_yields_to_an_experiment():
    config = composed("experiment=gt_tolokers")
    assert config["model"]["_target_"] == "pyg_dfgnn.models.GraphTransformer"
    assert config["trainer"]["monitor"] == "val_accuracy"


@pytest.mark.parametrize("name", ["reddit_like_small", "proteins_like_small", "ppa_like_small", "products_like_small"])
def test_small_graphs_train_for_fewer_epochs(name):
    config = composed(f"data={name}")
    assert config["trainer"]["epochs"] == 100 and config["data"].keys() == {"task", "reorder"}
    assert config["data"]["task"]["scale"] == 0.02 and config["data"]["task"]["name"]


@pytest.mark.parametrize("name", ["gcn_papers100m_like", "gatv2_papers100m_like"])
def test_a_graph_that_fills_a_gpu_is_trained_in_16_bits_for_its_labelled_nodes(name):
    config = composed(f"experiment={name}")
    task, model = config["data"]["task"], config["model"]
    assert config["trainer"]["precision"] == "bf16" and task["dtype"] == "bfloat16" and task["as_graph"]
    assert model["readout"] and model["dropout"] == 0 and not model.get("bias")
    assert config["trainer"]["loader"] is None and config["trainer"]["epochs"] == 10


def test_runs_of_a_second_have_folders_of_their_own():
    dirs = set()
    for _ in range(2):
        dirs.add(hydra_config(return_hydra_config=True).hydra.sweep.dir)
    assert len(dirs) == 2
    config = OmegaConf.load(configs_dir() / "hydra" / "default.yaml")
    run, sweep = (OmegaConf.to_container(config, resolve=False)[mode]["dir"].split("/") for mode in ("run", "sweep"))
    assert run[-1] == sweep[-1]


@pytest.mark.parametrize("backend", ["auto", "auto_graph"])
def test_a_backend_has_each_setting_with_its_default(backend):
    config = composed(f"backend={backend}")["backend"]["settings"]
    defaults = {field.name: field.default for field in fields(Settings) if field.init}
    # The environment decides about compiled messages.
    del defaults["compile_messages"]
    assert config == defaults


def test_data_folders_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PYG_DFGNN_DATA", "/somewhere")
    monkeypatch.setenv("PYG_DFGNN_CACHE", "/elsewhere")
    task = composed("data=cora", "model=gat")["data"]["task"]
    assert task["search"][0] == "/somewhere" and task["cache"] == "/elsewhere"
